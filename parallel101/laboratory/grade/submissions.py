"""Grades what learners have handed in: one submission, or a folder of them, several at a time.

    submissions/alice/hw1.py   ──▶  results/alice.json   a result for each exercise, written as
    submissions/bob/hw1.ipynb  ──▶  results/bob.json     soon as the exercise is graded
                                    results.csv          points, and why points are missing
                                    feedback/alice.html  a page for each learner (feedback.py)

It also tells which misconceptions the class has. An interrupted run continues where it was: a
submission whose result is on disk is not graded again, unless its file has changed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import linecache
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from parallel101.laboratory.grade.exercise import Exercise
from parallel101.laboratory.grade.grading import ExerciseVerdict, grade
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets
from parallel101.laboratory.grade.notebook_functions import (
    NoSubmission,
    bound,
    functions_in_notebook,
)
from parallel101.laboratory.grade.plain_text import cell, plain, plain_name
from parallel101.laboratory.grade.remote import Submission
from parallel101.laboratory.grade.users import RANKS, end_processes_of, user_of

# of one submission, as JSON: student, set, hash, points, out_of, complete, exercises, and a note on
# the choice of its file
Result = dict[str, Any]
MOST_SOURCE = 1 << 20  # bytes of a file that is handed in
MOST_NOTEBOOK = 1 << 25  # of a notebook, which may have pictures
MOST_FILES = 20  # that are read
TESTS = ("test_", "conftest")
NOT_HANDED_IN = "not handed in"


# ---- one submission ----


def read(path: Path, homework: HomeworkSet) -> Submission:
    """Return what was handed in: a Python file or a notebook, or a folder with one.

    In a folder it is the first file that has one of the functions written: hw1.py, then hw1*.py,
    hw1*.ipynb, and then any other. Messages call it by its file name, and quote its lines.

    Raises NoSubmission, with what was expected.
    """
    try:
        return _read(path, homework)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or str(error)
        raise NoSubmission(f"{plain_name(path)} can't be read: {plain(why)}") from None


def _read(path: Path, homework: HomeworkSet) -> Submission:
    if path.is_symlink():
        raise NoSubmission(f"{plain_name(path)} is a link; hand in the file or the folder itself")
    wanted = [exercise.function for exercise in homework.exercises]
    files = _files_in(path, homework.code)
    programs: dict[Path, str] = {}
    errors: dict[Path, Exception] = {}
    for file in files:
        try:
            programs[file] = _program(file, path, homework)
        except (NoSubmission, OSError, RuntimeError) as error:
            errors[file] = error
    written = {file: bound(program, wanted) for file, program in programs.items()}
    chosen = next((file for file in programs if written[file]), files[0])
    if chosen in errors:
        raise errors[chosen]
    name, text = plain_name(chosen), programs[chosen]
    if not written[chosen] and len(files) > 1 and not name.startswith(homework.code.stem):
        raise NoSubmission(
            f"there is no {homework.code.name}, and none of {', '.join(map(plain_name, files))} "
            f"defines one of {', '.join(wanted)}",
            "wrong file name",
        )
    # None: not read from disk again
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    # a file with another name may be among other learners' files
    own_folder = path.is_dir() or chosen.name == homework.code.name
    note = "" if chosen == files[0] else f"{plain_name(files[0])} has none of the functions. "
    for other in programs:
        if more := written[other] - written[chosen]:
            note += f"{plain_name(other)} has {', '.join(sorted(more))}, which isn't graded. "
    return Submission(
        Path(name),
        text,
        dict(_neighbours(chosen, path)) if own_folder else {},
        homework.code.stem,
        note and f"{name} is graded. {note.strip()}",
    )


def _program(file: Path, path: Path, homework: HomeworkSet) -> str:
    """Return the text of a Python file, or the program in a notebook."""
    name = plain_name(file)
    _refuse_links(file, path)
    most = MOST_SOURCE if file.suffix == ".py" else MOST_NOTEBOOK
    if (size := file.stat().st_size) > most:
        raise NoSubmission(f"{name} has {size:,} bytes; expected a program of at most {most:,}")
    try:
        text = file.read_text(encoding="utf-8-sig")  # line endings of Windows become \n
    except UnicodeDecodeError as error:
        raise NoSubmission(
            f"{name} is not text in UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from None
    return functions_in_notebook(name, text, homework) if file.suffix == ".ipynb" else text


def _refuse_links(file: Path, path: Path) -> None:
    """Raise an error for a link that was handed in.

    It could show the learner a file that only the grader may read, such as the secret seed.
    """
    handed_in = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    if not file.resolve().is_relative_to(handed_in):
        raise NoSubmission(f"{plain_name(file)} is a link to another file; hand in the file itself")


def _files_in(path: Path, code: Path) -> list[Path]:
    """Return the files that may be the submission, the likeliest first.

    Raises NoSubmission if there is none.
    """
    name = code.name
    if not path.exists():
        raise NoSubmission(
            f"{plain(str(path))} does not exist; expected {name}, or a folder with it",
            NOT_HANDED_IN,
        )
    if not path.is_dir():
        if path.suffix not in (".py", ".ipynb") or not path.is_file():
            raise NoSubmission(f"{plain_name(path)} is not a Python file; expected {name}")
        return [path]
    found = [
        file
        for file in path.rglob("*")
        if file.suffix in (".py", ".ipynb")
        and file.is_file()
        and not any(part[0] == "." for part in file.relative_to(path).parts)
        and not file.name.startswith(TESTS)
    ]
    if not found:
        there = ", ".join(sorted(plain_name(file) for file in path.iterdir())[:8]) or "nothing"
        raise NoSubmission(
            f"there is no {name} in what was handed in; there is {there}", NOT_HANDED_IN
        )
    return sorted(
        found,
        key=lambda file: (
            file.name != name,
            not file.name.startswith(code.stem),
            file.suffix == ".ipynb",
            len(file.parts),
            file,
        ),
    )[:MOST_FILES]


def _neighbours(file: Path, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, source) for other Python files beside the file, which it may import."""
    left = MOST_SOURCE  # bytes of all of them
    for other in sorted(file.parent.glob("*.py"))[:50]:
        if other == file or other.name.startswith(TESTS):
            continue
        try:
            _refuse_links(other, path if path.is_dir() else other)
            # not a folder, nor a pipe, of which nobody would write the end
            if other.is_file() and other.stat().st_size <= left:
                source = other.read_text(encoding="utf-8-sig")
                left -= len(source)
                yield other.stem, source
        except (OSError, RuntimeError, UnicodeDecodeError, NoSubmission):
            continue


