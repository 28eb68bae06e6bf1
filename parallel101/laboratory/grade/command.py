"""`parallel101 grade PATH`: grades what the learner has written, or what learners handed in.

homework/hw1_moving                    every verdict, as check() shows it
homework                               one line for each exercise, and what to look at next
homework/hw1_moving --submission DIR   one submission, or a class: a table, JSON, CSV, and
                                       Gradescope's results

`parallel101 release` makes the archives that a teacher needs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel101.laboratory.grade import isolation
from parallel101.laboratory.grade.grades import (
    Result,
    class_table,
    exercise_text,
    gradescope_results,
    next_to_do,
    row,
    table,
    write_csv,
    write_json,
)
from parallel101.laboratory.grade.grading import PUBLIC_SEED
from parallel101.laboratory.grade.handed_in import read, student, submissions_in
from parallel101.laboratory.grade.homework import HomeworkSet, find_homework, find_sets
from parallel101.laboratory.grade.isolation import readable_by_all
from parallel101.laboratory.grade.learner import check_file
from parallel101.laboratory.grade.plain_text import plain_name
from parallel101.laboratory.grade.release import release, scratch_cells
from parallel101.laboratory.grade.submissions import grade_class, grade_submission


def main(path: Path | None = None) -> int:
    """Grade the homework in `path`, or the nearest folder homework/.

    Returns 0, whatever the points are.

    Raises FileNotFoundError if there is no homework.
    """
    sets = find_sets(find_homework() if path is None else path)
    whole = path is not None and len(sets) == 1
    rows: list[dict[str, Any]] = []
    for homework in sets:
        print(f"Grading {homework.folder.name} …", flush=True)
        submission = read(homework.code, homework)
        for exercise in homework.exercises:
            verdict = check_file(exercise, homework, submission=submission)
            rows.append(row(verdict, homework, Path.cwd()))
            if whole:
                print(f"\n{verdict}\n", flush=True)
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
    seed = PUBLIC_SEED if seed_file is None else read_seed(seed_file)
    _can_be_written("--gradescope", gradescope)
    _can_be_written("--csv", csv)
    _can_be_written("--feedback", feedback, folder=True)
    if submission is not None and not submission.exists():
        raise ValueError(
            f"{submission} does not exist; expected what was handed in: a file, or a folder"
        )
    # links are allowed here, because the path is the teacher's own
    folder = homework.code if submission is None else submission.resolve()
    entries = submissions_in(folder, homework) if submission and gradescope is None else None
    if class_list is not None:
        if entries is None:
            raise ValueError("--class-list needs --submission with a folder for a whole class")
        entries = [*entries, *missing(class_list, folder, entries)]
    # SIGTERM ends what is being graded, with its processes and folders, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if entries is None or len(entries) == 1:
        _can_be_written("--json", json)
        one = (entries or [folder])[0]
        page = feedback / f"{student(one)}.html" if feedback is not None else None

        def write(result: Result) -> None:
            if gradescope is not None:
                write_json(gradescope, gradescope_results(result))
            if json is not None:
                write_json(json, result)

        result = grade_submission(one, homework, seed, write, page)
        results = [result]
        for entry in result["exercises"]:
            print(f"{exercise_text(entry)}\n")
        print(result["note"], end="\n" * bool(result["note"]))
        print(f"{result['points']:g} of {result['out_of']:g} points")
    else:
        into = json or Path("results") / homework.folder.name
        _can_be_written("for a class, --json", into, folder=True)
        offered = isolation.protection()
        if offered.users and not offered.files and readable_by_all(folder):
            print(
                f"Every user of this machine can read {folder}, and without Landlock so can the "
                f"code that is graded. Run `chmod 700 {folder}`"
            )
        results = grade_class(entries, homework, into, seed=seed, jobs=jobs, feedback=feedback)
        print(class_table(results))
        others = {entry for entry in folder.iterdir() if entry.name[0] != "."} - {*entries}
        left_out = sorted(map(plain_name, others))
        if left_out:
            print(f"\nNot graded, being no Python file, notebook or folder: {', '.join(left_out)}")
    if csv is not None:
        write_csv(csv, results)
    return 0


def missing(class_list: Path, submissions: Path, entries: Sequence[Path]) -> list[Path]:
    """Return the paths that the missing learners' submissions would have.

    Raises ValueError for a name that can't be the name of a file.
    """
    there = {student(entry).casefold() for entry in entries}
    names = [line.strip() for line in class_list.read_text(encoding="utf-8-sig").splitlines()]
    for name in names:
        if name != Path(name).name:
            raise ValueError(
                f"{class_list} has the line {name!r}; expected a name, as submissions are named"
            )
    once = {name.casefold(): name for name in reversed(names) if name}  # Ben is ben
    return [submissions / name for key, name in reversed(once.items()) if key not in there]


def read_seed(path: Path) -> str:
    """Return the secret seed in a file. Raises ValueError for one that every user can read."""
    try:
        opened, seed = readable_by_all(path), path.read_text(encoding="utf-8").strip()
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no file with a seed that can be read: {error}") from None
    if opened:
        raise ValueError(
            f"every user of this machine can read {path}, and so could the code that is graded. "
            f"Run `chmod 600 {path}`"
        )
    if not seed:
        raise ValueError(f"{path} is empty; expected the secret seed, any text")
    return seed


def _can_be_written(option: str, path: Path | None, folder: bool = False) -> None:
    """Raise ValueError for a file or folder that can't be written, before anything is graded."""
    kind = "a folder" if folder else "a file, and no folder"
    try:
        if path is not None:
            (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
            if not folder:
                path.open("a").close()
    except OSError:
        raise ValueError(f"{option} {path} can't be written; expected {kind}") from None


def release_set(
    path: Path, out: Path, seed_file: Path | None = None, library: str | None = None
) -> int:
    """Write the learners' bundle, the autograder for Gradescope and the GitHub Classroom folder."""
    seed = None if seed_file is None else read_seed(seed_file)
    homework = one_set(path)
    for written in release(homework, out, seed, library):
        print(f"  {written}")
    if cells := scratch_cells(homework):
        print(f"Handed out with cells that you added to {homework.notebook.name}:")
        print("".join(f"  {line}\n" for line in cells), end="")
    print("seed.txt draws the cases of the Gradescope autograder. Keep it to yourself.")
    return 0


def one_set(path: Path) -> HomeworkSet:
    """Return the homework set in `path`. Raises ValueError if there are several."""
    sets = find_sets(path)
    if len(sets) > 1:
        raise ValueError(f"{path} has {len(sets)} sets; name one of them, such as {sets[0].folder}")
    return sets[0]
