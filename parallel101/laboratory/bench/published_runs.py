"""`parallel101 bench published FILE.csv`: the quick model against published training runs.

Prints the error of each row, or of a large table the errors by number of GPUs, tp, pp, dp, width
and microbatch, and draws predicted against measured seconds. Which columns a table may have is
described in parallel101/laboratory/planner/published.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import mean

from parallel101.laboratory.bench.comparison import BenchmarkReport
from parallel101.laboratory.planner.published import PublishedError, published_errors, summary

MOST_ROWS = 40
GROUPS: dict[str, Callable[[PublishedError], int | str]] = {
    "used for": lambda row: row.run.used,
    "program:": lambda row: row.run.software.name,
    "tokens of a sample": lambda row: row.run.shape.time,
    "GPUs": lambda row: row.run.layout.gpus,
    **{name: attrgetter(f"run.layout.{name}") for name in ("tp", "pp", "dp", "microbatch")},
    "width": lambda row: row.run.shape.width,
}


def compare(report: BenchmarkReport, paths: Sequence[str], picture: Path) -> None:
    """Report the errors of each table, and draw the picture.

    Raises ValueError for a table that can't be read, and for none.
    """
    if not paths:
        raise ValueError("published needs a table: parallel101 bench published FILE.csv")
    try:
        tables = {Path(path).stem: published_errors(path) for path in paths}
    except OSError as error:
        raise ValueError(str(error)) from None
    for name, rows in tables.items():
        report.sentence(f"{name}: {summary(rows)}")
        report.table(*(by_row(rows) if len(rows) <= MOST_ROWS else by_group(rows)))
    draw(tables, picture)
    print(f"Wrote {picture}")


def by_row(rows: Sequence[PublishedError]) -> tuple[list[str], list[list[str]]]:
    """Return the head of a table, and a line for each row."""
    lines = [
        [r.run.name, r.run.words, f"{r.measured:.4g}", f"{r.predicted:.4g}", f"{r.error:+.1%}"]
        for r in rows
    ]
    return ["model", "layout", "measured, s", "predicted, s", "error"], lines


def by_group(rows: Sequence[PublishedError]) -> tuple[list[str], list[list[str]]]:
    """Return the head of a table, and a line for each value of each of GROUPS."""
    lines = []
    for name, key in GROUPS.items():
        groups = defaultdict(list)
        for row in rows:
            groups[key(row)].append(row)
        for value, group in sorted(groups.items()) if len(groups) > 1 else ():
            of, signed = summary(group), mean(row.error for row in group)
            errors = [f"{error:.1%}" for error in (of.median, of.mean, of.worst)]
            lines.append([f"{name} {value}", str(of.rows), *errors, f"{signed:+.1%}"])
    return ["", "rows", "median error", "mean", "worst", "mean with its sign"], lines


def draw(tables: dict[str, list[PublishedError]], path: Path) -> None:
    """Draw predicted against measured seconds, both logarithmic, and a band of ±10 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for name, rows in tables.items():
        measured, predicted = zip(*((row.measured, row.predicted) for row in rows))
        size, label = 36 if len(rows) <= MOST_ROWS else 3, f"{name} ({summary(rows)})"
        axes.scatter(measured, predicted, size, alpha=0.6, rasterized=True, label=label)
    every = [row.measured for rows in tables.values() for row in rows]
    low, high = min(every) / 1.3, max(every) * 1.3
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], alpha=0.15)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured seconds of a step", ylabel="predicted seconds (band: ±10 %)")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, bbox_inches="tight", dpi=150)
    plt.close(figure)
