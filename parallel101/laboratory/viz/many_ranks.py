"""The collective view of more ranks than can be drawn one by one.

It shows how far each step's messages go, and the matrix of who sends to whom.

    step 3            64 messages of 256 B          from \\ to   0  8  16
    (ring of steps)   between ranks 4 apart         rank 0     ▪ ·
                                                    rank 8       ▪ ·

In the matrix, messages of this step are dark, and those before it are light. Lines between so many
ranks would fill the whole circle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate

from parallel101.laboratory.analysis.overlap import Interval, union
from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.units import human_bytes, listed
from parallel101.laboratory.viz.diagram import CENTRE
from parallel101.laboratory.viz.graph import STYLE, draw_step_ring
from parallel101.laboratory.viz.grid import Grid
from parallel101.laboratory.viz.scene import Scene, box
from parallel101.laboratory.viz.timing import Timing

LEFT, WIDTH, TOP, HEIGHT = 520.0, 412.0, 112.0, 288.0  # of the matrix
BINS = 226


def draw_many_ranks(scene: Scene, timing: Timing, phases: list[str]) -> None:
    """Add a summary of each step and the matrix of messages."""
    scene.style += STYLE + ".before{fill:var(--accent);opacity:.35}.present{fill:var(--accent)}"
    panel, replay = scene.panel(narrow="translate(18,-16)"), timing.replay
    draw_step_ring(panel, timing, phases, (*CENTRE, 66.0))
    for step in range(replay.steps):
        group = panel.add("g").show((timing.start(step), timing.start(step + 1)))
        count, *more = step_facts(replay, step)
        group.write(count, CENTRE[0], 362, 14, "c")
        group.lines(more, CENTRE[0], 382, 20, 14, "m c")
    # a row for each sender and a column for each receiver; the messages of a step are one path
    panel, n = scene.panel(narrow="translate(-408,352) scale(.94)"), len(replay.ranks)
    place = {rank: i for i, rank in enumerate(replay.ranks)}
    width, height = WIDTH / n, HEIGHT / n
    grid = Grid(LEFT, TOP, width, height, replay.ranks, n, gap=0.0)
    grid.ground(panel)
    grid.names(panel, "from \\ to")

    def cells(pairs: set[tuple[int, int]]) -> str:
        corners = (grid.inside(place[src], place[dst])[:2] for src, dst in sorted(pairs))
        return "".join(box(*corner, max(width, 3.0), max(height, 3.0)) for corner in corners)

    past, now, seen = panel.add("g"), panel.add("g"), set[tuple[int, int]]()
    for step in range(replay.steps):
        pairs = {(replay.messages[i].src, replay.messages[i].dst) for i in replay.in_step(step)}
        if fresh := pairs - seen:
            past.path(cells(fresh), "before").show((timing.arrival(step), timing.duration + 1))
        now.path(cells(pairs), "present").show((timing.start(step), timing.start(step + 1)))
        seen |= pairs
    note = "Dark: the messages of this step. Light: of the steps before."
    panel.write(note, LEFT + WIDTH / 2, TOP + HEIGHT + 20, 12, "m c")


def step_facts(replay: Replay, step: int) -> list[str]:
    """Return facts about a step: how many messages, of how many bytes, and how far they go."""
    messages = [replay.messages[i] for i in replay.in_step(step)]
    sizes = sorted({m.nbytes for m in messages})
    size = " to ".join(dict.fromkeys(map(human_bytes, (sizes[0], sizes[-1]))))
    n, place = len(replay.ranks), {rank: i for i, rank in enumerate(replay.ranks)}
    ways = {place[m.dst] - place[m.src] for m in messages}
    apart = sorted({min(way % n, -way % n) for way in ways})
    if len({way % n for way in ways}) == 1 and (len(ways) == 1 or 2 * apart[0] != n):
        up = min(ways, key=abs) > 0  # the others go around the end
        far = f"each to the rank {apart[0]} {'higher' if up else 'lower'}"
        far += f", modulo {n}" * (len(ways) > 1)
    elif len(apart) <= 4:
        far = f"between ranks that are {listed(apart)} apart"
    else:
        far = f"between ranks that are {apart[0]} to {apart[-1]} apart"
    senders = len({m.src for m in messages})
    who = "all ranks send" if senders == n else f"{senders} of {n} ranks send{'s' * (senders == 1)}"
    return [f"{len(messages)} message{'s' * (len(messages) != 1)} of {size}", far, who]


def sending_over_time(replay: Replay, begin: float, span: float) -> list[float]:
    """Return the share of ranks that are sending, in the middle of each of BINS parts of a run."""
    sending = [0] * (BINS + 1)
    sends: dict[int, list[Interval]] = defaultdict(list)
    for m in replay.messages:
        sends[m.src].append((m.start, m.end))
    for of in sends.values():
        for start, end in union(of):
            sending[math.ceil((start - begin) / span * BINS - 0.5)] += 1
            sending[math.ceil((end - begin) / span * BINS - 0.5)] -= 1
    return [count / len(replay.ranks) for count in accumulate(sending[:BINS])]
