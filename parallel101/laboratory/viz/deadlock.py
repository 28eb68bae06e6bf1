"""A deadlock as a picture: who waits for whom, and in which line.

    rank 0 ──waits for──▶ rank 1       a cycle of arrows: none of its ranks can continue
       ▲──────waits for─────┘          an arrow to a rank that has returned: a wait without end

This draws the wait-for graph that a `DeadlockError` carries, when its `picture()` is called.
`laboratory.record.wait_for` finds the deadlock.
"""

from __future__ import annotations

import linecache
import math
import textwrap
from collections.abc import Mapping, Sequence

from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.viz.diagram import circle, draw_rank
from parallel101.laboratory.viz.scene import Scene, check_ranks

RADIUS, MOST_ROWS, MOST_RANKS, MOST_NOTES = 108.0, 7, 64, 3
STYLE = (
    ".node{fill:var(--bg);stroke:var(--ink);stroke-width:1.5}"
    ".stuck{stroke:var(--warn);stroke-width:2.5}.gone{stroke-dasharray:3 4;stroke:var(--mute)}"
    ".wait{fill:none;stroke:var(--mute);stroke-width:2}.wait.stuck{stroke:var(--warn)}"
    ".head{fill:var(--mute)}.head.stuck{fill:var(--warn)}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
)

WaitsByRank = Mapping[int, tuple[str, "int | tuple[int, ...] | None", str]]
Notes = Sequence[tuple[str, str]]


def deadlock_scene(
    waiting: WaitsByRank,
    cycle: Sequence[int] = (),
    returned: Sequence[int] = (),
    notes: Notes = (),
    description: str = "",
) -> Scene:
    """Draw who waits for whom.

    Args:
        waiting, cycle, returned, notes: the attributes of a DeadlockError, of up to 64 ranks.
        description: the picture in words, for a screen reader.

    Returns:
        A still Scene: the ranks at the left; at the right, the call in which each of the first
        seven waits.

    Raises:
        ValueError: more than 64 ranks.
    """
    calls = sorted(waiting.items())
    arrows = [(rank, peer) for rank, (_, peers, _) in calls for peer in _ranks_of(peers)]
    everyone = sorted({*waiting, *returned, *(peer for _, peer in arrows)})
    check_ranks(len(everyone), MOST_RANKS, "print the error instead")
    # y of the ranks' centre; the least height, also on a phone; the top of the rows on a phone
    middle, least, least_narrow, below = (
        (232.0, 404, 704, 290) if len(everyone) > 2 else (150.0, 238, 360, 130)
    )
    rows, lines = min(len(waiting), MOST_ROWS), list[tuple[str, str]]()  # of notes; with its class
    for note, where in notes[:MOST_NOTES]:
        lines += [(line, "m") for line in textwrap.wrap(note[0].upper() + note[1:], 62)]
        lines += [(_line(where), "m code")] if where else []
    end = math.ceil(middle + 22.0 * rows + 18 * len(lines) + 24)
    scene = Scene(960, max(least, end), "Deadlock: who waits for whom", description)
    scene.style += STYLE
    scene.narrow = (480, max(least_narrow, below + end))
    tip = 6 if len(everyone) <= 8 else 4
    for colour in ("", " stuck"):
        scene.definitions.append(
            f'<marker id="head{colour.strip()}" viewBox="0 0 8 8" refX="7.5" refY="4" '
            f'markerWidth="{tip}" markerHeight="{tip}" orient="auto"><path d="M0 .5 8 4 0 7.5z" '
            f'class="head{colour}"/></marker>'
        )
    head = scene.panel(narrow="translate(0,0)")
    head.write(scene.title, 28, 40, None, "h")
    summary = "Cycle: " + " → ".join(map(str, [*cycle, *cycle[:1]]))
    if len(cycle) > 8:
        summary = f"{len(cycle)} ranks wait for each other in a cycle."
    nothing = "A rank waits for something that will never arrive."
    head.write(summary if cycle else nothing, 28, 64, 14, "w b")
    graph = scene.panel(narrow="translate(40,0)")
    node = min(25.0, 0.55 * math.pi * RADIUS / len(everyone))
    # two ranks are side by side; more are on a circle, with the first on top
    at = circle(everyone, (200.0, middle), RADIUS, -math.pi / 2 if len(everyone) == 2 else 0.0)
    stuck = set(zip(cycle, [*cycle[1:], *cycle[:1]]))
    for pair in sorted(arrows, key=lambda pair: pair in stuck):
        if pair[0] != pair[1]:
            # from rim to rim, bent to its left, so that two arrows between two ranks don't overlap
            a, b = at[pair[0]], at[pair[1]]
            length = math.dist(a, b)
            ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
            bend = 0.16 * length
            x, y = (a[0] + b[0]) / 2 + 2 * bend * uy, (a[1] + b[1]) / 2 - 2 * bend * ux
            part = (node + 2) / math.hypot(x - a[0], y - a[1])
            (x0, y0), (x1, y1) = ((p + part * (x - p), q + part * (y - q)) for p, q in (a, b))
            arrow = f"M{x0:.1f} {y0:.1f}Q{x:.1f} {y:.1f} {x1:.1f} {y1:.1f}"
            kind = "stuck" if pair in stuck else ""
            graph.path(arrow, f"wait {kind}", marker_end=f"url(#head{kind})")
    for rank, (x, y) in at.items():
        kind = "gone" if rank in returned else "stuck" if rank in cycle else ""
        draw_rank(graph, rank, (x, y), node, f"node {kind}")
        if kind == "gone" and len(returned) <= 4:
            graph.write("returned", x, y + (node + 16 if y > middle + 1 else -node - 8), 12, "m c")
    # the call in which each rank waits, and its line of source, also that of a notebook's cell
    panel = scene.panel(narrow=f"translate(-402,{below})")
    shown = calls if len(calls) <= MOST_ROWS else calls[: MOST_ROWS - 1]
    y = middle - 22.0 * len(shown) + 18
    for rank, (kind, peers, where) in shown:
        link = {"send": "to", "recv": "from"}.get(kind, "for")
        whom = ranks_text(_ranks_of(peers)) if _ranks_of(peers) else "any rank"
        panel.write(f"rank {rank}", 430, y, 14, "b")
        panel.write(f"waits in {kind} {link} {whom}", 496, y, 14)
        panel.write(_line(where), 496, y + 18, 12.5, "m code")
        y += 44
    if len(shown) < len(calls):
        panel.write(f"and {len(calls) - len(shown)} more", 496, y, 14, "m")
        y += 44
    for text, look in lines:
        panel.write(text, 430, y, 13 if look == "m" else 12.5, look)
        y += 18
    return scene


def _ranks_of(peers: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if peers is None else peers if isinstance(peers, tuple) else (peers,)


def _line(where: str) -> str:
    """Return "line 4: dist.send(x, dst=1)", or the place as recorded if there is no source."""
    file, _, number = where.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    if not source:
        return where
    return f"line {number}: {source if len(source) <= 40 else source[:39] + '…'}"
