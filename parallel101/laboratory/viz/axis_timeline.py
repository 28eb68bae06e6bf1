"""Draws which axis of the mesh communicates when, and how much: one panel for each axis.

    compute  rank 0  ▇▇forward▇▇  ▇▇backward▇▇          sent   messages
    dp       rank 0                          ▬▬▬▬      1 MiB          2
    tp       rank 0  ▬  ▬  ▬  ▬   ▬  ▬  ▬  ▬         128 KiB         16

The first panel shows what the ranks compute. In the others, the upper half of a row shows what the
rank sends, and the lower half what it receives. The axis of a message is in the record: it is the
axis of the mesh in whose group the message was sent. `laboratory.analysis.traffic` counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from parallel101.laboratory.analysis.overlap import union
from parallel101.laboratory.analysis.traffic import AxisTraffic, axis_traffic
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz.rows import (
    LEFT,
    Bar,
    TimeRows,
    legend_entries,
    span_colours,
    span_lanes,
    trace_facts,
)
from parallel101.laboratory.viz.scene import Scene, check_ranks

RIGHT, TOP = 770.0, 112.0
SENT, COUNT = 856.0, 932.0  # the right ends of the columns of numbers
TALL, ROW, HEAD, BETWEEN = 11.0, 13.0, 22.0, 10.0
MOST_RANKS = 16
TICK = 2.0  # the least width of a message, so that single ones are seen
# not the colours of compute
AXIS_CLASSES = {"dp": "dp", "cp": "f2", "ep": "f4", "pp": "pp", "tp": "f3"}
OTHER_CLASSES = ("f6", "f5")
NO_AXIS = "no axis"
ONE = " A collective of torch's own counts as one message."


def axes_scene(
    trace: Trace, within: str | None = None, *, title: str = "Which axis communicates when"
) -> Scene:
    """Draw the messages of each axis of the mesh over time, and what each rank sent along it.

    Args:
        trace: the record of a run in which groups come from a mesh with named axes, as the
            trainers' do.
        within: show the last span of this name on each rank, such as one step. None: the whole
            record. If that has the last events of a run only, the numbers are of the whole run.
        title: of the picture.

    Returns:
        A still Scene. A collective of torch's own counts as one message with its payload, since the
        record does not see its messages.

    Raises:
        ValueError: more than 16 ranks, or no span has that name.
    """
    n = trace.world_size
    check_ranks(n, MOST_RANKS, "use run.timeline(), which draws up to 128")
    window, traffic = axis_traffic(trace, within)
    lanes = span_lanes([e for e in window.events if e.kind == "span"])
    spans = [e for e in window.events if e.kind == "span" and lanes[id(e)] == 0]
    high = HEAD + n * ROW + BETWEEN
    panels = len(traffic) + bool(spans)
    words = " ".join(axis_text(of, n) for of in traffic)
    scene = Scene(960, math.ceil(TOP + panels * high + 34), title, words)
    colours = span_colours(e for e in spans if not e.waiting)
    span = window.end - window.begin
    rows = TimeRows(scene, window.begin, span, right=RIGHT, colours=colours, least=TICK)
    scene.style += ".received{fill-opacity:.5}.none{fill:var(--mute)}.dp{fill:var(--p4)}"
    scene.style += ".pp{fill:var(--p3)}.pp.received{fill-opacity:.7}"
    sentence = "Messages in flight, by axis of the mesh. Upper half of a row: sent. Lower half: "
    sentence += "received." + ONE * (several := any(of.collectives for of in traffic))
    facts = f"{trace_facts(trace)} · {human_seconds(span)}"
    scene.head(facts, sentence, 13 if several else 14)
    scene.legend(legend_entries(spans, colours, 5))
    of_all = " in the whole run" if trace.earlier and within is None else ""
    scene.write(f"sent{of_all}", SENT, 89, 12, "m e")
    scene.write("messages", COUNT, 89, 12, "m e")
    y = TOP
    for of in [*[None] * bool(spans), *traffic]:
        scene.write((of.axis or NO_AXIS) if of else "compute", 44 if of else 28, y + 12, 14, "b")
        if of:
            scene.rect(28, y + 2, 10, 10, axis_class(of.axis), rx=2)
            _numbers(scene, of, range(n), y + 12, "b e", 13)
        for rank in range(n):
            at = y + HEAD - 6 + rank * ROW
            scene.rect(LEFT, at, RIGHT - LEFT, TALL, "row")
            rows.rank(rank, at + 9, 10.5)
            if of:
                _numbers(scene, of, [rank], at + 9, "m e", 10.5)
                rows.draw(rows.together(_bars(of, rank)), at)
            else:
                here = [e for e in spans if e.rank == rank]
                rows.draw(rows.bars(here, lanes, 1, TALL + 1, 0), at)
        y += high
    rows.axis(y)
    return scene


def axis_text(of: AxisTraffic, ranks: int) -> str:
    """Return the numbers of an axis, for the picture's alternative text."""
    each = ", ".join(f"{human_bytes(of.sent(rank))} in {of.count(rank)}" for rank in range(ranks))
    return f"{of.axis or NO_AXIS}: bytes and messages sent by rank: {each}."


def axis_class(axis: str | None) -> str:
    """Return the class of an axis's bars; bars without an axis are grey."""
    if axis is None:
        return "none"
    return AXIS_CLASSES.get(axis) or OTHER_CLASSES[sum(map(ord, axis)) % len(OTHER_CLASSES)]


def _numbers(
    scene: Scene, of: AxisTraffic, ranks: Sequence[int], y: float, look: str, size: float
) -> None:
    """Write what these ranks sent together: the bytes, and the number of messages."""
    scene.write(human_bytes(sum(map(of.sent, ranks))), SENT, y, size, look)
    scene.write(sum(map(of.count, ranks)), COUNT, y, size, look)


def _bars(of: AxisTraffic, rank: int) -> Iterator[Bar]:
    """Yield the bars of what a rank has in flight. Those that overlap are one."""
    both = [(e.start, e.end) for e in of.collectives if e.rank == rank]
    sent = [(m.start, m.end) for m in of.messages if m.src == rank]
    received = [(m.start, m.end) for m in of.messages if m.dst == rank]
    half, colour = TALL / 2 - 0.3, axis_class(of.axis)
    for pieces, low, tall, class_, word in (
        (both, 0.0, TALL, colour, "collectives of torch's own"),
        (sent, 0.0, half, colour, "sent"),
        (received, TALL - half, half, f"{colour} received", "received"),
    ):
        title = f"{of.axis or NO_AXIS}, rank {rank}: {len(pieces)} {word}"
        for start, end in union(pieces):
            yield Bar(start, end, class_, title, low, tall, name=word)
