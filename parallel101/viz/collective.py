"""The collective view: who sends which chunk to whom in each step, and what every rank then holds.

    left   ranks as their messages connect them, tiles on their way         right  ranks × chunks, a stripe for each
    below  every send as recorded, with a cursor                                   rank whose data is in a cell

All of it is drawn from the record: what is in a chunk is read from the values (`provenance.py`), the step from what waited
for what (`steps.py`), the layout from who sent to whom (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel101.analysis.replay import history_of
from parallel101.record.trace import Trace
from parallel101.viz.captions import NO_ORIGIN, NOT_KEPT, TOO_MANY, Words, step_sentence
from parallel101.viz.graph import draw_graph
from parallel101.viz.matrix import draw_matrix
from parallel101.viz.scene import Scene, Step
from parallel101.viz.strip import draw_strip
from parallel101.viz.tempo import Tempo
from parallel101.viz.traffic import draw_traffic

MOST_RANKS, MOST_MESSAGES, MOST_CHUNKS, MOST_STRIPED_RANKS = 64, 2000, 16, 17


def collective_scene(
    trace: Trace, results: Sequence[Any] | None = None, *, title: str | None = None, inputs: Sequence[Any] | None = None
) -> Scene:
    """Animate the messages of a run.

    Where the values carry their origin (`parallel101.watch` feeds such) and the run kept them, the picture shows whose data every rank
    holds of every chunk, and says what is in a sum twice or missing from it. Otherwise it shows the bytes that moved.

    Args:
        trace: the record of a run of up to 64 ranks and 2,000 messages.
        results: what each rank returned, by rank, where known.
        title: above the picture; derived from the record where None.
        inputs: what each rank was given, by rank; where None, each rank is taken to begin with the part that carries its own origin.

    Returns:
        A Scene with one step for each step of the algorithm.

    Raises:
        ValueError: too many ranks or messages to be told apart, or results or inputs that are not one a rank.
    """
    history = history_of(trace, results, inputs)
    if len(history.ranks) > MOST_RANKS:
        raise ValueError(
            f"{len(history.ranks)} ranks took part and the collective view tells up to {MOST_RANKS} apart: use fewer, or run.timeline()"
        )
    if len(history.messages) > MOST_MESSAGES:
        raise ValueError(
            f"{len(history.messages)} messages are more than the {MOST_MESSAGES} that the collective view animates: "
            "animate a shorter run (one collective, fewer ranks), or use run.timeline()"
        )
    too_many = len(history.columns) > MOST_CHUNKS or len(history.ranks) > MOST_STRIPED_RANKS
    if too_many:
        history.known = False
    tempo, words = Tempo(history), Words(history)
    scene = Scene(960, 500, title or words.title, f"{words.size}. {words.intro}")
    scene.duration = tempo.duration
    scene.narrow = (480, 842)
    scene.panel(narrow="translate(0,0)").add("text", scene.title, x=28, y=40, class_="h")
    scene.panel(narrow="none").add("text", words.size, x=932, y=40, font_size=13, class_="m e")
    _captions(scene, tempo, words)
    draw_graph(scene, history, tempo, words.phases)
    if history.known:
        draw_matrix(scene, history, tempo)
    else:
        kept = any(m.payload for m in history.messages)
        draw_traffic(scene, history, tempo, TOO_MANY if too_many else NO_ORIGIN if kept else NOT_KEPT)
    draw_strip(scene, history, tempo)
    return scene


def _captions(scene: Scene, tempo: Tempo, words: Words) -> None:
    """The muted sentence under the title and the bytes at the right, as they change; and the same as the steps' labels."""
    panel, history = scene.panel(narrow="none"), words.history

    def say(text: str, fact: str, begin: float, end: float, wrong: bool = False) -> None:
        group = panel.add("g")
        if scene.duration:
            group.show((begin, end))
        room, width = 884 - 6.8 * len(fact), (8.7 if wrong else 7.7) * len(text)  #  in fonts as wide as DejaVu Sans
        group.add("text", text, x=28, y=64, font_size=min(14.0, 14 * room / width), class_="w b" if wrong else "m")
        if fact:
            group.add("text", fact, x=932, y=64, font_size=13, class_="m e")

    scene.intro = words.intro
    if not history.steps:
        return say(words.intro, "", 0.0, 0.0)
    say(words.intro, words.sent(-1), 0.0, tempo.start(0))
    for step, phase in enumerate(words.phases):
        text, fact, last = step_sentence(history, step), words.sent(step), step == history.steps - 1
        fault = words.new_fault(step) if history.known else ""
        until = tempo.reveal if last and history.known else tempo.start(step + 1)
        say(text, fact, tempo.start(step), tempo.land(step) if fault else until)
        if fault:
            say(fault, fact, tempo.land(step), until, wrong=True)
        said = [f"Step {step + 1} of {history.steps}{', ' + phase if phase else ''}: {text}", fault]
        if last and history.known:
            said.append(words.outcome.sentence())
            say(said[-1], fact, tempo.reveal, scene.duration + 1, wrong=bool(words.outcome.faults))
        scene.steps.append(Step(tempo.start(step), tempo.end(step), " ".join(part for part in said if part)))
