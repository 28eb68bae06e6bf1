"""The right half of the collective view if the contents of messages were not kept: who waits when.

    rank 0   ░░░░░░░░░▓▓▓   send to 1      hatched: the call waits for the other rank's
    rank 1            ▓▓▓   recv from 0    filled: the bytes move

A row for each rank, on the record's own time axis: sends above, receives below.
"""

from __future__ import annotations

from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.units import human_seconds
from parallel101.laboratory.viz.matrix import LEFT, MIDDLE, NARROW, WIDTH
from parallel101.laboratory.viz.rows import Bar, TimeRows
from parallel101.laboratory.viz.scene import Scene
from parallel101.laboratory.viz.timing import Timing

LEGEND = (
    "Hatched: a call waits for the other rank's call.",
    "Filled: the bytes move. Sends are above, receives below.",
)
# heights: the most for a rank and for all; the least for a call with its name
TALL, ALL, LABELLED = 66.0, 232.0, 26.0


def draw_waiting_calls(scene: Scene, replay: Replay, timing: Timing) -> None:
    """Add a row for each rank with its sends and receives, and a cursor."""
    panel = scene.panel(narrow=NARROW)
    n, messages = len(replay.ranks), replay.messages
    row = min(TALL, ALL / n)
    top = MIDDLE - row * n / 2
    begin = min((e.posted for m in messages for e in (m.send, m.recv)), default=0.0)
    span = max((e.end for m in messages for e in (m.send, m.recv)), default=begin) - begin

    rows = TimeRows(scene, begin, span, left=LEFT, right=LEFT + WIDTH)
    for i, rank in enumerate(replay.ranks):
        y = top + i * row
        panel.rect(LEFT, y + 2, WIDTH, row - 4, "faint", rx=2)
        panel.write(f"rank {rank}", LEFT - 12, y + row / 2 + 4, 12, "m e")
        for kind, low in (("send", 0.0), ("recv", 0.5)):
            sides = [(m, m.send if kind == "send" else m.recv) for m in messages]
            mine = [(m, event) for m, event in sides if event.rank == rank]
            lane, above = row / 2 - 2, y + 2 + low * (row - 4)
            named = len(mine) == 1 and lane >= LABELLED
            inside, tall = (lane - 13, 10.0) if named else (0.15 * lane, 0.7 * lane)
            for message, event in mine:
                moves, words = max(message.start, event.posted), _words(event)
                title = f"rank {rank}, {words}: waits {human_seconds(moves - event.posted)}"
                waits = Bar(event.posted, moves, "idle", title, inside, tall)
                sent = Bar(moves, max(event.end, moves), kind, title, inside, tall)
                rows.draw([waits, sent], above, panel)
                left, end = rows.x(event.posted), rows.x(sent.end)
                place = (end - 4, "m e") if left > LEFT + 0.75 * WIDTH else (left + 2, "m")
                if named:
                    panel.write(words, place[0], above + inside - 4, 12, place[1])
    waited = [(m.start - e.posted, e) for m in messages for e in (m.send, m.recv)]
    if waited and (wait := max(waited, key=lambda wait: wait[0]))[0] > 0:
        where = f"rank {wait[1].rank}, {_words(wait[1])}"
        scene.description += f" The longest wait: {where}, {human_seconds(wait[0])}."
    if messages:
        rows.cursor(panel, [(0.0, begin), *timing.cursor()], top - 2, top + row * n + 2)
        for text, at, anchor in (("0", LEFT, ""), (human_seconds(span), LEFT + WIDTH, " e")):
            panel.write(text, at, top + row * n + 14, 12, "m" + anchor)
        for k, line in enumerate(LEGEND):
            y = top + row * n + 32 + 16 * k
            panel.write(line, LEFT + WIDTH / 2, y, 12, "m c")


def _words(event: Event) -> str:
    """Return a call in words: "send to rank 1", "recv from rank 0"."""
    return f"{'send to' if event.kind == 'send' else 'recv from'} rank {event.peer}"
