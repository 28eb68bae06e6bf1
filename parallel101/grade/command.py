"""`parallel101 grade PATH`: grades what the learner has written, and shows the verdicts and the table of points.

homework/hw1_moving    every verdict, as check() shows it       homework    one line for each exercise, and what to look at next
"""

from __future__ import annotations

import os
from pathlib import Path

from parallel101.grade.homework import find_homework, find_sets
from parallel101.grade.learner import check_file
from parallel101.grade.table import Row, next_to_do, row, table


def main(path: Path | None = None) -> int:
    """Grade the homework in `path`, or the nearest folder homework/. Returns 0, whatever the points are.

    Raises FileNotFoundError if there is no homework.
    """
    sets = find_sets(find_homework() if path is None else path)
    whole = path is not None and len(sets) == 1
    rows: list[Row] = []
    for homework in sets:
        print(f"Grading {homework.folder.name} …", flush=True)
        for exercise in homework.exercises:
            report = check_file(exercise, homework.code)
            rows.append(row(report, homework.folder.name, os.path.relpath(homework.code)))
            if whole:
                print(f"\n{report}\n", flush=True)
    print(f"\n{table(rows)}\n\n{next_to_do(rows)}")
    return 0
