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
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from parallel101.laboratory.grade.exercise import Exercise
from parallel101.laboratory.grade.grading import ExerciseVerdict
from parallel101.laboratory.grade.handed_in import read, student
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets
from parallel101.laboratory.grade.isolation import RANKS, clean_up
from parallel101.laboratory.grade.learner import report_on
from parallel101.laboratory.grade.notebook_functions import NoSubmission
from parallel101.laboratory.grade.plain_text import cell, plain, plain_name

# of one submission, as JSON: student, set, hash, points, out_of, complete, exercises, and a note on
# the choice of its file
Result = dict[str, Any]


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
    result = empty_result(path, homework, seed)
    written(result)
    complete, reports, exercises = True, {}, homework.exercises
    try:
        submission = read(path, homework)
        result["note"] = submission.note
    except Exception as error:
        exercises = ()
        complete = isinstance(error, NoSubmission)
        for entry in result["exercises"]:
            entry["problem"] = str(error) if complete else _grader_failed(error)
            if isinstance(error, NoSubmission):
                entry["reason"] = error.reason
    for place, exercise in enumerate(exercises):
        try:
            report = report_on(exercise, submission, seed, drawn=page is not None)
            reports[exercise.function] = report
            result["exercises"][place] = exercise_result(report.verdict, str(report))
        except Exception as error:
            complete = False
            result["exercises"][place]["problem"] = _grader_failed(error)
        result["points"] = round(sum(entry["points"] for entry in result["exercises"]), 2)
        written(result)
    if page is not None:
        from parallel101.laboratory.grade.feedback import write_page  # loads what makes pages

        write_page(page, homework, result, reports)
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
        "text": "",  # what the learner reads about it
        "findings": [],
        "seconds": 0.0,
    }


def exercise_result(verdict: ExerciseVerdict, text: str = "") -> dict[str, Any]:
    """Return a verdict as JSON, with its report as text."""
    mistake = verdict.misconception
    findings = [
        asdict(f) | {"points": round(f.points, 2), "out_of": round(f.out_of, 2)}
        for f in verdict.findings
    ]
    return _entry(verdict.exercise) | {
        "points": verdict.points,
        "graded": True,
        "not_written": verdict.not_written,
        "reason": plain(verdict.reason),
        "problem": plain(verdict.problem),
        "text": text,
        "misconception": {"name": mistake.name, "says": mistake.says} if mistake else None,
        "findings": findings,
        "seconds": round(verdict.seconds, 2),
    }


def content_hash(path: Path, homework: HomeworkSet, seed: str) -> str:
    """Return a hash that changes with what is graded, the exercises or the seed of the cases."""
    try:
        found = read(path, homework)
        graded: list[Any] = [found.source, found.files]
    except Exception as error:  # the verdict says so
        graded = [str(error)]
    tests = [file.read_bytes() for file in homework.tests]
    return hashlib.sha256(repr((graded, tests, seed)).encode()).hexdigest()


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
    tasks = [
        Task(
            path,
            homework.tests[0],
            seed,
            results / f"{name}.json",
            None if feedback is None else feedback / f"{name}.html",
        )
        for path, name in _result_names(submissions).items()
    ]
    done = {task: found for task in tasks if (found := task.finished()) is not None}
    left = [task for task in tasks if task not in done]
    graded = _by_pool(left, jobs) if jobs > 1 else ((task, task.grade()) for task in left)
    with tqdm(total=len(tasks), initial=len(done), desc="submissions", disable=not progress) as bar:
        for task, result in graded:
            done[task] = result
            bar.update()
    return [done[task] for task in tasks]


class Task(NamedTuple):
    """One submission of a class: what is graded, and the files that are written."""

    submission: Path
    tests: Path
    seed: str
    file: Path
    page: Path | None

    def grade(self) -> Result:
        """Grade it. Whatever goes wrong costs this submission only."""
        if _told_to_end:
            raise SystemExit(1)
        try:
            return grade_submission(
                self.submission,
                _set_of(self.tests),
                self.seed,
                lambda result: write_json(self.file, result),
                self.page,
            )
        except Exception as error:
            return self.not_graded(error)

    def not_graded(self, error: Exception) -> Result:
        """Return the result if the grader failed. It will be graded again."""
        result = empty_result(self.submission, _set_of(self.tests)) | {"hash": ""}
        for entry in result["exercises"]:
            entry["problem"] = _grader_failed(error)
        with suppress(OSError):
            write_json(self.file, result)
        return result

    def finished(self) -> Result | None:
        """Return the complete result of this very submission, if it is on disk."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            same = found["hash"] == content_hash(self.submission, _set_of(self.tests), self.seed)
            page = self.page is None or self.page.exists()
            return found if found["complete"] and same and page else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


@lru_cache(maxsize=1)
def _set_of(tests: Path) -> HomeworkSet:
    """Return the set, which is loaded once in each process."""
    (homework,) = find_sets(tests)
    return homework


def _by_pool(left: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Result]]:
    """Grade submissions in several processes, and yield each with its result.

    If a process is killed, what is left is tried once more.
    """
    context = multiprocessing.get_context("spawn")
    for last in (False, True):
        killed: list[Task] = []
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_when_told) as pool:
            running = {pool.submit(Task.grade, task): task for task in left}
            try:
                for future in as_completed(running):
                    try:
                        yield running[future], future.result()
                    except BrokenProcessPool as error:
                        killed.append(running[future])
                        if last:
                            yield running[future], running[future].not_graded(error)
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
        clean_up(range(RANKS))
        os._exit(1)

    # Ctrl-C reaches the process that grades, which tells this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()


def _result_names(submissions: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each result, such as alice.

    If both were handed in, they are alice.py and alice.ipynb.
    """
    names = {path: student(path) for path in submissions}
    for longer in (plain_name, lambda path: f"{names[path]} {_short_hash(path)}"):
        often = Counter(names.values())
        for path, name in list(names.items()):
            if often[name] > 1:
                names[path] = longer(path)
    return names


def _short_hash(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:8]


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
        rows = [_csv_row(result) for result in results]
        writer = csv.DictWriter(file, rows[0] if rows else ("student", "points", "out_of"))
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(result: Result) -> dict[str, object]:
    row = {name: result[name] for name in ("student", "points", "out_of")}
    for entry in result["exercises"]:
        number, mistake = entry["number"], entry["misconception"] or {}
        row[f"{number} {'points' if entry['out_of'] else 'practice'}"] = earned(entry)
        row[f"{number} reason"] = entry.get("reason", "")  # not in results of an older version
        row[f"{number} misconception"] = mistake.get("name", "")
    return {name: cell(value) for name, value in row.items()}


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
    named = [
        (entry["misconception"]["name"], result["student"], entry["number"])
        for result in results
        for entry in result["exercises"]
        if entry["misconception"]
    ]
    learners = len({result["student"] for result in results})
    often = Counter(name for name, _ in {(name, student) for name, student, _ in named})
    lines += ["", "Misconceptions, most frequent first:"] if named else []
    for name, count in sorted(often.items(), key=lambda pair: (-pair[1], pair[0])):
        where = {number for other, _, number in named if other == name}
        found = [number for number in dict.fromkeys(numbers) if number in where]
        lines.append(
            f"{count:>6} of {learners} learners: {name} "
            f"(exercise{'s' * (len(found) > 1)} {', '.join(found)})"
        )
    notes = [f"{r['student']}: {r['note']}" for r in results if r.get("note")]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)
