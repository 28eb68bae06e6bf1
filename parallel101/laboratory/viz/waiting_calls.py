"""The right half of the collective view if the contents of messages were not kept: who waits when.

    rank 0   ░░░░░░░░░▓▓▓   send to 1      hatched: the call waits for the other rank's
    rank 1            ▓▓▓   recv from 0    filled: the bytes move

A row for each rank, on the record's own time axis: sends above, receives below.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.events import Event, Message
from parallel101.laboratory.record.units import human_seconds
from parallel101.laboratory.viz.matrix import LEFT, MIDDLE, NARROW, WIDTH
from parallel101.laboratory.viz.scene import Node, Scene
from parallel101.laboratory.viz.timing import Timing

LEGEND = (
    "Hatched: a call waits for the other rank's call.",
    "Filled: the bytes move. Sends are above, receives below.",
)
# heights: the most for a rank and for all; the least for a call with its name
TALL, ALL, LABELLED = 66.0, 232.0, 26.0
STYLE = ".waits{fill:url(#hatching);stroke:var(--hatch)}.takes{fill:var(--mute)}"


def draw_waiting_calls(scene: Scene, replay: Replay, timing: Timing) -> None:
    """Add a row for each rank with its sends and receives, and a cursor."""
    scene.style += STYLE + ".gives{fill:var(--accent)}"
    panel = scene.panel(narrow=NARROW)
    n, messages = len(replay.ranks), replay.messages
    row = min(TALL, ALL / n)
    top = MIDDLE - row * n / 2
    begin = min((e.posted for m in messages for e in (m.send, m.recv)), default=0.0)
    span = max((e.end for m in messages for e in (m.send, m.recv)), default=begin) - begin

    def x(t: float) -> float:
        return LEFT + (WIDTH * (t - begin) / span if span else 0.0)

    for i, rank in enumerate(replay.ranks):
        y = top + i * row
        panel.rect(LEFT, y + 2, WIDTH, row - 4, "faint", rx=2)
        panel.write(f"rank {rank}", LEFT - 12, y + row / 2 + 4, 12, "m e")
        for kind, low in (("send", 0.0), ("recv", 0.5)):
            sides = [(m, m.send if kind == "send" else m.recv) for m in messages]
            mine = [(m, event) for m, event in sides if event.rank == rank]
            for message, event in mine:
                _call(panel, message, event, x, y + 2 + low * (row - 4), row / 2 - 2, len(mine))
    waits = [(m.start - e.posted, e) for m in messages for e in (m.send, m.recv)]
    if waits and (wait := max(waits, key=lambda wait: wait[0]))[0] > 0:
        where = f"rank {wait[1].rank}, {_words(wait[1])}"
        scene.description += f" The longest wait: {where}, {human_seconds(wait[0])}."
    if messages:
        cursor = panel.path(f"M0 {top - 2:.1f}v{row * n + 4:.1f}", "now")
        frames = [(t, (x(recorded), 0.0)) for t, recorded in timing.cursor()]
        cursor.key("translate", (0.0, (LEFT, 0.0)), *frames)
        for text, at, anchor in (("0", LEFT, ""), (human_seconds(span), LEFT + WIDTH, " e")):
            panel.write(text, at, top + row * n + 14, 12, "m" + anchor)
        for k, line in enumerate(LEGEND):
            y = top + row * n + 32 + 16 * k
            panel.write(line, LEFT + WIDTH / 2, y, 12, "m c")


def _call(
    panel: Node,
    message: Message,
    event: Event,
    x: Callable[[float], float],
    y: float,
    lane: float,
    calls: int,
) -> None:
    """Draw one rank's side of a message, with its name if no other message is in its lane."""
    named = calls == 1 and lane >= LABELLED
    low, tall = (y + lane - 13, 10.0) if named else (y + 0.15 * lane, 0.7 * lane)
    moves = max(message.start, event.posted)
    waited = human_seconds(max(moves - event.posted, 0.0))
    for start, end, look in (
        (event.posted, moves, "waits"),
        (moves, max(event.end, moves), "gives" if event.kind == "send" else "takes"),
    ):
        if end > start:
            width = max(x(end) - x(start), 1.5)
            bar = panel.rect(x(start), low, width, tall, look)
            bar.add("title", f"rank {event.rank}, {_words(event)}: waits {waited}")
    if named:
        right = x(event.posted) > LEFT + 0.75 * WIDTH
        at = x(max(event.end, moves)) if right else x(event.posted)
        text, class_ = _words(event), "m e" if right else "m"
        panel.write(text, at + (-4 if right else 2), low - 4, 12, class_)


def _words(event: Event) -> str:
    """Return a call in words: "send to rank 1", "recv from rank 0"."""
    return f"{'send to' if event.kind == 'send' else 'recv from'} rank {event.peer}"
