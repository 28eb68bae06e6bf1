"""Arranges one rank's activations as layers of a picture: bytes by microbatch.

The layers are stacked, and are constant from one change to the next. Each forward and backward is
as wide as the others, and the changes in it are spread evenly: the order of a program is known
exactly, and its time on another machine is not.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any, NamedTuple

MOST_POINTS = 400
CountedActivations = Any  # what `p101.count_activations` yields


class HeldOverTime(NamedTuple):
    """The layers of one rank.

    Attributes:
        places: of the points, from 0 to 1.
        layers: microbatch, or None → its bytes at each point, and until the next.
        phases: (phase, its start, its end), from 0 to 1.
        peak: (place, bytes, {microbatch: bytes}) of the first point with the most bytes.
    """

    places: list[float]
    layers: dict[int | None, list[int]]
    phases: list[tuple[Any, float, float]]
    peak: tuple[float, int, dict[int | None, int]]


def held_over_time(activations: CountedActivations) -> HeldOverTime:
    """Return the layers. Of more than 400 points, those with the most bytes are kept."""
    # a change outside of all phases, or after one inside another, belongs to the last that began
    slots = list(accumulate((change.phase for change in activations.changes), max))
    shown = [i for i, phase in enumerate(activations.phases) if phase.name or i in slots]
    counts, seen, width = Counter(slots), Counter[int](), 1 / max(len(shown), 1)
    starts = {i: n * width for n, i in enumerate(shown)}
    microbatches = {kept.phase.microbatch for kept in activations.kept}
    held = dict.fromkeys(sorted(microbatches, key=lambda i: (i is None, i)), 0)
    points: list[tuple[float, dict[int | None, int]]] = [(0.0, dict(held))]
    for change, slot in zip(activations.changes, slots):
        kept = activations.kept[change.kept]
        held[kept.phase.microbatch] += kept.nbytes if change.saved else -kept.nbytes
        seen[slot] += 1
        points.append((starts[slot] + width * seen[slot] / (counts[slot] + 1), dict(held)))
    at = max(range(len(points)), key=lambda i: (sum(points[i][1].values()), -i))
    place, most = points[at]
    peak = place, sum(most.values()), {i: n for i, n in most.items() if n}
    points = thinned(points)
    return HeldOverTime(
        [place for place, _ in points],
        {microbatch: [of[microbatch] for _, of in points] for microbatch in held},
        [(activations.phases[i], starts[i], starts[i] + width) for i in shown],
        peak,
    )


def thinned(points: list[Any]) -> list[Any]:
    """Keep at most 400 points, and the last one.

    A kept point has the most bytes of its group of neighbours.
    """
    several = -(-len(points) // MOST_POINTS)
    groups = [points[i : i + several] for i in range(0, len(points), several)]
    most = [max(group, key=lambda point: sum(point[1].values())) for group in groups]
    return most if points[-1] is most[-1] else [*most, points[-1]]
