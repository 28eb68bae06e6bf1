"""Draws a forward run beside its backward run: the same ranks, with the arrows reversed.

    Forward: …                Backward: …
     0 ──▶ 1                   0 ◀── 1
    ranks × chunks            ranks × chunks

The messages of the forward run play first, then those of the backward run. Each half is the
collective view of its run (graph.py and matrix.py), moved to its place.
"""

from __future__ import annotations

from typing import Any

from parallel101.laboratory.analysis.replay import Replay, replay_of
from parallel101.laboratory.viz.captions import Captions
from parallel101.laboratory.viz.graph import draw_graph
from parallel101.laboratory.viz.matrix import draw_matrix
from parallel101.laboratory.viz.scene import Node, Scene, Stop, in_two_lines
from parallel101.laboratory.viz.timing import Timing

# the width of a half; where it begins below the title, and its height
HALF, TOP, HEIGHT = 480, 52, 712
# from where the collective view has them to where a half has them
GRAPH, CELLS = "translate(20,-18)", "translate(-386,328) scale(.9)"
PAUSE = 0.6  # seconds from the end of the forward run to the start of the backward run


def forward_backward_scene(
    forward: Any, backward: Any, *, title: str = "Forward and backward"
) -> Scene:
    """Animate two watched runs side by side, one after the other.

    The name of each half is read from its messages.

    Args:
        forward, backward: runs of `parallel101.watch`.
        title: above the picture.

    Returns:
        A Scene with a stop for each step of both runs.

    Raises:
        ValueError: a run has no messages whose values carry their origin.
    """
    scene = Scene(2 * HALF, TOP + HEIGHT, title)
    scene.narrow = (HALF, TOP + 2 * HEIGHT)
    scene.panel(narrow="translate(0,0)").write(title, 28, 40, None, "h")
    first, second = _replay(forward, "forward"), _replay(backward, "backward")
    turn = Timing(first).reveal + PAUSE  # when the backward run starts
    scene.duration = turn + Timing(second).duration
    below, end = f"translate({-HALF},{HEIGHT})", scene.duration
    _half(scene, "Forward", first, x=0, narrow="translate(0,0)", begin=0.0, end=turn)
    _half(scene, "Backward", second, x=HALF, narrow=below, begin=turn, end=end)
    scene.intro = Captions(first).intro
    return scene


def _replay(run: Any, word: str) -> Replay:
    replay = run.trace and replay_of(run.trace, run.results, watched=run.watched)
    if not replay or not replay.messages or not replay.known:
        raise ValueError(
            f"the {word} run has no messages whose values carry their origin: record it with "
            "parallel101.watch"
        )
    return replay


def _half(
    scene: Scene, word: str, replay: Replay, *, x: int, narrow: str, begin: float, end: float
) -> None:
    """Draw one run. `begin`, `end`: its seconds in the scene."""
    timing, captions = Timing(replay), Captions(replay)
    name = f"{word}: {captions.title[0].lower()}{captions.title[1:]}"
    drawing = Scene(HALF, HEIGHT, name)
    draw_graph(drawing, timing, captions.phases)
    graph = len(drawing.children)
    draw_matrix(drawing, timing, captions.legend)
    for i, panel in enumerate(drawing.children):
        panel.attributes = {"transform": GRAPH if i < graph else CELLS}
    drawing.write(name, 28, 14, 16, "b")
    starts = [0.0, *map(timing.start, range(replay.steps)), timing.reveal]
    steps = [captions.step(step) for step in range(replay.steps)]
    texts = [captions.intro, *steps, captions.verdict.sentence()]
    for text, *span in zip(texts, starts, [*starts[1:], timing.duration + 1], strict=True):
        lines = in_two_lines(text) if len(text) > 58 else [text]
        drawing.add("g").show((span[0], span[1])).lines(lines, 28, 36, 17, 13, "m")
    for step, text in enumerate(steps):
        label = f"{word}, step {step + 1} of {replay.steps}: {text}"
        stop = end if step == replay.steps - 1 else begin + timing.end(step)
        scene.stops.append(Stop(begin + timing.start(step), stop, label))
    for node in drawing.children:
        _shift(node, begin, timing.duration)
    scene.description += f"{name}. "
    scene.definitions += [text for text in drawing.definitions if text not in scene.definitions]
    scene.style = drawing.style  # the same for both halves
    half = scene.panel(narrow=narrow).add("g", transform=f"translate({x},{TOP})")
    half.children += drawing.children


def _shift(node: Node, begin: float, duration: float) -> None:
    """Start later.

    What shows at the start already does so before, and what shows at the end, at `duration`, stays.
    """
    for name, (mode, frames) in node.tracks.items():
        later = [(1e9 if t > duration else t + begin if t else 0.0, value) for t, value in frames]
        node.tracks[name] = mode, later
    for child in node.children:
        _shift(child, begin, duration)
