"""What was handed in is graded, whatever was handed in, and what was graded is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from parallel101.laboratory.grade import command, isolation, submissions
from parallel101.laboratory.grade.exercise import Draw
from parallel101.laboratory.grade.grades import class_table, gradescope_results
from parallel101.laboratory.grade.handed_in import read, submissions_in
from parallel101.laboratory.grade.learner import report_on
from parallel101.laboratory.grade.release import release
from parallel101.laboratory.grade.remote import SubmissionRanks
from parallel101.laboratory.grade.submissions import empty_result, grade_class, grade_submission

ROOT = Path(__file__).parents[2]
TESTS = """
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.grade.exercise_checks import MESSAGES, bytes_sent, value
from parallel101.laboratory.grade.exercise import Case, Exercise

def case(xs):
    return Case([(x,) for x in xs], xs[::-1])

def exercise(number, name):
    once = lambda case: [12, 12]
    checks = value(), bytes_sent(once, "x once")
    return Exercise(
        number, name, "Swap", 4, lambda draw: [case(draw.tensors(2, 3))], checks, once, MESSAGES,
        watch=lambda: case([origin_tensor(rank, 2, 3) for rank in range(2)]),
    )

EXERCISES = [exercise("1", "swap"), exercise("2", "swap_again")]
"""
STUB = """class Given:
    '''One (this is given).'''
    ONE = 1
def swap(x):
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


def test_there_is_a_result_from_the_beginning_on(homework, tmp_path):
    written: list[dict] = []
    path = handed_in(tmp_path / "alice", {"hw9.py": HEAD + RIGHT + FIRST})
    result = grade_submission(path, homework, "a seed", lambda part: written.append(deepcopy(part)))
    assert [sum(entry["graded"] for entry in part["exercises"]) for part in written] == [0, 1, 2, 2]
    tests = gradescope_results(result)["tests"]
    said = [(test["score"], test["max_score"], test["status"]) for test in tests]
    assert said == [(4, 4, "passed"), (0, 4, "failed")]
    assert "rank 0 waits in send to rank 1, at hw9.py:11" in tests[1]["output"]
    waits = gradescope_results(written[1])["tests"][1]
    assert "not graded" in waits["output"] and waits["status"] == "failed"


OFFICIAL = notebook("import hw9", HEAD, RIGHT + "    # hw9", "check(hw9.swap)")
HANDED_IN = {
    "a copy of a notebook": {"hw9-Copy1.ipynb": OFFICIAL, ".ipynb_checkpoints/hw9.ipynb": "{"},
    "a notebook beside the untouched stub": {"hw9.py": STUB, "hw9.ipynb": OFFICIAL},
    "a notebook that uses what is given": {
        "kim.ipynb": notebook(
            "from hw9 import swap", "import hw9", HEAD, RIGHT.replace("1 -", "hw9.Given.ONE -")
        )
    },
    "a file of Windows": {
        "hw9.py": b"\xef\xbb\xbf" + (HEAD + RIGHT).replace("\n", "\r\n").encode()
    },
    "another name, in a folder of a folder": {"final/hw9_alice (1).py": HEAD + RIGHT},
    "a notebook in which IPython is asked": {
        "hw9.ipynb": notebook(
            "%matplotlib inline\nimport parallel101\nf(1)",
            HEAD + "OTHER = 1 - 0\nONE = OTHER\nfiles = !ls\nif files:\n    !ls",
            "%%time\n" + RIGHT.replace("1 -", "ONE -").replace("def", "@torch.no_grad()\ndef"),
            *("swap?", "?swap", "swap??", "swap(", "%timeit swap(1)", "%%bash\nrm hw9.py", "x = $"),
            "ys = [swap(1)]; swap(2)",
            "DEPTH = " + "-" * 100_000 + "1",
            "x = '\0'",
        )
    },
}


@pytest.mark.parametrize("content", HANDED_IN.values(), ids=HANDED_IN)
def test_it_is_found_and_read(homework, tmp_path, content):
    result = grade_submission(handed_in(tmp_path / "bob", content), homework, "a seed")
    assert result["exercises"][0]["points"] == 4, result["exercises"][0]


