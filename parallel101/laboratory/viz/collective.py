"""The collective view: who sends which chunk to whom in each step, and what every rank then holds.

    left    the ranks, connected by their messages, and tiles that move (graph.py)
    right   ranks × chunks, a stripe for each rank whose data is in a cell (matrix.py)
    below   every send as recorded, with a cursor

A run of more than 16 ranks is drawn by many_ranks.py. Everything is drawn from the record, and
nothing is specific to an algorithm. `laboratory.analysis` reads what is in a chunk from the
values, the steps from what waited for what, and the topology from who sent to whom.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from parallel101.laboratory.analysis.replay import replay_of
from parallel101.laboratory.analysis.verdict import Verdict
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_seconds
from parallel101.laboratory.viz.captions import (
    NEVER_WRITTEN,
    NO_DATA,
    NO_ORIGIN,
    TOO_MANY,
    Captions,
    draw_caption,
)
from parallel101.laboratory.viz.graph import draw_graph
from parallel101.laboratory.viz.many_ranks import BINS, draw_many_ranks, sending_over_time
from parallel101.laboratory.viz.matrix import draw_matrix, draw_traffic, draw_waiting_calls
from parallel101.laboratory.viz.rows import TimeRows
from parallel101.laboratory.viz.scene import TO_CHROME, Scene, Stop, box, check_ranks
from parallel101.laboratory.viz.timing import Timing

MOST_RANKS, MOST_MESSAGES = 128, 20_000
# one by one; more ranks are summed up (many_ranks.py)
MOST_DRAWN_RANKS, MOST_DRAWN_MESSAGES, MOST_CHUNKS = 16, 2000, 16
LEFT, WIDTH, TOP = 28.0, 904.0, 440.0  # of the bars of the sends
STYLE = ".sum{fill:var(--mute);opacity:.75}.copy{fill:var(--accent);opacity:.75}"


def collective_scene(
    trace: Trace,
    results: Sequence[Any] | None = None,
    *,
    title: str | None = None,
    inputs: Sequence[Any] | None = None,
    watched: Sequence[int] | None = None,
    idle: bool = False,
    summary: bool = False,
) -> Scene:
    """Animate the messages of a run.

    If the run kept its messages and their values carry their origin (as those of
    `parallel101.watch` do), the picture shows whose data each rank holds of each chunk, and flags
    data that a sum contains twice or lacks. Without contents, it shows which calls wait and when
    bytes move, and of other values the bytes that moved. More than 16 ranks are summed up: how far
    the messages of each step go, and between which ranks.

    Args:
        trace: the record of a run of up to 16 ranks and 2,000 messages, or up to 128 ranks and
            20,000 messages.
        results: what each rank returned, by rank, if known.
        title: above the picture; None: a title derived from the record.
        inputs: what each rank was given, by rank; None: each rank starts with the part that carries
            its own origin.
        watched: the shape of the tensor that `watch` gave each rank.
        idle: also draw ranks that sent and received nothing.
        summary: sum up each step, as for more than 16 ranks.

    Returns:
        A Scene with one stop for each step of the algorithm.

    Raises:
        ValueError: too many ranks or messages, or not one result or input for each rank.
    """
    replay = replay_of(trace, results, inputs, watched, idle)
    check_ranks(len(replay.ranks), MOST_RANKS, TO_CHROME)
    many = summary or len(replay.ranks) > MOST_DRAWN_RANKS
    if len(replay.messages) > (most := MOST_MESSAGES if many else MOST_DRAWN_MESSAGES):
        raise ValueError(
            f"the run has {len(replay.messages)} messages, and the collective view can show up to "
            f"{most}: animate a shorter run (one collective, fewer ranks), or use run.timeline()"
        )
    too_many = len(replay.chunks) > MOST_CHUNKS
    verdict = Verdict(replay)
    if too_many or many:  # the result is judged, but not drawn
        replay = dataclasses.replace(replay, known=False)
    timing, captions = Timing(replay), Captions(replay, verdict)
    scene = Scene(960, 500, title or captions.title, f"{captions.size}. {captions.intro}")
    scene.duration = timing.duration
    scene.narrow = (480, 842)
    scene.style += STYLE
    scene.head(captions.size, "")
    _draw_captions(scene, timing, captions)
    if many:
        draw_many_ranks(scene, timing, captions.phases)
    else:
        draw_graph(scene, timing, captions.phases)
    if replay.known:
        draw_matrix(scene, timing, captions.legend)
    elif not many:
        kept = any(m.payload for m in replay.messages)
        if kept or too_many or replay.no_data or any(replay.unwritten):
            unknown = NEVER_WRITTEN if any(replay.unwritten) else NO_ORIGIN
            note = TOO_MANY if too_many else NO_DATA if replay.no_data else unknown
            draw_traffic(scene, timing, note)
        else:
            draw_waiting_calls(scene, timing)
    if replay.messages:
        _draw_sends(scene, timing, many)
    return scene


def _draw_captions(scene: Scene, timing: Timing, captions: Captions) -> None:
    """Draw, for each step, the sentence under the title and the bytes at the right.

    The player's stops get the same text.
    """
    panel, replay = scene.panel(narrow="none"), captions.replay

    def show(text: str, fact: str, begin: float, end: float, wrong: bool = False) -> None:
        group = draw_caption(panel, text, (begin, end), 884 - 6.8 * len(fact), wrong)
        if fact:
            group.write(fact, 932, 64, 13, "m e")

    scene.intro = captions.intro
    if not replay.steps:
        return show(captions.intro, "", 0.0, 1.0)
    show(captions.intro, captions.sent(-1), 0.0, timing.start(0))
    for step, phase in enumerate(captions.phases):
        text, fact, last = captions.step(step), captions.sent(step), step == replay.steps - 1
        error = captions.new_error(step) if replay.known else ""
        until = timing.reveal if last and captions.result else timing.start(step + 1)
        show(text, fact, timing.start(step), timing.arrival(step) if error else until)
        if error:
            show(error, fact, timing.arrival(step), until, wrong=True)
        label = f"Step {step + 1} of {replay.steps}{', ' + phase if phase else ''}: {text} {error}"
        if last and captions.result:
            label += f" {captions.result}"
            wrong = bool(captions.verdict.faults)
            show(captions.result, fact, timing.reveal, scene.duration + 1, wrong)
        label = " ".join(label.split())
        scene.stops.append(Stop(timing.start(step), timing.end(step), label))


def _draw_sends(scene: Scene, timing: Timing, many: bool) -> None:
    """Draw every send on the record's own time axis, one row for each sender.

    As in the ring of steps, messages that were added on arrival are grey. If the ranks are `many`,
    draw how many of them are sending.
    """
    replay = timing.replay
    senders = {rank: i for i, rank in enumerate(sorted({m.src for m in replay.messages}))}
    row = min(6.0, 28.0 / len(senders))
    begin = min(m.start for m in replay.messages)
    span = max(m.end for m in replay.messages) - begin
    bars = scene.panel(narrow="translate(14.9,334) scale(.469,1)")

    rows = TimeRows(scene, begin, span, left=LEFT, right=LEFT + WIDTH)
    paths: dict[str, str] = {"sum": "", "copy": ""}
    for i, m in enumerate(replay.messages if not many else ()):
        added = replay.known and any(landing.added for landing in replay.landings[i])
        left, y = rows.x(m.start), TOP + senders[m.src] * row
        width = max(0.8, rows.x(m.end) - left - 1)
        paths["sum" if added else "copy"] += box(left + 0.5, y, width, row * 0.72)
    if many and span:
        tall, each = row * len(senders), WIDTH / BINS
        for k, share in enumerate(sending_over_time(replay, begin, span)):
            paths["copy"] += box(LEFT + k * each, TOP + tall * (1 - share), each, tall * share)
    for name, path in paths.items():
        if path:
            bars.path(path, name)
    bottom = TOP + row * len(senders)
    rows.cursor(bars, [(0.0, begin), *timing.cursor()], TOP - 5, bottom + 3)
    clock = "in virtual time." if replay.trace.backend == "sim" else "as recorded."
    legend = f"All sends, {clock}"
    if all(paths.values()):
        legend += " Grey: added on arrival. Blue: copied."
    if many:
        legend = f"How many of the {len(replay.ranks)} ranks are sending, {clock}"
    for text, place, anchor, narrow in (
        ("0", LEFT, "", "translate(0,334)"),
        (legend, LEFT + WIDTH / 2, " c", "translate(-240,348)"),  # on a phone, one line lower
        (human_seconds(span), LEFT + WIDTH, " e", "translate(-480,334)"),
    ):
        scene.panel(narrow=narrow).write(text, place, bottom + 15, 11, "m" + anchor)
