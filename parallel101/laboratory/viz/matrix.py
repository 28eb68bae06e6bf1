"""The right half of the collective view: what each rank holds.

If the contents of messages are unknown, it shows only how many bytes moved.

    chunk     a      b      c             from \\ to    0     1
    rank 0  ▌▐    ▌▌▐▐     ▐                       0        96 B
    rank 1  ▌     ▌▌▐▐    ▌▐                       1  96 B

On the left, ranks × chunks: a cell has one stripe for each rank whose data is in it. A stripe that
was added twice ("×2") and a stripe that is missing from what a rank returned are drawn as errors.
On the right, source × destination, with bytes.

Where the contents of messages were not kept, it shows who waits when, on the record's own time
axis: a row for each rank, sends above, receives below.

    rank 0   ░░░░░░░░░▓▓▓   send to 1      hatched: the call waits for the other rank's
    rank 1            ▓▓▓   recv from 0    filled: the bytes move
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from parallel101.laboratory.analysis.chunks import Counts
from parallel101.laboratory.analysis.replay import START, Replay
from parallel101.laboratory.analysis.verdict import lacks
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz.grid import GONE, STYLE, Cell, Grid
from parallel101.laboratory.viz.rows import Bar, TimeRows
from parallel101.laboratory.viz.scene import Node, Scene, box, number
from parallel101.laboratory.viz.timing import Timing

# of the cells; MIDDLE is the y of their centre
LEFT, WIDTH, MIDDLE, HEIGHT = 520.0, 412.0, 254.0, 272.0
MOVING = ".mv{fill:var(--bg);fill-opacity:.85;stroke:var(--ink);stroke-width:1.5}"
NARROW = "translate(-408,352) scale(.94)"  # leaves room for the text at its left and below it
LEGEND = (
    "Hatched: a call waits for the other rank's call.",
    "Filled: the bytes move. Sends are above, receives below.",
)
# of rows of calls: the most for a rank and for all; the least for a call with its name
TALL, ALL, LABELLED = 66.0, 232.0, 26.0


def grid_of(ranks: Sequence[int], columns: int, gap: float | None = None) -> Grid:
    """Return the cells in the right half, with a row for each rank."""
    width, height = min(103.0, WIDTH / columns), min(56.0, HEIGHT / len(ranks))
    left, top = LEFT + (WIDTH - width * columns) / 2, MIDDLE - height * len(ranks) / 2
    gap = gap or (3.0 if height > 20 else 1.5)
    return Grid(left, top, width, height, ranks, columns, gap)


def draw_matrix(scene: Scene, timing: Timing, legend: Sequence[str]) -> None:
    """Add ranks × chunks, and the data that moves between the rows.

    The lines of `legend` are below.
    """
    scene.style += STYLE + MOVING
    replay, panel = timing.replay, scene.panel(narrow=NARROW)
    grid = grid_of(replay.ranks, max(len(replay.chunks), 1))
    grid.names(panel, "chunk", [chunk.label for chunk in replay.chunks])
    for row in range(len(replay.ranks)):
        for column in range(len(replay.chunks)):
            panel.rect(*grid.inside(row, column), "faint", rx=2)
    marks = Node("g")
    _cells(panel, marks, grid, timing)
    lines, narrowest = "", grid.width  # between stripes, through all rows of a column
    for column, of in enumerate(replay.chunks):
        for k in range(1, len(of.stripes)):
            x, _, width, _ = grid.stripe(0, column, k, len(of.stripes))
            narrowest = min(narrowest, width)
            lines += f"M{number(round(x, 2))} {grid.top:.1f}V{grid.bottom:.1f}"
    if lines:
        look = {"style": "stroke:var(--bg)", "stroke_width": min(1.2, 0.3 * narrowest)}
        panel.add("path", d=lines, **look)
    panel.children.append(marks)
    missing = marks.add("g")  # from what a rank returned
    if timing.duration:
        missing.show((timing.reveal, timing.duration + 1))
    for rank, chunk in replay.cells:
        gone = lacks(replay, rank, chunk)
        faults = [GONE if origin in gone else "" for origin in replay.chunks[chunk].stripes]
        grid.faults(missing, (replay.ranks.index(rank), chunk), faults)
    _bands(scene, panel, grid, timing)
    panel.lines(legend, LEFT + WIDTH / 2, grid.bottom + 24, 16, 12, "m c")


def filled(grid: Grid, replay: Replay, cell: Cell, counts: Counts, apart: bool = False) -> str:
    """Return the path of the stripes of a rank's chunk that have data.

    Unless they are drawn `apart`, neighbouring stripes touch: `draw_matrix` draws the lines.
    """
    stripes, path = replay.chunks[cell[1]].stripes, ""
    rim = 1.2 if apart and grid.inside(*cell)[2] > 3 * len(stripes) else 0.0
    alike = groupby(range(len(stripes)), lambda k: (bool(counts[stripes[k]]), k * bool(rim)))
    for (held, _), (k, *more) in alike:
        if held:
            x, y, width, height = grid.stripe(*cell, k, len(stripes))
            path += box(x + rim / 2, y, (1 + len(more)) * width - rim, height)
    return path


def _cells(panel: Node, marks: Node, grid: Grid, timing: Timing) -> None:
    """Draw every state of every cell, and into `marks` data that was added more than once.

    States with the same begin and end share a group. "?": elements from different positions were
    added.
    """
    replay = timing.replay
    together: dict[tuple[float, float], list[tuple[Cell, Counts]]] = defaultdict(list)
    for (rank, chunk), states in replay.cells.items():
        returned = replay.returned[rank] if replay.returned else None
        if returned is not None:  # at the end, only what the rank returned is shown
            last = returned.get(chunk, (0,) * replay.trace.world_size)
            states = [*states, (float(replay.steps), last)] if last != states[-1][1] else states
        states = states if replay.steps else [(START, states[-1][1])]
        cell = replay.ranks.index(rank), chunk
        for (begin, counts), (end, _) in zip(states, [*states[1:], (math.inf, ())], strict=True):
            if any(counts) and begin != end:
                together[timing.at(begin), timing.at(end)].append((cell, counts))
    for span, cells in sorted(together.items()):
        always = span[0] <= 0 and span[1] > timing.duration
        group, errors = (Node("g") if always else Node("g").show(span) for _ in range(2))
        paths: dict[int, str] = defaultdict(str)
        for cell, counts in cells:
            held = replay.chunks[cell[1]]
            paths[cell[1]] += filled(grid, replay, cell, counts)
            if held.mixed:
                grid.faults(errors, cell, ["?"])
            twice = [f"×{counts[k]}" if counts[k] > 1 else "" for k in held.stripes]
            grid.faults(errors, cell, twice)
        for column, path in sorted(paths.items()):
            group.path(path, f"f{column % 8}")
        panel.children.append(group)
        marks.children += [errors] if errors.children else []


def _bands(scene: Scene, panel: Node, grid: Grid, timing: Timing) -> None:
    """Draw the data of each message, sliding from the sender's row to the receiver's.

    Data that slides equally far shares a group.
    """
    scene.definitions.append(
        f'<clipPath id="cells"><rect y="{grid.top - 2:.1f}" width="960" '
        f'height="{grid.bottom - grid.top + 4:.1f}"/></clipPath>'
    )
    moving, replay = panel.add("g", clip_path="url(#cells)"), timing.replay
    ranks, ring = replay.ranks, replay.topology.kind == "ring"
    wraps = ring and len(ranks) > 2 and replay.topology.order == ranks
    for step in range(replay.steps):
        begin, end = timing.start(step), timing.arrival(step)
        step_group = moving.add("g").show((begin, end))
        groups: dict[float, Node] = {}
        indices = replay.in_step(step)
        for m, landing in ((replay.messages[i], x) for i in indices for x in replay.landings[i]):
            cell = ranks.index(m.src), landing.chunk
            down = (ranks.index(m.dst) - cell[0]) * grid.height
            routes = [(0.0, down)]  # where it begins, from the sender's row, and how far it goes
            # leaves at one end of the column and enters at the other
            if wraps and {m.src, m.dst} == {ranks[0], ranks[-1]}:
                way = grid.height if m.src == ranks[-1] else -grid.height
                routes = [(0.0, way), (down - way, way)]
            x, y, width, height = grid.inside(*cell)
            path = filled(grid, replay, cell, landing.carried, apart=True)
            for start, far in routes:
                if round(far, 1) not in groups:
                    group = groups[round(far, 1)] = step_group.add("g")
                    group.key("translate", (begin, (0.0, 0.0)), (end, (0.0, far)), mode="ease")
                group = groups[round(far, 1)]
                if start:
                    group = group.add("g", transform=f"translate(0,{number(start)})")
                group.rect(x - 1, y - 1, width + 2, height + 2, "mv", rx=3)
                group.path(path, f"f{landing.chunk % 8}")


def draw_traffic(scene: Scene, timing: Timing, note: Iterable[str]) -> None:
    """Add the matrix of bytes, a row for each sender.

    The note below it says why the contents are not shown.
    """
    scene.style += STYLE
    replay, panel = timing.replay, scene.panel(narrow=NARROW)
    grid = grid_of(replay.ranks, len(replay.ranks), 2.0)
    grid.names(panel, "from \\ to")
    grid.ground(panel)
    # by (src, dst): the bytes sent after each step
    totals: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for step in range(replay.steps):
        for i in replay.in_step(step):
            m = replay.messages[i]
            so_far = max(totals[m.src, m.dst].values(), default=0)
            totals[m.src, m.dst][step] = so_far + m.nbytes
    most = max((max(states.values()) for states in totals.values()), default=1) or 1
    for (src, dst), states in sorted(totals.items()):
        ends = [*map(timing.arrival, [*states][1:]), timing.duration + 1]
        for (step, nbytes), end in zip(states.items(), ends):
            group, share = panel.add("g").show((timing.arrival(step), end)), nbytes / most
            place = replay.ranks.index(src), replay.ranks.index(dst)
            grid.value(group, *place, human_bytes(nbytes), 0.15 + 0.75 * share, share > 0.5)
    if replay.messages:
        panel.lines(note, LEFT + WIDTH / 2, grid.bottom + 20, 16, 12, "m c")


def draw_waiting_calls(scene: Scene, timing: Timing) -> None:
    """Add a row for each rank with its sends and receives, and a cursor."""
    panel, ranks, messages = scene.panel(narrow=NARROW), timing.replay.ranks, timing.replay.messages
    calls = [(m, event) for m in messages for event in (m.send, m.recv)]
    row = min(TALL, ALL / len(ranks))
    top, lane = MIDDLE - row * len(ranks) / 2, row / 2 - 2
    begin = min((event.posted for _, event in calls), default=0.0)
    span = max((event.end for _, event in calls), default=begin) - begin
    rows = TimeRows(scene, begin, span, LEFT, LEFT + WIDTH)
    for i, rank in enumerate(ranks):
        y = top + i * row
        panel.rect(LEFT, y + 2, WIDTH, row - 4, "faint", rx=2)
        panel.write(f"rank {rank}", LEFT - 12, y + row / 2 + 4, 12, "m e")
        for kind, above in (("send", y + 2), ("recv", y + row / 2)):
            own = [(m, event) for m, event in calls if (event.rank, event.kind) == (rank, kind)]
            named = len(own) == 1 and lane >= LABELLED
            inside, tall = (lane - 13, 10.0) if named else (0.15 * lane, 0.7 * lane)
            for message, event in own:
                moves, words = max(message.start, event.posted), _words(event)
                title = f"rank {rank}, {words}: waits {human_seconds(moves - event.posted)}"
                waits = Bar(event.posted, moves, "idle", title, inside, tall)
                sent = Bar(moves, max(event.end, moves), kind, title, inside, tall)
                rows.draw([waits, sent], above, panel)
                left, end = rows.x(event.posted), rows.x(sent.end)
                place = (end - 4, "m e") if left > LEFT + 0.75 * WIDTH else (left + 2, "m")
                if named:
                    panel.write(words, place[0], above + inside - 4, 12, place[1])
    waited = max(calls, key=lambda call: call[0].start - call[1].posted, default=None)
    if waited and (wait := waited[0].start - waited[1].posted) > 0:
        where = f"rank {waited[1].rank}, {_words(waited[1])}"
        scene.description += f" The longest wait: {where}, {human_seconds(wait)}."
    if messages:
        bottom, middle = top + row * len(ranks), LEFT + WIDTH / 2
        rows.cursor(panel, [(0.0, begin), *timing.cursor()], top - 2, bottom + 2)
        panel.write("0", LEFT, bottom + 14, 12, "m")
        panel.write(human_seconds(span), LEFT + WIDTH, bottom + 14, 12, "m e")
        panel.lines(LEGEND, middle, bottom + 32, 16, 12, "m c")


def _words(event: Event) -> str:
    """Return a call in words: "send to rank 1", "recv from rank 0"."""
    return f"{'send to' if event.kind == 'send' else 'recv from'} rank {event.peer}"
