"""Draws memory per rank: solid is what a rank holds, hatched what only other ranks hold.

The total is at the right.

rank 0  ▇▇▇▇ ▇▇//  ▇▇▇▇//////////   18.9 MB        one panel for each trainer
rank 1  ▇▇▇▇ //▇▇  //////▇▇▇▇////   18.9 MB

The same place in the bars of two ranks is the same part of the model: dp 2 × tp 2 looks like this.

rank 0  ▇▇▇▇//////  rank 2  ▇▇▇▇//////
rank 1  ////▇▇▇▇▇▇  rank 3  ////▇▇▇▇▇▇

The bytes were counted by a trainer's `describe()` in its tensors. What memory should cost is in
`parallel101.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Protocol

from parallel101.laboratory.record.units import decimal_bytes
from parallel101.laboratory.viz.scene import END, PHONE, Scene, check_drawn

LEFT, RIGHT, TOP = 92.0, 790.0, 120.0
TALL, ROW, HEAD, BETWEEN = 22.0, 27.0, 26.0, 12.0
ONLY_OTHERS = "Solid: this rank holds it. Hatched: only other ranks do."
LARGEST = "Solid: what it holds. Hatched: how much less than the largest."  # one rank each
PEAK = " (peak)"  # the end of the name of a kind that is held only for a moment
KIND_COLOURS = {"weights": 0, "gradients": 3, "optimizer state": 1}
OTHER_COLOURS = (4, 6, 2, 7, 5)
MOST_ROWS = 48
NARROW = 380.0  # the right end of the bars on phones
# parts that are more than the whole together are not drawn side by side: some ranks hold the same
OVERLAP = 1.05


class HeldBytes(Protocol):
    """The bytes that a trainer's `describe()` returns: kind → bytes by position in the group.

    It also has the rank at each position. If it has `parts`, they say which parts of the whole
    model these bytes belong to: kind → by position, (from, to) as fractions.
    """

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def bytes(self) -> Mapping[str, Sequence[int]]: ...


def memory_scene(
    holdings: HeldBytes | Mapping[str, HeldBytes], *, title: str = "Memory per rank", note: str = ""
) -> Scene:
    """Draw the bytes that each rank holds.

    Args:
        holdings: what `trainer.describe()` returned; or several of them by name, drawn one below
            the other on one scale.
        title, note: the title of the picture, and a note at its right.

    Returns:
        A still Scene. A kind's bar is as long as the most that any rank in the picture holds of it.
        If a rank holds less, the rest of its bar is hatched. So draw a trainer that holds
        everything next to those that shard it: then each rank's bytes are where its `parts` are,
        and at one place of two bars is the same part of the model. Without parts, shards are drawn
        side by side.

    Raises:
        ValueError: nothing to draw, or more than 48 rows.
    """
    panels = holdings if isinstance(holdings, Mapping) else {"": holdings}
    rows = sum(len(of.ranks) for of in panels.values())
    words = f"{len(panels)} trainers have {rows} ranks together"
    check_drawn(rows, MOST_ROWS, words, " rows")
    kinds = dict.fromkeys(kind for of in panels.values() for kind in of.bytes)
    most = {k: max(max(of.bytes.get(k) or [0]) for of in panels.values()) for k in kinds}
    most = {k: most[k] for k in sorted(most, key=lambda kind: kind.endswith(PEAK)) if most[k]}
    scale = (RIGHT - LEFT - 4 * len(most)) / max(sum(most.values()), 1)
    lefts, x = {}, LEFT
    for kind, count in most.items():
        lefts[kind], x = x, x + count * scale + 4
    # only next to a rank that holds all of a kind is it known how long the whole model is
    placed = {
        kind
        for of in panels.values()
        for kind, by_position in getattr(of, "parts", {}).items()
        if any(share_of(parts) > 0.999 for parts in by_position)
    }
    others = cycle(OTHER_COLOURS)
    colours = {k: KIND_COLOURS[k] if k in KIND_COLOURS else next(others) for k in most}
    high = round(TOP + rows * ROW + len(panels) * (HEAD + BETWEEN) + 8)
    scene = Scene(960, high, title, "The bytes that each rank holds.")
    scene.style += (
        ".others{fill:url(#hatching);stroke:var(--line)}.own{stroke:var(--bg);stroke-width:.6}"
    )
    several = any(len(of.ranks) > 1 for of in panels.values())
    scene.head(note, ONLY_OTHERS if several else LARGEST)
    scene.intro = f"{scene.intro} {note}".strip()
    low = scene.legend([(kind, f"f{colour}") for kind, colour in colours.items()], 82)
    scene.narrow = (PHONE, scene.height + low)
    names, bars, inside, totals = scene.columns(LEFT, RIGHT, NARROW, low)
    totals.write("total", END, 91, 12, "m e")
    y = TOP
    for name, of in panels.items():
        names.write(name, LEFT, y + 12, 15, "b")
        y += HEAD if name else 0
        for position, rank in enumerate(of.ranks):
            names.write(f"rank {rank}", LEFT - 10, y + 15, 12.5, "m e")
            for kind, whole in most.items():
                by_position = of.bytes.get(kind, [0] * len(of.ranks))
                mine = by_position[position]
                known = getattr(of, "parts", {}).get(kind) if kind in placed else None
                parts = known[position] if known else ()
                if not parts:
                    apart = sum(by_position) <= OVERLAP * whole
                    place = position / len(of.ranks) if apart else 0.0
                    parts = [(place, place + mine / whole)]
                width, temporary = whole * scale, kind.endswith(PEAK)
                if not temporary:
                    bars.rect(lefts[kind], y, width, TALL, "others", rx=2)
                if not mine:
                    continue
                # what was counted may differ a little from the model's share: padding, counts
                exact, widest = mine / whole / share_of(parts) * width, (0.0, y, 0.0, TALL)
                title, colour = f"{kind}: {decimal_bytes(mine)}", colours[kind]
                for low, high in parts:
                    wide = (high - low) * exact
                    at = 0.0 if temporary else min(low * width, max(width - wide, 0.0))
                    drawn = lefts[kind] + at, y, max(wide, 1.0), TALL
                    bars.rect(*drawn, f"own f{colour}", rx=2, title=title)
                    widest = max(widest, drawn, key=lambda box: box[2])
                inside.label(decimal_bytes(mine), widest, f"o{colour}", 11.5, 11.5)
            total = sum(by_position[position] for by_position in of.bytes.values())
            totals.write(decimal_bytes(total), END, y + 17, 17, "b e")
            y += ROW
        y += BETWEEN
    return scene


def share_of(parts: Sequence[tuple[float, float]]) -> float:
    """Return the share of the whole model that these parts are."""
    return sum(high - low for low, high in parts)
