"""`pytest homework/hw1_moving`: one test for each exercise, and at the end a table of points.

homework/conftest.py imports these two hooks. A failed test shows the verdict, as check() does in a
terminal, and no traceback.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel101.laboratory.grade.exercise import find
from parallel101.laboratory.grade.grades import next_to_do, row, table
from parallel101.laboratory.grade.homework import find_sets, in_order
from parallel101.laboratory.grade.learner import check_file


class ExerciseItem(pytest.Item):
    """The test of one exercise."""

    def runtest(self) -> None:
        (homework,) = find_sets(self.path)
        verdict = check_file(find(homework.exercises, self.name), homework)
        shown = row(verdict, homework, self.config.invocation_params.dir)
        self.user_properties.append(("parallel101", shown))
        if verdict.not_written and verdict.exercise.practice:
            pytest.skip("optional practice, not written yet")
        if not verdict.passed:
            pytest.fail(str(verdict), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make a module's EXERCISES its tests."""
    if name != "EXERCISES" or not isinstance(collector, pytest.Module) or not isinstance(obj, list):
        return None
    return [ExerciseItem.from_parent(collector, name=exercise.function) for exercise in obj]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    rows = [
        value
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "parallel101"
    ]
    if rows:
        terminalreporter.section("homework")
        rows.sort(key=lambda r: (r["set"], in_order(r["number"])))
        terminalreporter.write_line(f"{table(rows)}\n\n{next_to_do(rows)}")
