"""What was handed in is graded, whatever was handed in, and what was graded is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from parallel101.grade import command, submissions
from parallel101.grade.gradescope import gradescope_results
from parallel101.grade.homework import HomeworkSet, find_sets
from parallel101.grade.release import release
from parallel101.grade.submissions import (
    NoSubmission,
    class_table,
    empty_result,
    grade_class,
    grade_submission,
    read,
    submissions_in,
)

TESTS = """
from parallel101.grade.exercise_checks import MESSAGES, bytes_sent, value
from parallel101.grade.exercise import Case, Exercise

def cases(draw):
    xs = draw.tensors(2, 3)
    return [Case([(x,) for x in xs], xs[::-1])]

def exercise(name):
    once = lambda case: [12, 12]
    checks = value(), bytes_sent(once, "x once")
    return Exercise("1", name, "Swap", 4, cases, checks, once, MESSAGES)

EXERCISES = [exercise("swap"), exercise("swap_again")]
"""
STUB = """def swap(x):
    raise NotImplementedError
def swap_again(x):
    raise NotImplementedError
"""
HEAD = "import torch, torch.distributed as dist\n"
RIGHT = """
def swap(x):
    y, other = torch.empty_like(x), 1 - dist.get_rank()
    works = [dist.irecv(y, other), dist.isend(x, other)]
    [work.wait() for work in works]
    return y
"""
FIRST = """
def swap_again(x):
    y, other = torch.empty_like(x), 1 - dist.get_rank()
    dist.send(x, other)
    dist.recv(y, other)
    return y
