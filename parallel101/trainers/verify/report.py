"""What a comparison with one process found: a table, and the error that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WEIGHTS = ("weights as they are", "perturbed")
SHOWN = 5  # names of a kind


class Row(NamedTuple):
    """One comparison. `ratio`: the difference over the largest that rounding explains; above 1
    it is a difference.
    """

    what: str  # "loss", "evaluate", "gradient", "norm", "update" or "buffer"
    name: str  # of the parameter or buffer
    weights: str  # one of WEIGHTS
    difference: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """What `verify` returns. Print it to see a table.

    Attributes:
        rows: all comparisons, the same on every rank.
        reason: why nothing was compared, if nothing was.
        cause: of the first differences, in words.
    """

    rows: Sequence[Row] = field(default=(), repr=False)
    reason: str = ""
    cause: str = ""

    @property
    def worst(self) -> Row | None:
        """The row that comes closest to its bound, or exceeds it most."""
        return max(self.rows, key=lambda row: row.ratio, default=None)

    @property
    def equal(self) -> bool:
        """Whether something was compared, and no row exceeds its bound."""
        return bool(self.rows) and all(row.ratio <= 1 for row in self.rows)

    def __str__(self) -> str:
        if self.reason:
            return f"not verified: {self.reason}"
        compared: dict[tuple[str, str], dict[str, Row]] = {}
        for row in self.rows:
            compared.setdefault((row.what, row.name), {})[row.weights] = row
        lines = [("largest differences", *WEIGHTS, "of the bound")]
        for what in dict.fromkeys(row.what for row in self.rows):
            found = [
                (max(row.ratio for row in rows.values()), name, rows)
                for (kind, name), rows in compared.items()
                if kind == what
            ]
            found.sort(key=lambda of_name: -of_name[0])
            differing = [of_name for of_name in found if of_name[0] > 0]
            if len(found) > 1 and not differing:
                lines.append((f"{what}: all {len(found)}", "0", "0", ""))
                continue
            shown = (differing or found)[:SHOWN]
            for worst, name, rows in shown:
                given, moved = (
                    f"{rows[weights].difference:.1e}" if weights in rows else ""
                    for weights in WEIGHTS
                )
                lines.append(
                    (f"{what} {name}".strip(), given, moved, f"{worst:.1%}" if worst <= 1 else "✗")
                )
            if len(found) > len(shown):
                lines.append((f"{what}: {len(found) - len(shown)} more, all closer", "", "", ""))
        a, b, c, d = (max(len(line[column]) for line in lines) for column in range(4))
        table = [
            f"{name:{a}}   {given:>{b}}   {moved:>{c}}   {ratio:>{d}}"
            for name, given, moved, ratio in lines
        ]
        title = "equal to one process" if self.equal else "not equal to one process"
        return "\n".join([title, *(line.rstrip() for line in table)])

    __repr__ = __str__


class NotEqualError(ValueError):
    """This layout computes something else than one process. `report` has all comparisons."""

    def __init__(self, message: str, report: Report):
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


def message(report: Report) -> str:
    wrong = sorted((row for row in report.rows if row.ratio > 1), key=lambda row: -row.ratio)
    kinds = list(dict.fromkeys(row.what for row in report.rows if row.ratio > 1))
    first = next(row for row in wrong if row.what == kinds[0])
    what = f"the {first.what}" + (f" of {first.name!r}" if first.name else "")
    more = f", and {len(wrong) - 1} other comparisons fail" if len(wrong) > 1 else ""
    return (
        f"this layout does not compute what one process does: {what} differs by "
        f"{first.difference:.2g}{more}.\n{report.cause}\n"
        "No weight was changed. The error's .report is a table; verify=False trains without "
        "this comparison"
    )