def grade_submission(
    path: Path,
    homework: HomeworkSet,
    seed: str,
    written: Callable[[Result], object] = lambda result: None,
    page: Path | None = None,
) -> Result:
    """Grade all exercises of a submission.

    `written` is called with the result so far after each exercise. `page` is the file for the
    learner's page of feedback; None: no page is written.
    """
    feedback = None
    if page is not None:
        from parallel101.laboratory.grade.feedback import Feedback  # loads what draws the pictures

        feedback = Feedback()
    result = empty_result(path, homework, seed)
    written(result)
    submission: Submission | None = None
    complete = True
    try:
        submission = read(path, homework)
        result["note"] = submission.note
    except Exception as error:
        complete = isinstance(error, NoSubmission)
        for entry in result["exercises"]:
            entry["problem"] = str(error) if complete else _grader_failed(error)
            if isinstance(error, NoSubmission):
                entry["reason"] = error.reason
    run = grade if feedback is None else feedback.grade
    for place, exercise in enumerate(homework.exercises):
        if submission is not None:
            try:
                result["exercises"][place] = exercise_result(run(exercise, submission, seed))
            except Exception as error:
                complete = False
                result["exercises"][place]["problem"] = _grader_failed(error)
        result["points"] = round(sum(entry["points"] for entry in result["exercises"]), 2)
        written(result)
    if feedback is not None and page is not None:
        feedback.write(page, homework, result)
    result["complete"] = complete  # otherwise it is graded again the next time
    written(result)
    return result