"""


@pytest.fixture
def homework(tmp_path) -> HomeworkSet:
    folder = tmp_path / "homework" / "hw9_swap"
    folder.mkdir(parents=True)
    (folder / "test_hw9.py").write_text(TESTS)
    (folder / "hw9.py").write_text(STUB)
    return find_sets(folder)[0]


def handed_in(folder: Path, content: dict[str, str | bytes]) -> Path:
    for name, text in content.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def notebook(*cells: str) -> str:
    return json.dumps(
        {"cells": [{"cell_type": "code", "source": cell} for cell in cells], "nbformat": 4}
    )


def test_a_result_for_each_exercise_with_points_misconception_and_text(homework, tmp_path):
    written: list[dict] = []
    path = handed_in(tmp_path / "alice", {"hw9.py": HEAD + RIGHT + FIRST})
    result = grade_submission(
        path, homework, "a seed", lambda result: written.append(json.loads(json.dumps(result)))
    )
    assert (result["student"], result["points"], result["out_of"], result["complete"]) == (
        "alice",
        4,
        8,
        True,
    )
    assert [
        entry["misconception"] and entry["misconception"]["name"] for entry in result["exercises"]
    ] == [None, "everyone sends first"]
    # partial results, after each exercise
    assert [sum(entry["graded"] for entry in part["exercises"]) for part in written] == [1, 2, 2]
    tests = gradescope_results(result)["tests"]
    assert [(test["score"], test["max_score"], test["status"]) for test in tests] == [
        (4, 4, "passed"),
        (0, 4, "failed"),
    ]
    assert "rank 0 waits in send to rank 1, at hw9.py:11" in tests[1]["output"]
    assert "not graded" in gradescope_results(written[0])["tests"][1]["output"]


HANDED_IN = {
    "line endings of Windows": {"hw9.py": (HEAD + RIGHT).replace("\n", "\r\n")},
    "in a folder of a folder": {"final/hw9.py": HEAD + RIGHT},
    "another name": {"hw9_alice (1).py": HEAD + RIGHT},
    "a byte order mark": {"hw9.py": b"\xef\xbb\xbf" + (HEAD + RIGHT).encode()},
    "a file that it imports": {"hw9.py": "from helper import swap\n", "helper.py": HEAD + RIGHT},
    "a notebook": {
        "hw9.ipynb": notebook(
            "%matplotlib inline\n" + HEAD, "from parallel101.grade import check\ncheck(1)", RIGHT
        )
    },
}


@pytest.mark.parametrize("content", HANDED_IN.values(), ids=HANDED_IN)
def test_it_is_found_and_read(homework, tmp_path, content):
    result = grade_submission(handed_in(tmp_path / "bob", content), homework, "a seed")
    assert result["exercises"][0]["points"] == 4, result["exercises"][0]


REFUSED = {
    "nothing": ({"notes.txt": "x"}, "there is no hw9.py in what was handed in; there is notes.txt"),
    "not text": ({"hw9.py": b"\xff\xfe\x00"}, "not text in UTF-8"),
    "a notebook without the functions": (
        {"hw9.ipynb": notebook("check(hw9.swap)")},
        "The functions are in the .py file",
    ),
    "no notebook": ({"hw9.ipynb": "{"}, "not a notebook"),
}


@pytest.mark.parametrize(("content", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_graded_says_what_was_expected(homework, tmp_path, content, text):
    path = handed_in(tmp_path / "carol", content)
    with pytest.raises(NoSubmission, match=text):
        read(path, homework)
    result = grade_submission(path, homework, "a seed")
    assert (
        result["complete"] and result["points"] == 0 and text in result["exercises"][0]["problem"]
    )


def test_a_class_is_graded_once_and_goes_on_where_it_was(homework, tmp_path, capsys):
    folder = handed_in(
        tmp_path / "all",
        {"alice/hw9.py": HEAD + RIGHT + FIRST, "bob.py": HEAD + FIRST, "carol/notes.txt": ""},
    )
    paths = submissions_in(folder, homework)
    results = tmp_path / "results"
    graded = grade_class(paths, homework, results, seed="s", progress=False)
    assert [(result["student"], result["points"]) for result in graded] == [
        ("alice", 4),
        ("bob", 0),
        ("carol", 0),
    ]
    assert "2 of 3 learners: everyone sends first (exercise 1)" in class_table(graded)
    stamps = {file.name: file.stat().st_mtime_ns for file in results.iterdir()}
    (folder / "bob.py").write_text(HEAD + RIGHT)
    assert [
        result["points"]
        for result in grade_class(paths, homework, results, seed="s", jobs=2, progress=False)
    ] == [4, 4, 0]
    assert {
        file.name for file in results.iterdir() if file.stat().st_mtime_ns != stamps[file.name]
    } == {"bob.json"}
    assert command.handed_in(homework.folder, folder, json=results, csv=tmp_path / "class.csv") == 0
    assert (tmp_path / "class.csv").read_text().splitlines()[
        1
    ] == "alice,4.0,8,4.0,,,0.0,deadlock,everyone sends first"
    assert "3 submissions, 2.7 of 8 points on average" in capsys.readouterr().out


def test_another_seed_grades_a_class_again_and_equal_names_keep_their_results(homework, tmp_path):
    folder = handed_in(
        tmp_path / "all",
        {
            "alice.py": HEAD + RIGHT,
            "alice.ipynb": notebook("check(1)"),
            "bob.py": "from alice import swap",
        },
    )
    paths, results = submissions_in(folder, homework), tmp_path / "results"
    for seed in ("a", "b"):
        assert [
            result["points"]
            for result in grade_class(paths, homework, results, seed=seed, progress=False)
        ] == [0, 4, 0]
    hashes = [json.loads(file.read_text())["hash"] for file in sorted(results.iterdir())]
    assert [file.name for file in sorted(results.iterdir())] == [
        "alice.ipynb.json",
        "alice.py.json",
        "bob.json",
    ]
    assert hashes == [empty_result(path, homework, "b")["hash"] for path in paths]


def test_a_failure_of_the_grader_costs_one_submission(homework, tmp_path, monkeypatch):
    folder = handed_in(tmp_path / "all", {"alice.py": HEAD + RIGHT, "bob.py": HEAD + RIGHT})

    def fails(path, *_):
        if path.stem == "alice":
            raise OSError("no space left on device")
        return read(path, homework)

    monkeypatch.setattr(submissions, "read", fails)
    alice, bob = grade_class(
        submissions_in(folder, homework), homework, tmp_path / "results", seed="s", progress=False
    )
    assert (
        (alice["points"], bob["points"]) == (0, 4)
        and "no space left" in alice["exercises"][0]["problem"]
        and not alice["complete"]
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_a_class_at_once_and_leaves_no_process(homework, tmp_path):
    stays = "def swap(x):\n    while True: pass\n"
    folder = handed_in(tmp_path / "all", {f"{n}/hw9.py": stays for n in range(9)})
    code = f"""if __name__ == "__main__":
    from pathlib import Path
    from parallel101.grade.command import handed_in
    results = Path({str(tmp_path / "results")!r})
    handed_in(Path({str(homework.folder)!r}), Path({str(folder)!r}), json=results, jobs=2)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environ,
        stderr=subprocess.PIPE,
        # a shell lets background jobs ignore it, and so what they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    graded, below = psutil.Process(process.pid), []
    while len(below) < 8:  # two processes, their fork servers, two ranks each, the resource tracker
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        below = graded.children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1].decode()
    assert not psutil.wait_procs(below, timeout=10)[1]


