"""Draws the activations of a step, rank by rank: the bytes that autograd keeps for backward.

    rank 0   ▂▄▆█▇▆▄▂      peak 101 kB: microbatches 0 and 1      a colour for each microbatch
             F0 F1 B0 …    the forwards and backwards, in the order in which the rank ran them

`p101.count_activations` counted them. All ranks have one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel101.laboratory.analysis.held_over_time import (
    CountedActivations,
    HeldOverTime,
    held_over_time,
)
from parallel101.laboratory.record.units import decimal_bytes
from parallel101.laboratory.viz.rows import TimeRows
from parallel101.laboratory.viz.scene import PHONE, Scene, check_drawn

LEFT, RIGHT, TOP = 92.0, 928.0, 104.0
TALL, LEAST, BELOW = 104.0, 30.0, 50.0  # of a rank's picture, and of what is written below it
MOST_RANKS = 16
NARROW = 464.0  # the right end of the pictures on phones
LETTERS = {"forward": "F", "backward": "B", "input gradient": "I", "weight gradient": "W"}
MOST_LEGEND = 8
STYLE = (
    ".peak{stroke:var(--warn);stroke-width:1.4;stroke-dasharray:5 4;fill:none;"
    "vector-effect:non-scaling-stroke}.slot{stroke:var(--line);vector-effect:non-scaling-stroke}"
)


def activations_scene(
    activations: CountedActivations
    | Sequence[CountedActivations]
    | Mapping[str, CountedActivations],
    *,
    title: str = "Activations over a step",
) -> Scene:
    """Draw what was held for the backward pass, from change to change.

    Args:
        activations: of each rank, in order, such as `run.results` if each rank returned its own;
            or one; or several by name.
        title: above the picture.

    Returns:
        A still Scene. Forwards and backwards are equally wide, whatever their time.

    Raises:
        ValueError: nothing to draw, or more than 16 ranks.
    """
    if hasattr(activations, "changes"):
        activations = {"": activations}
    elif not isinstance(activations, Mapping):
        activations = {f"rank {rank}": of for rank, of in enumerate(activations)}
    check_drawn(len(activations), MOST_RANKS, f"{len(activations)} ranks")
    ranks = {name: held_over_time(of) for name, of in activations.items()}
    most = max(1, *(of.peak[1] for of in ranks.values()))
    scale = TALL / most
    heights = [max(LEAST, TALL * of.peak[1] / most) for of in ranks.values()]
    words = "The bytes that autograd keeps for the backward pass."
    scene = Scene(960, round(TOP + sum(heights) + len(ranks) * BELOW), title, words)
    scene.style += STYLE
    sentence = "What autograd keeps for backward, in the order of the program. Dashed: the peak."
    scene.head("", sentence)
    microbatches = sorted({i for of in ranks.values() for i in of.layers if i is not None})
    entries = [(str(i), _colour(i)) for i in microbatches[:MOST_LEGEND]]
    if entries:
        entries[0] = f"microbatch {entries[0][0]}", entries[0][1]
    if len(microbatches) > MOST_LEGEND:
        entries[-1] = f"{entries[-1][0]} …", entries[-1][1]
    low = scene.legend(entries, 78)
    scene.narrow = (PHONE, scene.height + low)
    names, plots, letters, _ = scene.columns(LEFT, RIGHT, NARROW, low)
    rows, base = TimeRows(scene, 0.0, 1.0, left=LEFT, right=RIGHT), TOP - BELOW
    for (name, of), height in zip(ranks.items(), heights):
        base += BELOW + height
        names.write(name, LEFT - 10, base - 4, 12.5, "m e")
        names.write(_peak_in_words(of), LEFT, base + 34, 12.5)
        # the layers, the first microbatch at the bottom
        edges = [f"{rows.x(place):.1f}" for place in of.places] + [f"{RIGHT:g}"]
        layers, highs = [], [0] * len(of.places)
        for microbatch, layer in of.layers.items():
            highs = [low + own for low, own in zip(highs, layer)]
            steps = zip(highs, edges[1:])
            path = "".join(f"V{base - high * scale:.1f}H{end}" for high, end in steps)
            layers.append((microbatch, layer, f"M{edges[0]} {base:g}{path}V{base:g}z"))
        for microbatch, layer, path in reversed(layers):  # each covers a part of the one before
            what = "activations" if microbatch is None else f"microbatch {microbatch}"
            area = plots.path(path, _colour(microbatch))
            area.add("title", f"{what}: at most {decimal_bytes(max(layer))}")
        place, peak, _ = of.peak
        y = base - peak * scale
        plots.path(f"M{LEFT:g} {y:.1f}H{RIGHT:g}M{rows.x(place):.1f} {y:.1f}V{base:g}", "peak")
        plots.path(f"M{LEFT:g} {base:g}H{RIGHT:g}", "slot")
        for phase, start, end in of.phases:
            left, wide = rows.x(start), rows.x(end) - rows.x(start)
            plots.path(f"M{left:.1f} {base:g}v5", "slot")
            number = "" if phase.microbatch is None else phase.microbatch
            text = f"{LETTERS.get(phase.name, '')}{number}"
            if 8 * len(text) < wide:
                letters.write(text, left + wide / 2, base + 15, 11, "m c")
    return scene


def _peak_in_words(of: HeldOverTime) -> str:
    _, most, parts = of.peak
    if not most:
        return "no activations"
    of_which = [i for i in parts if i is not None]
    if not of_which:
        return f"peak {decimal_bytes(most)}"
    named = ", ".join(map(str, of_which))
    if len(of_which) > 4 and of_which == list(range(of_which[0], of_which[-1] + 1)):
        named = f"{of_which[0]} to {of_which[-1]}"
    return f"peak {decimal_bytes(most)}: microbatch{'es' * (len(of_which) > 1)} {named}"


def _colour(microbatch: Any) -> str:
    return f"f{0 if microbatch is None else microbatch % 8}"