def test_a_mistake_in_a_file_beside_it_has_its_name_and_line(homework, tmp_path):
    helper = HEAD + RIGHT.replace("return y", "return y[9]") + FIRST
    content = {"hw9.py": "from helper import swap, swap_again\n", "helper.py": helper}
    result = grade_submission(handed_in(tmp_path / "bob", content), homework, "a seed")
    first, second = (entry["problem"] for entry in result["exercises"])
    assert ", at helper.py:7" in first and "at helper.py:11" in second, first + second


def test_a_file_that_never_ends_loading_is_tried_once(homework, tmp_path, monkeypatch):
    case = homework.exercises[0].cases(Draw("a seed"))[0]
    once = replace(case, seconds=0.5)
    exercises = [replace(one, cases=lambda draw: [once]) for one in homework.exercises]
    runs, run = [], SubmissionRanks.run
    monkeypatch.setattr(SubmissionRanks, "run", lambda *a: runs.append(a) or run(*a))
    path = handed_in(
        tmp_path / "eve", {"hw9.py": HEAD + RIGHT + "def f():\n  while True: pass\nf()\n"}
    )
    result = grade_submission(path, replace(homework, exercises=tuple(exercises)), "a seed")
    assert [entry["reason"] for entry in result["exercises"]] == ["time", "time"]
    assert "at hw9.py:" in result["exercises"][1]["problem"] and len(runs) == 1


def test_a_class_is_told_which_of_two_files_was_graded(homework, tmp_path):
    content = {
        "ann/hw9.py": HEAD + RIGHT,
        "ann/hw9.ipynb": notebook(FIRST),
        "bob/hw9.py": STUB,
        "bob/my.ipynb": OFFICIAL,
        "cem/a.py": "",
        "cem/b.py": "",
        "dan/hw9.py": HEAD + RIGHT,
    }
    folder, names = handed_in(tmp_path / "all", content), tmp_path / "names.txt"
    names.write_text("Dan\ndan\nEva\neva\n")
    command.handed_in(homework.folder, folder, json=tmp_path, class_list=names)
    results = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert set(results) == {"ann", "bob", "cem", "dan", "Eva"}
    notes = {name: result["note"] for name, result in results.items()}
    assert notes["ann"] == "hw9.py is graded. hw9.ipynb has swap_again, which isn't graded."
    assert notes["bob"] == "my.ipynb is graded. hw9.py has none of the functions."
    assert notes["bob"] in gradescope_results(results["bob"])["output"] and not notes["dan"]
    assert f"ann: {notes['ann']}" in class_table([*results.values()])
    reasons = {name: results[name]["exercises"][0]["reason"] for name in ("cem", "Eva")}
    assert reasons == {"cem": "wrong file name", "Eva": "not handed in"}


REFUSED = {  # by learner: what was handed in, and what the result says
    "odd": (
        {"\x1b[2Jnotes.txt": "x"},
        r"no hw9.py in what was handed in; there is \x1b[2J",
    ),
    "pipe": ({}, "there is hw9.py"),
    "cem": ({"hw9.py": b"\xff\xfe\x00"}, "not text in UTF-8"),
    "dan": ({"hw9.ipynb": notebook("check(hw9.swap)")}, "The functions are in the .py file"),
    "eva": ({"hw9.ipynb": "[" * 100_000 + "]" * 100_000}, "not a notebook"),
    "fay": ({"hw9.py": "#" * (1 << 20) + "\n"}, "1,048,577 bytes"),
    "gil": ({"hw9.py": "def swap(x): return " + "-" * 100_000 + "x"}, ""),
    "hal": ({"hw9.py": "def swap(x): return x" + ".y" * 100_000}, ""),
    "ida": ({"hw9.py": "def swap(x): return '\0'"}, ""),
    "bob": ({}, "is a link"),
    "peek": ({}, "is a link"),
    "circle": ({}, ""),
    "device": ({}, ""),
}


