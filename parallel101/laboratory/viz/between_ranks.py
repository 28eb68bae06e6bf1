"""Draws what happened between each two ranks, as squares of ranks × ranks.

They show the seconds that one rank waited for another, and the bytes that it sent.

waits, for     0      1             from, to    0      1
rank 0              210 ms          rank 0             16 KiB
rank 1        2 ms                  rank 1     16 KiB
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel101.laboratory.analysis.traffic import Traffic, traffic
from parallel101.laboratory.record.events import P2P
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds, listed
from parallel101.laboratory.viz.grid import MOST_CELLS, Grid
from parallel101.laboratory.viz.rows import trace_facts
from parallel101.laboratory.viz.scene import Scene, check_ranks

# the squares: their top, their largest width, the x of their centres
TOP, SIDE, MIDDLES = 132.0, 340.0, (280.0, 744.0)
STYLE = ".sent{fill:var(--accent)}text.on{fill:var(--bg)}"
MOST_RANKS = 128


class Square(NamedTuple):
    """A number for each pair of ranks."""

    title: str
    corner: str  # what a row and a column are, such as "from \\ to"
    values: Sequence[Sequence[float]]  # a row for each rank
    text: Callable[[float], str]  # a value in words


def between_ranks_scene(
    title: str, squares: Sequence[Square], facts: str = "", sentence: str = ""
) -> Scene:
    """Draw one or two squares side by side, a cell the darker the larger its value.

    Zeros are left empty. `facts` and `sentence` are above them.

    Raises:
        ValueError: more than 128 ranks.
    """
    n = len(squares[0].values)
    check_ranks(n, MOST_RANKS)
    cell = min(64.0, SIDE / n)
    words = " ".join(f"{square.title}: {_largest(square)}." for square in squares)
    scene = Scene(960, math.ceil(TOP + n * min(cell, 44.0) + 28), title, words)
    scene.style += STYLE
    high = scene.height - TOP + 44  # of a square with its title
    scene.narrow = (480, math.ceil(scene.height - 20 + high * (len(squares) - 1)))
    scene.head(facts, sentence)
    for k, (square, middle) in enumerate(zip(squares, MIDDLES)):
        # on phones one below the other
        panel = scene.panel(narrow=f"translate({MIDDLES[0] - 20 - middle:g},{high * k - 20:g})")
        left, gap = middle - n * cell / 2, 2.0 if n <= MOST_CELLS else 0.0
        panel.write(square.title, left, TOP - 34, 14, "b")
        grid = Grid(left, TOP, cell, min(cell, 44.0), range(n), n, gap)
        grid.names(panel, square.corner)
        grid.ground(panel)
        most = max((value for row in square.values for value in row), default=0.0) or 1.0
        for row, values in enumerate(square.values):
            for column, value in enumerate(values):
                if value > 0:
                    # in between, neither text could be read in both themes
                    share, dark = value / most, value > 0.8 * most
                    opacity = 0.5 + 0.45 * share if dark else 0.12 + 0.5 * share
                    text = square.text(value)
                    drawn = grid.value(panel, row, column, text, opacity, dark)
                    drawn.add("title", f"{row}, {column}: {text}")
    return scene


def traffic_scene(
    trace: Trace, title: str = "Who sends to whom", within: str | None = None
) -> Scene:
    """Draw the bytes and the messages that each rank sent to each other rank.

    It draws any recorded run of up to 128 ranks.

    Args:
        trace: the record.
        title: above the picture.
        within: only what a rank sent in its last span of this name; ValueError if there is none.
    """
    sent = traffic(trace, within)  # without `within`, of the whole run
    squares = [
        Square("Bytes sent", "from \\ to", sent.nbytes, human_bytes),
        Square("Messages sent", "from \\ to", sent.messages, lambda count: f"{count:,.0f}"),
    ]
    facts = trace_facts(trace, whole_run=within is None)
    facts += f" · {human_seconds(trace.makespan)}" if within is None else ""
    return between_ranks_scene(title, squares, facts, _traffic_text(trace, sent, within))


def _traffic_text(trace: Trace, sent: Traffic, within: str | None) -> str:
    """Return a text that says to how many others the ranks send, and how much."""
    others = listed(named) if (named := collectives_of_torch(trace)) else ""
    missing = f" The messages inside torch's own {others} are not recorded." * bool(others)
    of = "" if within is None else f' Only the last span "{within}" of each rank is counted.'
    if not any(map(any, sent.messages)):
        return f"No rank sends a message.{of}{missing}"
    to = [sum(count > 0 for count in row) for row in sent.messages]
    nbytes, times = ([sum(row) for row in rows] for rows in sent)
    who = "Each rank sends" if min(to) > 0 else f"{sum(map(bool, to))} of {len(to)} ranks send"
    to_whom = f"{_range(to)} other{'s' * (max(to) > 1)}"
    return (
        f"{who} to {to_whom}, {_range(nbytes, human_bytes)} in {_range(times)} "
        f"message{'s' * (max(times) > 1)}.{of}{missing}"
    )


def _range(values: Sequence[int], text: Callable[[float], str] = str) -> str:
    """Return the range of the values that are not zero: "3", or "1 to 6"."""
    found = sorted({value for value in values if value} or {0})
    return text(found[0]) if len(found) == 1 else f"{text(found[0])} to {text(found[-1])}"


def collectives_of_torch(trace: Trace) -> list[str]:
    """Return the names of torch's own collectives in a record.

    They are one event for each rank.
    """
    return sorted({e.kind for e in trace.events} - P2P - {"span"})


def _largest(square: Square) -> str:
    values = {(r, c): v for r, row in enumerate(square.values) for c, v in enumerate(row)}
    most = max(values.values())
    (row, column), *others = (pair for pair, value in values.items() if value == most)
    if not most:
        return "nothing"
    where = f"rank {row} and rank {column}"
    if others:
        where = f"for each of {1 + len(others)} pairs of ranks"
    return f"the most is {square.text(most)}, {where}"
