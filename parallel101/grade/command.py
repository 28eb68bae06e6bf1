"""`parallel101 grade PATH`: grades what the learner has written, or what learners handed in.

homework/hw1_moving                    every verdict, as check() shows it
homework                               one line for each exercise, and what to look at next
homework/hw1_moving --submission DIR   one submission, or a class: a table, JSON, CSV, and
                                       Gradescope's results

`parallel101 release` makes the archives that a teacher needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from parallel101.grade.gradescope import exercise_text, write_gradescope
from parallel101.grade.grading import PUBLIC_SEED
from parallel101.grade.homework import HomeworkSet, find_homework, find_sets
from parallel101.grade.learner import check_file
from parallel101.grade.release import left_out, release
from parallel101.grade.submissions import (
    class_table,
    grade_class,
    grade_submission,
    submissions_in,
    write_csv,
    write_json,
)
from parallel101.grade.table import ExerciseRow, next_to_do, row, table


def main(path: Path | None = None) -> int:
    """Grade the homework in `path`, or the nearest folder homework/.

    Returns 0, whatever the points are.

    Raises FileNotFoundError if there is no homework.
    """
    sets = find_sets(find_homework() if path is None else path)
    whole = path is not None and len(sets) == 1
    rows: list[ExerciseRow] = []
    for homework in sets:
        print(f"Grading {homework.folder.name} …", flush=True)
        for exercise in homework.exercises:
            report = check_file(exercise, homework)
            rows.append(row(report, homework.folder.name, os.path.relpath(homework.code)))
            if whole:
                print(f"\n{report}\n", flush=True)
    print(f"\n{table(rows)}\n\n{next_to_do(rows)}")
    return 0


def handed_in(
    path: Path,
    submission: Path | None,
    *,
    gradescope: Path | None = None,
    json: Path | None = None,
    csv: Path | None = None,
    feedback: Path | None = None,
    class_list: Path | None = None,
    jobs: int = 1,
    seed_file: Path | None = None,
) -> int:
    """Grade what was handed in for the set in `path`. Returns 0, whatever the points are.

    Args:
        submission: a file, a folder with one, or a folder with a file or folder for each learner;
            None: the set's own file.
        gradescope: the file for Gradescope's results. `submission` is then what one learner handed
            in, whatever is in it.
        json: of one submission the file, of a class the folder for its results (default: results/
            and the set's name).
        csv: the file for the table.
        feedback: the folder for a page of feedback for each learner.
        class_list: a file with the names of all learners, one in each line, as their submissions
            are named. Those who handed in nothing then have a row, too.
        jobs: how many submissions are graded at a time.
        seed_file: the file with the secret seed; None: the public cases.

    Raises ValueError for what can't be graded.
    """
    homework = one_set(path)
    if feedback is not None:
        make_folder("--feedback", feedback)
    seed = PUBLIC_SEED if seed_file is None else seed_file.read_text(encoding="utf-8").strip()
    if submission is not None and not submission.exists():
        raise ValueError(
            f"{submission} does not exist; expected what was handed in: a file, or a folder"
        )
    entries = (
        None
        if submission is None or gradescope is not None
        else submissions_in(submission, homework)
    )
    if class_list is not None:
        if submission is None or entries is None:
            raise ValueError("--class-list needs --submission with a folder for a whole class")
        entries = [*entries, *missing(class_list, submission, entries)]
    if submission is not None and entries is not None and len(entries) != 1:
        results = grade_class(
            entries,
            homework,
            json or Path("results") / homework.folder.name,
            seed=seed,
            jobs=jobs,
            feedback=feedback,
        )
        print(class_table(results))
        left_out = sorted(
            entry.name
            for entry in submission.iterdir()
            if entry not in entries and entry.name[0] != "."
        )
        if left_out:
            print(f"\nNot graded, being no Python file, notebook or folder: {', '.join(left_out)}")
    else:
        one = homework.code if submission is None else submission if entries is None else entries[0]
        write = (
            (lambda result: write_gradescope(gradescope, result))
            if gradescope is not None
            else (lambda result: None)
        )
        page = None
        if feedback is not None:
            page = feedback / f"{one.stem if one.is_file() else one.name}.html"
        results = [grade_submission(one, homework, seed, write, page)]
        for entry in results[0]["exercises"]:
            points = f"{entry['points']:g} of {entry['out_of']:g} points"
            print(
                f"{entry['number']} {entry['title']}: "
                f"{points if entry['out_of'] else 'optional practice'}"
            )
            print("".join(f"  {line}\n" for line in exercise_text(entry).split("\n")))
        print(f"{results[0]['points']:g} of {results[0]['out_of']:g} points")
        if json is not None:
            write_json(json, results[0])
    if csv is not None:
        write_csv(csv, results)
    return 0


def make_folder(option: str, folder: Path) -> None:
    """Make a folder. Raises ValueError if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"{option} {folder} can't be written; expected a folder")


def missing(class_list: Path, submissions: Path, entries: Sequence[Path]) -> list[Path]:
    """Where the submissions of those learners would be who handed in nothing.

    Raises ValueError for a name that can't be that of a file.
    """
    there = {entry.stem if entry.is_file() else entry.name for entry in entries}
    names = [line.strip() for line in class_list.read_text(encoding="utf-8-sig").splitlines()]
    for name in names:
        if name != Path(name).name:
            raise ValueError(
                f"{class_list} has the line {name!r}; expected a name, as submissions are named"
            )
    return [submissions / name for name in dict.fromkeys(names) if name and name not in there]


def release_set(
    path: Path, out: Path, seed_file: Path | None = None, library: str | None = None
) -> int:
    """Write the learners' bundle, the autograder for Gradescope and the GitHub Classroom folder."""
    seed = None if seed_file is None else seed_file.read_text(encoding="utf-8").strip()
    homework = one_set(path)
    for written in release(homework, out, seed, library):
        print(f"  {written}")
    if kept := left_out(homework):
        print(f"Not handed out: {', '.join(kept)}.")
    print("seed.txt draws the cases of the Gradescope autograder. Keep it to yourself.")
    return 0


def one_set(path: Path) -> HomeworkSet:
    """The homework set in `path`. Raises ValueError if there are several."""
    sets = find_sets(path)
    if len(sets) > 1:
        raise ValueError(f"{path} has {len(sets)} sets; name one of them, such as {sets[0].folder}")
    return sets[0]