def _grader_failed(error: Exception) -> str:
    return f"the grader failed: {plain(repr(error))}. Grade it again"


def empty_result(path: Path, homework: HomeworkSet, seed: str = "") -> Result:
    """Return the result of a submission before any exercise is graded: no points."""
    exercises = [_entry(exercise) for exercise in homework.exercises]
    out_of = sum(exercise.points for exercise in homework.exercises)
    return {
        "student": student(path),
        "set": homework.folder.name,
        "hash": content_hash(path, homework, seed),
        "points": 0.0,
        "out_of": out_of,
        "complete": False,
        "note": "",
        "exercises": exercises,
    }


def _entry(exercise: Exercise) -> dict[str, Any]:
    return {
        "number": exercise.number,
        "function": exercise.function,
        "title": exercise.title,
        "points": 0.0,
        "out_of": exercise.points,
        "graded": False,
        "not_written": False,
        "reason": "not graded",  # why points are missing, in a word or two
        "misconception": None,
        "problem": "",
        "findings": [],
        "seconds": 0.0,
    }


def exercise_result(verdict: ExerciseVerdict) -> dict[str, Any]:
    """Return a verdict as JSON."""
    mistake = verdict.misconception
    findings = [
        {
            "kind": f.kind,
            "says": f.says,
            "passed": f.passed,
            "points": round(f.points, 2),
            "out_of": round(f.out_of, 2),
            "message": plain(f.message),
        }
        for f in verdict.findings
    ]
    return _entry(verdict.exercise) | {
        "points": verdict.points,
        "graded": True,
        "not_written": verdict.not_written,
        "reason": plain(verdict.reason),
        "problem": plain(verdict.problem),
        "misconception": {"name": mistake.name, "says": mistake.says} if mistake else None,
        "findings": findings,
        "seconds": round(verdict.seconds, 2),
    }


def student(path: Path) -> str:
    """Return the learner's name: the name of the file or folder."""
    return plain_name(path.stem if path.is_file() else path.name)


def content_hash(path: Path, homework: HomeworkSet, seed: str) -> str:
    """Return a hash that changes with the submission, the exercises or the seed of the cases."""
    total = hashlib.sha256(b"".join(tests.read_bytes() for tests in homework.tests) + seed.encode())
    try:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
    except OSError:
        files = []
    for file in files:
        try:
            if file.suffix in (".py", ".ipynb") and file.is_file() and not file.is_symlink():
                total.update(os.fsencode(file.name) + b"\0")
                with file.open("rb") as content:
                    total.update(content.read(MOST_NOTEBOOK))
        except OSError:  # it can't be read: the verdict says so
            total.update(b"\0")
    return total.hexdigest()


# ---- a class ----


def grade_class(
    submissions: Sequence[Path],
    homework: HomeworkSet,
    results: Path,
    *,
    seed: str,
    jobs: int = 1,
    progress: bool = True,
    feedback: Path | None = None,
) -> list[Result]:
    """Grade many submissions into `results`, one JSON file each.

    Those whose result is there already are not graded again.

    Args:
        submissions: a file or a folder for each learner.
        results: the folder for the results; it is made.
        jobs: how many are graded at a time, each in a process of its own.
        feedback: the folder for a page for each learner, which exists; None: no pages.
    """
    results.mkdir(parents=True, exist_ok=True)
    names = _result_names(submissions)
    pages: dict[Path, Path | None] = dict.fromkeys(submissions)
    if feedback is not None:
        pages = {path: feedback / f"{names[path].removesuffix('.json')}.html" for path in names}
    done = {
        path: found
        for path in submissions
        if (found := _finished(path, homework, results / names[path], seed)) is not None
        and ((page := pages[path]) is None or page.exists())
    }
    left = [path for path in submissions if path not in done]
    with tqdm(
        total=len(submissions), initial=len(done), desc="submissions", disable=not progress
    ) as bar:
        if jobs == 1:
            for path in left:
                done[path] = _grade_into(
                    path, homework.tests[0], results / names[path], seed, pages[path]
                )
                bar.update()
        else:
            for path, result in _by_pool(
                left, homework.tests[0], results, names, pages, seed, jobs
            ):
                done[path] = result
                bar.update()
    return [done[path] for path in submissions]


