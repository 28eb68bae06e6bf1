"""The report of a comparison with one process: a table, and the error that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STEPS = 3
SHOWN = 5  # names of a kind
KINDS = ("loss", "norm", "gradient", "buffer", "update", "evaluate")


class Row(NamedTuple):
    """One comparison. `ratio`: the difference over the largest that rounding explains; above 1
    it is a difference.
    """

    what: str  # one of KINDS
    name: str  # of the parameter or buffer
    step: int  # 1, 2 or 3
    difference: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """The result of `verify`. Print it to see a table.

    Attributes:
        rows: all comparisons, the same on every rank.
        reason: why nothing was compared, if nothing was.
        cause: of the first differences, in words, if it can be told.
        note: what was left out, if something was.
    """

    rows: Sequence[Row] = field(default=(), repr=False)
    reason: str = ""
    cause: str = ""
    note: str = ""

    @property
    def worst(self) -> Row | None:
        """The row that comes closest to its bound, or exceeds it most."""
        return max(self.rows, key=lambda row: row.ratio, default=None)

    @property
    def equal(self) -> bool:
        """True if something was compared and no row exceeds its bound."""
        return bool(self.rows) and all(row.ratio <= 1 for row in self.rows)

    @property
    def first(self) -> Row | None:
        """The row of the first difference: by step, then by kind, then the largest."""
        wrong = [row for row in self.rows if row.ratio > 1]
        order = lambda row: (row.step, KINDS.index(row.what), -row.ratio)  # noqa: E731
        return min(wrong, key=order, default=None)

    def __str__(self) -> str:
        if self.reason:
            return f"not verified: {self.reason}"
        steps = range(1, STEPS + 1)
        lines = [("largest differences", *(f"step {i}" for i in steps), "of the bound")]
        names: dict[tuple[str, str], dict[int, Row]] = {}
        for row in self.rows:
            names.setdefault((row.what, row.name), {})[row.step] = row
        for what in KINDS:
            ranked = sorted(
                (-max(row.ratio for row in rows.values()), name, rows)
                for (kind, name), rows in names.items()
                if kind == what
            )
            for worst, name, rows in [of for of in ranked if of[0]][:SHOWN] or ranked[:1]:
                cells = (f"{rows[i].difference:.1e}" if i in rows else "" for i in steps)
                share = "✗" if worst < -1 else f"{-worst:.1%}"
                lines.append((f"{what} {name}".strip(), *cells, share))
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = [
            "   ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        title = "equal to one process" if self.equal else "not equal to one process"
        notes = [self.note] if self.note else []
        return "\n".join([title, *(line.rstrip() for line in table), *notes])

    __repr__ = __str__


class NotEqualError(ValueError):
    """The error of a layout that computes something else than one process, or can't be compared
    with it. `report` has all comparisons.
    """

    def __init__(self, message: str, report: Report):
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


def refusal(report: Report) -> str:
    """Return the message of a NotEqualError."""
    first, what = report.first, ""
    if first is not None:
        more = sum(row.ratio > 1 for row in report.rows) - 1
        what = (
            f": the {first.what}{f' of {first.name!r}' if first.name else ''} differs by "
            f"{first.difference:.2g} in step {first.step}"
            f"{f', and {more} other comparisons fail' if more else ''}"
        )
    return (
        f"this layout does not compute what one process does{what}.\n{report.cause}\n"
        "No weight was changed. The error's .report is a table; verify=False trains without "
        "this comparison"
    )
