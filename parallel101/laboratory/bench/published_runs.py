"""`parallel101 bench published FILE.csv`: the quick model against published training runs.

Prints the error of each row, or of a large table the errors by number of GPUs, tp, pp, dp, width
and microbatch, and draws predicted against measured seconds. Which columns a table may have is
described in parallel101/laboratory/planner/published.py.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel101.laboratory.planner.published import PublishedError, published_errors, summary

MOST_ROWS = 40
GROUPS: dict[str, Callable[[PublishedError], int | str]] = {
    "used for": lambda row: row.run.used,
    "program:": lambda row: row.run.software.name,
    "tokens of a sample": lambda row: row.run.shape.time,
    "GPUs": lambda row: row.run.layout.gpus,
    "tp": lambda row: row.run.layout.tp,
    "pp": lambda row: row.run.layout.pp,
    "dp": lambda row: row.run.layout.dp,
    "width": lambda row: row.run.shape.width,
    "microbatch": lambda row: row.run.layout.microbatch,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors, draw the picture, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="parallel101 bench published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", type=Path, metavar="FILE.csv", nargs="+")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("published.svg"),
        metavar="FILE",
        help="predicted against measured, as SVG or PNG (default: published.svg)",
    )
    options = parser.parse_args(argv)
    tables = {}
    for path in options.table:
        try:
            tables[path.stem] = published_errors(path)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    for name, rows in tables.items():
        print(f"{name}: {summary(rows)}\n")
        print("\n".join(row_lines(rows) if len(rows) <= MOST_ROWS else group_lines(rows)), "\n")
    draw(tables, options.picture)
    print(f"Wrote {options.picture}")
    return 0


def row_lines(rows: Sequence[PublishedError]) -> list[str]:
    """Return a Markdown table with a line for each row."""
    lines = [
        "| model | layout | measured, s | predicted, s | error |",
        "| --- | --- |" + " ---: |" * 3,
    ]
    for row in rows:
        lines.append(
            f"| {row.run.name} | {row.run.words} | {row.measured:.4g} | {row.predicted:.4g} | "
            f"{row.error:+.1%} |"
        )
    return lines


def group_lines(rows: Sequence[PublishedError]) -> list[str]:
    """Return a Markdown table with a line for each value of each of GROUPS."""
    lines = ["| | rows | median error | mean | worst | mean with its sign |"]
    lines.append("| --- |" + " ---: |" * 5)
    for name, key in GROUPS.items():
        groups = defaultdict(list)
        for row in rows:
            groups[key(row)].append(row)
        if len(groups) == 1:
            continue
        for value, group in sorted(groups.items()):
            of = summary(group)
            signed = sum(row.error for row in group) / len(group)
            lines.append(
                f"| {name} {value} | {of.rows} | {of.median:.1%} | {of.mean:.1%} | {of.worst:.1%} "
                f"| {signed:+.1%} |"
            )
    return lines


def draw(tables: dict[str, list[PublishedError]], path: Path) -> None:
    """Draw predicted against measured seconds, both logarithmic, and a band of ±10 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    for name, rows in tables.items():
        few = len(rows) <= MOST_ROWS
        axes.scatter(
            [row.measured for row in rows],
            [row.predicted for row in rows],
            s=36 if few else 6,
            marker="o" if few else ".",
            alpha=1 if few else 0.4,
            rasterized=not few,
            label=f"{name} ({summary(rows)})",
        )
    low = min(row.measured for rows in tables.values() for row in rows) / 1.3
    high = max(row.measured for rows in tables.values() for row in rows) * 1.3
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], alpha=0.15)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured seconds of a step", ylabel="predicted seconds (band: ±10 %)")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, bbox_inches="tight", dpi=150)
    plt.close(figure)