def _by_pool(
    left: Sequence[Path],
    tests: Path,
    results: Path,
    names: dict[Path, str],
    pages: dict[Path, Path | None],
    seed: str,
    jobs: int,
) -> Iterator[tuple[Path, Result]]:
    """Grade submissions in several processes, and yield each with its result.

    If a process is killed, what is left is tried once more.
    """
    context = multiprocessing.get_context("spawn")
    for last in (False, True):
        killed: list[Path] = []
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_when_told) as pool:
            running = {
                pool.submit(
                    _grade_into, path, tests, results / names[path], seed, pages[path]
                ): path
                for path in left
            }
            try:
                for future in as_completed(running):
                    try:
                        yield running[future], future.result()
                    except BrokenProcessPool as error:
                        killed.append(running[future])
                        if last:
                            file = results / names[running[future]]
                            yield running[future], _not_graded(running[future], tests, file, error)
            except BaseException:  # Ctrl-C: what is being graded ends now; the rest is not begun
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
        left = killed
        if not left:
            return


_told_to_end = False  # in a process of the pool


def _end_when_told() -> None:
    """Let SIGTERM end the run that is going on, with its ranks, in a process of the pool.

    The end of the process that grades has the same effect.
    """

    def end(*_: object) -> None:
        global _told_to_end
        _told_to_end = True
        raise SystemExit(1)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        # At once: the main thread may wait in a call that no signal interrupts. The fork server
        # ends with this process, and kills its ranks.
        end_processes_of({user for rank in range(RANKS) if (user := user_of(rank)) is not None})
        os._exit(1)

    # Ctrl-C reaches the process that grades, which tells this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()


def _grade_into(path: Path, tests: Path, file: Path, seed: str, page: Path | None) -> Result:
    """Grade one submission of a class. Whatever goes wrong costs this submission only."""
    if _told_to_end:
        raise SystemExit(1)
    try:
        homework = _set_of(tests)
        return grade_submission(path, homework, seed, lambda result: write_json(file, result), page)
    except Exception as error:
        return _not_graded(path, tests, file, error)


@lru_cache(maxsize=1)
def _set_of(tests: Path) -> HomeworkSet:
    """Return the set, which is loaded once in each process."""
    (homework,) = find_sets(tests)
    return homework


def _not_graded(path: Path, tests: Path, file: Path, error: Exception) -> Result:
    """Return the result of a submission with which the grader failed. It will be graded again."""
    homework = _set_of(tests)
    result = empty_result(path, homework) | {"hash": ""}
    for entry in result["exercises"]:
        entry["problem"] = _grader_failed(error)
    with suppress(OSError):
        write_json(file, result)
    return result