def test_whatever_is_handed_in_each_learner_has_a_row(homework, tmp_path, capsys):
    """None of these names, encodings, links and nestings stops the class."""
    names = "alice/hw9.py", "=1+1.ipynb", "\x1b[2Jred.ipynb", "n" * 249 + ".ipynb"
    folder = handed_in(tmp_path / "all", dict.fromkeys(names, ""))
    (folder / "alice" / "hw9.py").write_text(HEAD + RIGHT)
    for name, (content, _) in REFUSED.items():
        handed_in(folder / name, content)
    Path(os.fsdecode(os.path.join(os.fsencode(folder), b"j\xf6rg\n.ipynb"))).write_text("")
    for name in ("pipe", "circle", "device"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe" / "hw9.py")
    (folder / "circle" / "hw9.py").symlink_to("hw9.py")
    (folder / "device" / "hw9.py").symlink_to("/dev/zero")
    (folder / "bob").symlink_to("alice")  # somebody else's folder
    (folder / "peek").symlink_to("odd")  # the names in it are not told either
    entries = {entry.name for entry in folder.iterdir()}
    results, table = tmp_path / "results", tmp_path / "class.csv"
    assert command.handed_in(homework.folder, folder, json=results, csv=table) == 0
    shown = capsys.readouterr().out
    assert len(entries) == len(list(results.iterdir())) == len(table.read_text().splitlines()) - 1
    rows = {(row := json.loads(file.read_text()))["student"]: row for file in results.iterdir()}
    assert {name: row["points"] for name, row in rows.items() if row["points"]} == {"alice": 4}
    assert all(row["complete"] for row in rows.values())
    problems = {name: row["exercises"][0]["problem"] for name, row in rows.items()}
    for name, (_, text) in REFUSED.items():
        assert problems[name] and text in problems[name], name
    assert r"j\xf6rg\n" in rows and r"\x1b[2Jred" in shown and "\x1b" not in shown
    assert "'=1+1,0" in table.read_text()


def test_what_a_learner_returns_and_prints_is_said_in_few_plain_words(homework, tmp_path):
    code = HEAD + "def swap(x): print('\\x1b[2J'); return 'x' * 3_900_000\n"
    code += "def swap_again(x): raise ValueError('\\x1b[2J' + '\\u202e' + 'y' * 9_000)\n"
    result = grade_submission(handed_in(tmp_path / "a", {"hw9.py": code}), homework, "a seed")
    first, second = result["exercises"]
    assert len(first["findings"][0]["message"]) < 2_500 and not result["points"]
    assert r"\x1b[2J" in first["text"] and r"\x1b[2J\u202eyyy" in second["problem"]
    text = json.dumps(gradescope_results(result), ensure_ascii=False)
    assert len(text) < 12_000 and text.isprintable()


WRONG_PATHS = {
    "JSON is a folder": ({"json": "there"}, "expected a file"),
    "below a file": ({"csv": "file/results.csv"}, "--csv .*can't be written"),
    "a class's JSON is a file": ({"json": "file", "submission": "there"}, "expected a folder"),
    "an open seed": ({"seed_file": "file"}, "chmod 600"),
    "the seed is a folder": ({"seed_file": "there"}, "no file with a seed"),
    "the seed is empty": ({"seed_file": "empty"}, "is empty"),
    "nothing was handed in": ({"submission": "nowhere"}, "does not exist"),
    "names for one submission": ({"class_list": "file"}, "--class-list needs --submission"),
    "a name that is a path": ({"class_list": "names", "submission": "there"}, "expected a name"),
}


@pytest.mark.parametrize(("options", "text"), WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_a_path_that_cannot_be_used_is_told_before_anything_is_graded(
    homework, tmp_path, monkeypatch, options, text
):
    files = {"there/a.py": "", "there/b.py": "", "file": "seed", "empty": "", "names": "../a"}
    handed_in(tmp_path, files)
    (tmp_path / "there").chmod(0o700)
    (tmp_path / "empty").chmod(0o600)
    monkeypatch.setattr(isolation, "others_reach", lambda folder: True)  # tmp_path is root's
    for function in ("grade_submission", "grade_class"):
        monkeypatch.setattr(command, function, lambda *_, **__: pytest.fail("it was graded"))
    paths = {"submission": None} | {name: tmp_path / path for name, path in options.items()}
    with pytest.raises(ValueError, match=text):
        command.handed_in(homework.folder, **paths)


def test_where_a_rank_could_read_the_submissions_the_teacher_is_told(
    homework, tmp_path, monkeypatch, capsys
):
    folder = handed_in(tmp_path / "all", {"a.ipynb": "", "b.ipynb": ""})
    offered = isolation.Protection(users=True, files=False)
    monkeypatch.setattr(isolation, "protection", lambda: offered)
    monkeypatch.setattr(isolation, "others_reach", lambda folder: True)  # tmp_path is root's
    for mode, told in ((0o755, True), (0o700, False)):
        folder.chmod(mode)
        command.handed_in(homework.folder, folder, json=tmp_path / "results")
        assert ("chmod 700" in capsys.readouterr().out) == told


def test_a_failure_of_the_grader_costs_one_exercise_or_submission(homework, tmp_path, monkeypatch):
    def fails(exercise, *args, **options):
        if exercise.function == "swap":
            raise MemoryError("no memory")
        return report_on(exercise, *args, **options)

    def fails_to_read(path, *_):
        if path.stem == "bob":
            raise OSError("no space left on device")
        return read(path, homework)

    code = HEAD + RIGHT.replace("swap", "swap_again")
    folder = handed_in(tmp_path / "all", {"alice.py": code, "bob.py": code})
    monkeypatch.setattr(submissions, "read", fails_to_read)
    monkeypatch.setattr(submissions, "report_on", fails)
    file = tmp_path / "new" / "results.json"
    assert command.handed_in(homework.folder, folder / "alice.py", gradescope=file) == 0
    tests = json.loads(file.read_text())["tests"]
    assert [test["score"] for test in tests] == [0, 4] and "no memory" in tests[0]["output"]
    paths, results = submissions_in(folder, homework), tmp_path / "results"
    alice, bob = grade_class(paths, homework, results, seed="s", progress=False)
    assert (alice["points"], bob["points"]) == (4, 0)
    assert not alice["complete"] and not bob["complete"]  # both are graded again
    assert "no space left" in bob["exercises"][0]["problem"]


def test_a_class_is_graded_once_and_goes_on_where_it_was(homework, tmp_path):
    content = {"alice/hw9.py": HEAD + RIGHT + FIRST, "bob.py": HEAD + FIRST, "carol/notes.txt": ""}
    folder, results = handed_in(tmp_path / "all", content), tmp_path / "results"
    paths = submissions_in(folder, homework)
    graded = grade_class(paths, homework, results, seed="s", progress=False)
    assert [result["points"] for result in graded] == [4, 0, 0]
    stamps = {file.name: file.stat().st_mtime_ns for file in results.iterdir()}
    (folder / "bob.py").write_text(HEAD + RIGHT)
    graded = grade_class(paths, homework, results, seed="s", jobs=2, progress=False)
    assert [result["points"] for result in graded] == [4, 4, 0]
    now = {file.name: file.stat().st_mtime_ns for file in results.iterdir()}
    assert now.keys() == stamps.keys() and dict(now.items() - stamps.items()).keys() == {"bob.json"}
    (again, *_) = grade_class(paths, homework, results, seed="another", progress=False)
    assert again["hash"] == empty_result(paths[0], homework, "another")["hash"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_class_that_is_ended_leaves_no_process(homework, tmp_path, sent):
    stays = "import time\ndef swap(x): time.sleep(60)\n"
    folder = handed_in(tmp_path / "all", {f"{n}/hw9.py": stays for n in range(9)})
    code = f"""if __name__ == "__main__":
    from pathlib import Path
    from parallel101.laboratory.grade.command import handed_in
    results = Path({str(tmp_path / "results")!r})
    handed_in(Path({str(homework.folder)!r}), Path({str(folder)!r}), json=results, jobs=2)
"""
    handed_in(tmp_path, {"script.py": code})
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        # a shell lets background jobs ignore it, and so what they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    graded, below = psutil.Process(process.pid), []
    while len(below) < 8:  # two processes, their fork servers, two ranks each, the resource tracker
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        below = graded.children(recursive=True)
    process.send_signal(signal.Signals[sent])
    said = process.communicate(timeout=30)[1]
    ended = {"SIGINT": -signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
    assert process.returncode == ended[sent] and ("KeyboardInterrupt" in said) == (sent == "SIGINT")
    assert not psutil.wait_procs(below, timeout=20)[1]
    # its folders are gone, if the system left it the time
    assert sent == "SIGKILL" or not list(tmp_path.glob("parallel101_*"))


def test_a_pool_whose_process_is_killed_gives_each_learner_a_row(homework, tmp_path, monkeypatch):
    pool = MagicMock(**{"return_value.__exit__.return_value": None})
    killed = {"exception.return_value": BrokenProcessPool("killed")}
    pool.return_value.__enter__.return_value.submit = lambda *_: MagicMock(**killed)
    monkeypatch.setattr(submissions, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(submissions, "as_completed", list)
    folder = handed_in(tmp_path / "all", {"alice.py": "", "bob.py": ""})
    paths = submissions_in(folder, homework)
    graded = grade_class(paths, homework, tmp_path, seed="s", jobs=2, progress=False)
    assert [result["student"] for result in graded] == ["alice", "bob"]
    assert all("killed" in result["exercises"][0]["problem"] for result in graded)
    assert (tmp_path / "alice.json").exists() and (tmp_path / "bob.json").exists()


def test_a_link_beside_the_file_is_not_followed(homework, tmp_path):
    folder = handed_in(tmp_path / "dan", {"hw9.py": HEAD, "../seed.txt": "secret = 1"})
    (folder / "helper.py").symlink_to(tmp_path / "seed.txt")
    assert not read(folder, homework).files


@pytest.mark.skipif(sys.platform == "win32", reason="run_autograder is a bash script")
def test_only_the_autograder_has_the_seed_and_it_runs_as_gradescope_lays_it_out(homework, tmp_path):
    """/autograder/source has the zip, /autograder/submission what was handed in,
    /autograder/results gets results.json.
    """
    learners, gradescope, github, seed_file = release(homework, tmp_path / "out")
    seed = seed_file.read_text().strip()
    # a second release keeps it
    assert len(seed) == 32 and release(homework, tmp_path / "out")[3].read_text().strip() == seed
    with zipfile.ZipFile(learners) as bundle:
        handed_out = [bundle.read(name) for name in bundle.namelist()]
    handed_out += [file.read_bytes() for file in github.rglob("*") if file.is_file()]
    assert handed_out and not any(seed.encode() in content for content in handed_out)
    base = tmp_path / "autograder"
    with zipfile.ZipFile(gradescope) as bundle:
        assert {"seed.txt", "hw9_swap/test_hw9.py"} <= {*bundle.namelist()}
        for name in ("setup.sh", "run_autograder"):
            assert bundle.getinfo(name).external_attr >> 16 & 0o111
        bundle.extractall(base / "source")
    # still one submission
    handed_in(base / "submission", {"hw9 (1).py": HEAD + RIGHT, "notes.py": "", "figures/a.py": ""})
    grader = tmp_path / "grader"
    grader.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m parallel101.cli "$@"\n')
    grader.chmod(0o755)
    (base / "source" / "seed.txt").chmod(0o600)
    environ = {"AUTOGRADER": str(base), "GRADER": str(grader), "PYTHONPATH": str(ROOT)}
    script = ["bash", str(base / "source" / "run_autograder")]
    subprocess.run(script, check=True, env={**os.environ, **environ}, timeout=100)
    tests = json.loads((base / "results" / "results.json").read_text())["tests"]
    assert [test["score"] for test in tests] == [4, 0]