def test_a_link_is_not_followed(homework, tmp_path):
    secret = tmp_path / "seed.txt"
    secret.write_text("secret = 1")
    folder = handed_in(tmp_path / "dan", {"hw9.py": HEAD})
    (folder / "helper.py").symlink_to(secret)
    assert not read(folder, homework).files
    (folder / "hw9.py").unlink()
    (folder / "hw9.py").symlink_to(secret)
    with pytest.raises(NoSubmission, match="is a link"):
        read(folder, homework)


def test_another_seed_draws_other_cases(homework):
    from parallel101.grade.exercise import Draw

    exercise = homework.exercises[0]
    first, second = (
        exercise.cases(Draw(seed, exercise.function))[0].arguments[0][0] for seed in ("a", "b")
    )
    assert not first.equal(second)


def test_the_release_has_no_solutions_and_only_the_autograder_has_the_seed(homework, tmp_path):
    (homework.folder / ".progress.json").write_text("{}")
    learners, gradescope, github, seed_file = release(homework, tmp_path / "out")
    seed = seed_file.read_text().strip()
    # a second release keeps it
    assert len(seed) == 32 and release(homework, tmp_path / "out")[3].read_text().strip() == seed
    with zipfile.ZipFile(learners) as bundle:
        assert sorted(bundle.namelist()) == ["hw9_swap/hw9.py", "hw9_swap/test_hw9.py"]
        assert not any(seed in bundle.read(name).decode() for name in bundle.namelist())
    files = [file for file in github.rglob("*") if file.is_file()]
    assert not any(seed.encode() in file.read_bytes() for file in files)
    with zipfile.ZipFile(gradescope) as bundle:
        names = bundle.namelist()
        assert {"setup.sh", "run_autograder", "seed.txt", "hw9_swap/test_hw9.py"} <= set(names)
        assert not any("reference" in name for name in names)
        assert all(
            bundle.getinfo(name).external_attr >> 16 & 0o111
            for name in ("setup.sh", "run_autograder")
        )


@pytest.mark.skipif(sys.platform == "win32", reason="run_autograder is a bash script")
def test_the_autograder_runs_as_gradescope_lays_it_out(homework, tmp_path):
    """/autograder/source has the zip, /autograder/submission what was handed in,
    /autograder/results gets results.json.
    """
    base = tmp_path / "autograder"
    with zipfile.ZipFile(release(homework, tmp_path / "out")[1]) as bundle:
        bundle.extractall(base / "source")
    # still one submission
    handed_in(base / "submission", {"hw9 (1).py": HEAD + RIGHT, "notes.py": "", "figures/a.py": ""})
    (base / "results").mkdir()
    grader = tmp_path / "grader"
    grader.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m parallel101.cli "$@"\n')
    grader.chmod(0o755)
    environ = {
        **os.environ,
        "AUTOGRADER": str(base),
        "GRADER": str(grader),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    subprocess.run(
        ["bash", str(base / "source" / "run_autograder")],
        check=True,
        env=environ,
        capture_output=True,
        timeout=100,
    )
    tests = json.loads((base / "results" / "results.json").read_text())["tests"]
    assert [test["score"] for test in tests] == [4, 0]
    assert not empty_result(base, homework)["complete"]