def _finished(path: Path, homework: HomeworkSet, file: Path, seed: str) -> Result | None:
    """Return the complete result of this very submission, if it is on disk."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return (
            found
            if found["complete"] and found["hash"] == content_hash(path, homework, seed)
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _result_names(submissions: Sequence[Path]) -> dict[Path, str]:
    """Return the file of each result, such as alice.json.

    If both were handed in, they are alice.py.json and alice.ipynb.json.
    """
    short = {path: student(path) for path in submissions}
    often = Counter(short.values())
    names = {path: plain_name(path) if often[name] > 1 else name for path, name in short.items()}
    often = Counter(names.values())
    for path, name in names.items():
        if often[name] > 1 or "\\" in name or "…" in name:  # names that are shown alike
            names[path] = f"{name} {hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    return {path: f"{name}.json" for path, name in names.items()}


def write_json(path: Path, content: Any) -> None:
    """Write a file whole: a reader sees the old content or the new one."""
    partial = path.with_name(f".{os.getpid()}.json")
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)


def earned(entry: dict[str, Any]) -> float | str:
    """Return the points of one exercise in a result; for optional practice, "done" or "–"."""
    if entry["out_of"]:
        return entry["points"]
    done = entry["graded"] and all(finding["passed"] for finding in entry["findings"])
    return "done" if done else "–"


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write one line for each learner.

    It has for each exercise the points, why points are missing, and the misconception.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        columns = [
            (f"{entry['number']} {'points' if entry['out_of'] else 'practice'}", entry["number"])
            for entry in (results[0]["exercises"] if results else [])
        ]
        writer.writerow(
            [
                "student",
                "points",
                "out_of",
                *(
                    text
                    for name, n in columns
                    for text in (name, f"{n} reason", f"{n} misconception")
                ),
            ]
        )
        for result in results:
            cells = [
                value
                for entry in result["exercises"]
                for value in (
                    earned(entry),
                    entry.get("reason", ""),  # not in results of an older version
                    (entry["misconception"] or {}).get("name", ""),
                )
            ]
            row = [result["student"], result["points"], result["out_of"], *cells]
            writer.writerow([cell(value) for value in row])


def class_table(results: Sequence[Result]) -> str:
    """Return the class as text: each learner's points by exercise, and the misconceptions.

    A learner with the same misconception in several exercises counts once.
    """
    if not results:
        return "no submissions"
    numbers = [entry["number"] for entry in results[0]["exercises"]]
    width = max(len(result["student"]) for result in results)
    lines = [" ".join([f"{'':<{width}}", *(f"{n:>6}" for n in numbers), "  total"])]
    for result in sorted(results, key=lambda result: (-result["points"], result["student"])):
        points = " ".join(
            f"{value:>6}" if isinstance(value := earned(entry), str) else f"{value:>6g}"
            for entry in result["exercises"]
        )
        lines.append(f"{result['student']:<{width}} {points} {result['points']:>7g}")
    mean = sum(result["points"] for result in results) / len(results)
    lines.append(
        f"{len(results)} submissions, {mean:.1f} of {results[0]['out_of']:g} points on average"
    )
    who: dict[str, set[str]] = {}  # by misconception: the learners, and the exercises
    where: dict[str, list[str]] = {}
    for result in results:
        for entry in result["exercises"]:
            if entry["misconception"]:
                name = entry["misconception"]["name"]
                who.setdefault(name, set()).add(result["student"])
                where.setdefault(name, []).append(entry["number"])
    learners = len({result["student"] for result in results})
    if who:
        lines += ["", "Misconceptions, most frequent first:"]
    for name in sorted(who, key=lambda name: (-len(who[name]), name)):
        found = [number for number in dict.fromkeys(numbers) if number in where[name]]
        lines.append(
            f"{len(who[name]):>6} of {learners} learners: {name} "
            f"(exercise{'s' * (len(found) > 1)} {', '.join(found)})"
        )
    notes = [f"{r['student']}: {r['note']}" for r in results if r.get("note")]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def submissions_in(path: Path, homework: HomeworkSet) -> list[Path] | None:
    """Return the submissions in a folder: Python files, notebooks and folders.

    None if `path` is one submission itself.
    """
    if path.is_file() or not path.is_dir() or (path / homework.code.name).is_file():
        return None
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    return [entry for entry in entries if entry.suffix in (".py", ".ipynb") or entry.is_dir()]
