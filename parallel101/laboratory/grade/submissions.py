"""Grades what learners have handed in: one submission, or a folder of them, several at a time.

    submissions/alice/hw1.py   ──▶  results/alice.json   a result for each exercise, written as
    submissions/bob/hw1.ipynb  ──▶  results/bob.json     soon as the exercise is graded
                                    results.csv          points, and why points are missing
                                    feedback/alice.html  a page for each learner (grades.py)

It also tells which misconceptions the class has. An interrupted run continues where it was: a
submission whose result is on disk is not graded again, unless its file has changed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from parallel101.laboratory.grade.exercise_report import ExerciseVerdict
from parallel101.laboratory.grade.grades import (
    Result,
    exercise_result,
    write_json,
    write_page,
)
from parallel101.laboratory.grade.handed_in import NoSubmission, read, student
from parallel101.laboratory.grade.homework import HomeworkSet, find_sets
from parallel101.laboratory.grade.isolation import RANKS, clean_up
from parallel101.laboratory.grade.learner import report_on
from parallel101.laboratory.grade.plain_text import plain, plain_name


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
    verdicts, exercises = {}, homework.exercises
    try:
        submission = read(path, homework)
        result["note"] = submission.note
    except NoSubmission as error:
        exercises = ()
        for entry in result["exercises"]:
            entry |= {"problem": str(error), "reason": error.reason}
    for exercise, entry in zip(exercises, result["exercises"]):
        try:
            verdict = report_on(exercise, submission, seed, drawn=page is not None)
            entry |= exercise_result(verdict, str(verdict))
            verdicts[exercise.function] = verdict
        except Exception as error:
            entry["problem"] = _grader_failed(error)
        result["points"] = round(sum(entry["points"] for entry in result["exercises"]), 2)
        written(result)
    if page is not None:
        write_page(page, homework, result, verdicts)
    # otherwise it is graded again the next time
    result["complete"] = len(verdicts) == len(exercises)
    written(result)
    return result


def _grader_failed(error: BaseException) -> str:
    return f"the grader failed: {plain(repr(error))}. Grade it again"


def empty_result(path: Path, homework: HomeworkSet, seed: str) -> Result:
    """Return the result of a submission before any exercise is graded: no points."""
    return {
        "student": student(path),
        "set": homework.folder.name,
        "hash": content_hash(path, homework, seed),
        "points": 0.0,
        "out_of": sum(exercise.points for exercise in homework.exercises),
        "complete": False,
        "note": "",
        "exercises": [exercise_result(ExerciseVerdict(e, [])) for e in homework.exercises],
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
    often, tasks = Counter(map(student, submissions)), []
    for path in submissions:  # alice; if both were handed in, alice.py and alice.ipynb
        name = plain_name(path) if often[student(path)] > 1 else student(path)
        page = None if feedback is None else feedback / f"{name}.html"
        tasks.append(Task(path, homework.tests[0], seed, results / f"{name}.json", page))
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
        try:
            homework, write = _set_of(self.tests), partial(write_json, self.file)
            return grade_submission(self.submission, homework, self.seed, write, self.page)
        except Exception as error:
            return self.not_graded(error)

    def not_graded(self, error: BaseException) -> Result:
        """Return the result if the grader failed. It will be graded again."""
        result = empty_result(self.submission, _set_of(self.tests), self.seed)
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

    If one of the processes is killed, what is left has to be graded again.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_when_told) as pool:
        running = {pool.submit(_grade_in_pool, task): task for task in left}
        try:
            for future in as_completed(running):
                task, error = running[future], future.exception()
                yield task, task.not_graded(error) if error else future.result()
        except BaseException:  # Ctrl-C: what is being graded ends now; the rest is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _grade_in_pool(task: Task) -> Result:
    try:
        return task.grade()
    except SystemExit:  # told to end: this submission's ranks have ended, and the rest must not run
        os._exit(1)


def _end_when_told() -> None:
    """Let SIGTERM end the run that is going on, with its ranks, in a process of the pool.

    The end of the process that grades has the same effect.
    """

    def end(*_: object) -> None:
        # the pool tells it again as soon as another of its processes has ended
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit()

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
