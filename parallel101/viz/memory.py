"""Memory a rank: what it holds solid, what only others hold hatched, the sum large at the right; one panel a trainer.

rank 0  ▇▇▇▇ ▇▇//  ▇▇▇▇//////////   18.9 MB        from what `describe()` counted in the storages,
rank 1  ▇▇▇▇ //▇▇  //////▇▇▇▇////   18.9 MB        never from what somebody multiplied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from parallel101.trainers.memory import readable
from parallel101.viz.scene import HATCHING, Node, Scene

LEFT, RIGHT, TOP = 92.0, 790.0, 120.0
TALL, ROW, HEAD, BETWEEN = 22.0, 27.0, 26.0, 12.0
MOMENT = ", at most"  #  how a kind is called that is there for a moment only
HOUSE_COLOURS = {"weights": 0, "gradients": 3, "optimizer state": 1}
FREE_COLOURS = (4, 6, 2, 7, 5)
MOST_ROWS = 48


class Counted(Protocol):
    """What a trainer's `describe()` gives: kind → bytes by position, and the ranks of these positions."""

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def bytes(self) -> Mapping[str, Sequence[int]]: ...


def memory_scene(counted: Counted | Mapping[str, Counted], *, title: str = "Memory per rank", note: str = "") -> Scene:
    """Draw bytes a rank as they were counted.

    Args:
        counted: what `trainer.describe()` gave; or several of them by name, drawn above each other on one scale.
        title, note: above the picture; the note stands at the right.

    Returns:
        A Scene that stands still. The bar of a kind is as long as the most that any rank in the picture holds of it; a rank that holds
        less owns a piece of it, and the rest of the bar is hatched. So put the trainer that holds everything beside those that share.

    Raises:
        ValueError: nothing to draw, or more than 48 rows.
    """
    panels = counted if isinstance(counted, Mapping) else {"": counted}
    rows = sum(len(of.ranks) for of in panels.values())
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows (ranks of {len(panels)} trainers): expected 1 to {MOST_ROWS}")
    most: dict[str, int] = {}
    for of in panels.values():
        for kind, by_position in of.bytes.items():
            most[kind] = max([most.get(kind, 0), *by_position])
    most = {kind: count for kind, count in sorted(most.items(), key=lambda item: item[0].endswith(MOMENT)) if count}
    scale = (RIGHT - LEFT - 4 * len(most)) / max(sum(most.values()), 1)
    lefts, x = {}, LEFT
    for kind, count in most.items():
        lefts[kind], x = x, x + count * scale + 4
    colours = colours_of(most)
    scene = Scene(
        960, round(TOP + rows * ROW + len(panels) * (HEAD + BETWEEN) + 8), title, "Bytes that each rank holds, as they were counted."
    )
    scene.style += ".others{fill:url(#hatching);stroke:var(--line)}.own{stroke:var(--bg);stroke-width:.6}"
    scene.definitions.append(HATCHING)
    _head(scene, note, colours)
    y = TOP
    for name, of in panels.items():
        scene.add("text", name, x=LEFT, y=y + 12, font_size=15, class_="b")
        y += HEAD if name else 0
        for position, rank in enumerate(of.ranks):
            scene.add("text", f"rank {rank}", x=LEFT - 10, y=y + 15, font_size=12.5, class_="m e")
            for kind, whole in most.items():
                mine = of.bytes.get(kind, [0] * len(of.ranks))[position]
                _bar(scene, kind, mine, whole, position / len(of.ranks), lefts[kind], y, scale, colours[kind])
            total = sum(by_position[position] for by_position in of.bytes.values())
            scene.add("text", readable(total), x=932, y=y + 17, font_size=17, class_="b e")
            y += ROW
        y += BETWEEN
    return scene


def _bar(scene: Node, kind: str, mine: int, whole: int, place: float, left: float, y: float, scale: float, colour: int) -> None:
    width = whole * scale
    passing = kind.endswith(MOMENT)
    if not passing:
        scene.add("rect", x=left, y=y, width=width, height=TALL, rx=2, class_="others")
    if not mine:
        return
    at = left + (0.0 if passing or mine == whole else min(place * width, width - mine * scale))
    rect = scene.add("rect", x=at, y=y, width=max(mine * scale, 1.0), height=TALL, rx=2, class_=f"own f{colour}")
    rect.add("title", f"{kind}: {readable(mine)}")
    text = readable(mine)
    if 7 * len(text) + 6 < mine * scale:
        scene.add("text", text, x=at + mine * scale / 2, y=y + 15, font_size=11.5, class_=f"c o{colour}")


def _head(scene: Scene, note: str, colours: Mapping[str, int]) -> None:
    scene.add("text", scene.title, x=28, y=40, class_="h")
    scene.add("text", note, x=932, y=40, font_size=13, class_="m e")
    scene.add("text", "Solid: this rank holds it. Hatched: only other ranks do.", x=28, y=64, font_size=14, class_="m")
    x = 28.0
    for kind, colour in colours.items():
        scene.add("rect", x=x, y=82, width=14, height=10, rx=2, class_=f"f{colour}")
        scene.add("text", kind, x=x + 20, y=91, font_size=12.5, class_="m")
        x += 40 + 6.6 * len(kind)
    scene.add("text", "together", x=932, y=91, font_size=12, class_="m e")


def colours_of(kinds: Mapping[str, int]) -> dict[str, int]:
    """A colour for each kind: the house's, or one that is left."""
    others = [kind for kind in kinds if kind not in HOUSE_COLOURS]
    return {kind: HOUSE_COLOURS[kind] if kind in HOUSE_COLOURS else FREE_COLOURS[others.index(kind) % len(FREE_COLOURS)] for kind in kinds}
