"""Draws a plan: where the time of the best layouts goes, what fills the memory of the best one, and
which GPU of which node has which part of it.

    1  dp 32 · tp 8 · pp 4 …           3.56 s     a bar for each of the best layouts
       ▇▇▇▇▇▇▇▇▇▇▇▇▒▒▒▒▓▓///                      the range, and the simulated step, below it
       ├────────◇──┤
    first stage  ▇▇▇▇▒▒▒▓▓////   67.5 GB          hatched: headroom
    stage 0   [0 1 2 3 4 5 6 7] [0 1 2 …]         a box for each node, a square for each GPU
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.planner.plan_report import MEMORY_WORDS, model_words
from parallel101.planner.search import layout_text
from parallel101.record.units import decimal_bytes, human_seconds, listed
from parallel101.viz.scene import HATCHING, Node, Scene

if TYPE_CHECKING:
    from parallel101.planner.plan import Plan, Planned

LEFT, RIGHT, WIDE = 28.0, 932.0, 960
MOST_BARS = 5
BAR, ROW = 20.0, 58.0
# name of a part → the number of its colour; the bubble is hatched
PART_COLOURS = {"matmul": 0, "memory-bound": 4, "tp": 1, "cp": 6, "ep": 7, "pp": 3, "dp": 2}
PART_COLOURS |= {"optimizer": 5}
SHORT = {"matmul": "products", "memory-bound": "memory-bound kernels"}
MEMORY_COLOURS = {"weights": 0, "gradients": 3, "optimizer": 1, "activations": 4, "buffers": 7}
MEMORY_LEFT, MEMORY_RIGHT, MEMORY_ROW = 118.0, 790.0, 30.0
SQUARE, TALL, NODE_GAP = 32.0, 44.0, 24.0
MOST_STAGES, MOST_NODES = 4, 3
STYLE = (
    ".part{stroke:var(--bg);stroke-width:.6}.idle{fill:url(#hatching);stroke:var(--line)}"
    ".range{stroke:var(--mute);stroke-width:1.5;fill:none}.run{fill:var(--bg);stroke:var(--accent);"
    "stroke-width:2}.node{fill:none;stroke:var(--line);stroke-dasharray:4 4}"
)


def plan_scene(plan: Plan) -> Scene:
    """Draw a plan as a still Scene."""
    cluster, best = plan.cluster, plan.best
    where = f"{cluster.gpus:,} {cluster.chip.name}{'s' * (cluster.gpus > 1)}"
    scene = Scene(WIDE, 100, f"{model_words(plan)} on {where}")
    scene.style += STYLE
    scene.definitions.append(HATCHING)
    scene.description = (
        f"The best layout takes {human_seconds(best.seconds)} a step: {layout_text(best.layout)}."
    )
    scene.add("text", scene.title, x=LEFT, y=40, class_="h")
    facts = f"{plan.batch * plan.shape.time:,} tokens a step, {plan.fitting:,} layouts fit"
    scene.add("text", facts, x=RIGHT, y=40, font_size=13, class_="m e")
    ran = any(of.simulated for of in plan)
    text = "Bars: seconds of a step by the quick model, with their range below."
    text += " Diamonds: the same step on virtual GPUs." * ran
    scene.add("text", text, x=LEFT, y=64, font_size=14, class_="m")
    y = _times(scene, plan, 92.0)
    scene.cuts.append(y - 8)
    y = _memory(scene, best, y + 24)
    scene.cuts.append(y - 8)
    scene.height = round(_nodes(scene, best, y + 24))
    return scene


# ── time ──


def _times(scene: Scene, plan: Plan, y: float) -> float:
    """The bars of the best layouts. Returns where they end."""
    shown = list(plan)[:MOST_BARS]
    names = [n for n in shown[0].parts if any(of.parts[n] > 0.001 * of.seconds for of in shown)]
    kinds = {SHORT.get(name, name): PART_COLOURS.get(name) for name in names}
    _legend(scene, kinds, y)
    ends = [max(of.high, of.simulated.seconds if of.simulated else 0.0) for of in shown]
    scale = (RIGHT - LEFT) / max(ends)
    y += 26
    for number, of in enumerate(shown, 1):
        panel = scene.add("g")
        weight = "b" if number == 1 else "m"
        panel.add("text", number, x=LEFT, y=y + 12, font_size=14, class_=weight)
        text = layout_text(of.layout)
        panel.add("text", text, x=LEFT + 18, y=y + 12, font_size=13)
        text = f"MFU {of.mfu:.1%}"
        panel.add("text", text, x=RIGHT - 70, y=y + 12, font_size=14, class_="m e")
        text = human_seconds(of.seconds)
        panel.add("text", text, x=RIGHT, y=y + 12, font_size=14, class_="b e")
        x, top = LEFT, y + 19
        for name in names:
            width = of.parts[name] * scale
            kind = PART_COLOURS.get(name)
            rect = panel.add(
                "rect",
                x=x,
                y=top,
                width=max(width, 0.1),
                height=BAR,
                class_="idle" if kind is None else f"part f{kind}",
            )
            share = of.parts[name] / of.seconds
            rect.add("title", f"{name}: {human_seconds(of.parts[name])}, {share:.1%}")
            label = f"{share:.0%}"
            if kind is not None and width > 34:
                panel.add(
                    "text", label, x=x + width / 2, y=top + 14, font_size=12, class_=f"c o{kind}"
                )
            x += width
        _range(panel, of, top + BAR + 7, scale)
        y += ROW
    return y


def _range(panel: Node, of: Planned, y: float, scale: float) -> None:
    """The range of the quick model, and the simulated step."""
    low, high = LEFT + of.low * scale, LEFT + of.high * scale
    d = f"M{low:.1f} {y - 3}v6M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 3}v6"
    panel.add("path", d=d, class_="range")
    if of.simulated is not None:
        x = LEFT + of.simulated.seconds * scale
        mark = panel.add("path", d=f"M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z", class_="run")
        mark.add("title", f"on virtual GPUs: {human_seconds(of.simulated.seconds)}")


def _legend(scene: Scene, kinds: Mapping[str, int | None], y: float, x: float = LEFT) -> None:
    """Names beside their colours; None is hatched."""
    for name, kind in kinds.items():
        colour = "idle" if kind is None else f"f{kind}"
        scene.add("rect", x=x, y=y - 9, width=14, height=10, rx=2, class_=colour)
        scene.add("text", name, x=x + 20, y=y, font_size=12.5, class_="m")
        x += 40 + 7 * len(name)


# ── memory ──


def _memory(scene: Scene, best: Planned, y: float) -> float:
    """The memory of the first and of the last stage. Returns where it ends."""
    have = best.cluster.memory_bytes
    words = f"Memory of layout 1, of {decimal_bytes(have)} on each GPU"
    scene.add("text", words, x=LEFT, y=y, font_size=15, class_="b")
    kinds: dict[str, int | None] = {
        MEMORY_WORDS[name]: kind
        for name, kind in MEMORY_COLOURS.items()
        if any(getattr(stage, name) for stage in best.memory)
    }
    _legend(scene, {**kinds, "headroom": None}, y + 24)
    y += 40
    scale = (MEMORY_RIGHT - MEMORY_LEFT) / max(have, *(s.total for s in best.memory))
    stages = {"first stage": best.memory[0], "last stage": best.memory[-1]}
    if best.layout.pp == 1:
        stages = {"every GPU": best.memory[0]}
    for words, stage in stages.items():
        scene.add("text", words, x=MEMORY_LEFT - 10, y=y + 15, font_size=13, class_="m e")
        x = MEMORY_LEFT
        scene.add("rect", x=x, y=y, width=have * scale, height=BAR + 2, class_="idle")
        for name, kind in MEMORY_COLOURS.items():
            nbytes = getattr(stage, name)
            width = nbytes * scale
            if not nbytes:
                continue
            rect = scene.add(
                "rect", x=x, y=y, width=max(width, 0.1), height=BAR + 2, class_=f"part f{kind}"
            )
            text = decimal_bytes(nbytes)
            rect.add("title", f"{MEMORY_WORDS[name]}: {text}")
            if 7 * len(text) + 6 < width:
                middle = x + width / 2
                scene.add("text", text, x=middle, y=y + 15, font_size=12, class_=f"c o{kind}")
            x += width
        text = decimal_bytes(stage.total)
        scene.add("text", text, x=RIGHT, y=y + 17, font_size=17, class_="b e")
        y += MEMORY_ROW
    return y


# ── nodes ──


def _nodes(scene: Scene, best: Planned, y: float) -> float:
    """Which GPU has which part of the model and of the batch. Returns where it ends."""
    layout, per_node = best.layout, min(best.cluster.nodes_of, best.layout.gpus)
    scene.add("text", "Layout 1 on the nodes", x=LEFT, y=y, font_size=15, class_="b")
    scene.add("text", crossing(layout, per_node), x=LEFT, y=y + 22, font_size=14, class_="m")
    y += 36
    # rows: the stages, if each has whole nodes; otherwise one row of nodes
    of_stage = layout.gpus // layout.pp
    rows = {f"stage {s}": s * of_stage for s in _some(layout.pp, MOST_STAGES)}
    rows = rows if layout.pp > 1 else {"": 0}
    inside = of_stage
    if of_stage % per_node:
        rows, inside = {"": 0}, layout.gpus
    wide = per_node * SQUARE + NODE_GAP
    fit = max(1, int((RIGHT - 92 + NODE_GAP) // wide))
    axes = [a for a in ("pp", "dp", "ep", "cp", "tp") if getattr(layout, a) > 1]
    axes = [a for a in axes if a != "pp" or of_stage % per_node] or ["dp"]
    for words, first in rows.items():
        scene.add("text", words, x=LEFT, y=y + 26, font_size=13, class_="m")
        x, end = 92.0, first
        for node in _some(inside // per_node, min(fit, MOST_NODES)):
            start = first + node * per_node
            if node and start != end:
                middle = x - NODE_GAP / 2 - 1
                scene.add("text", "…", x=middle, y=y + 26, font_size=13, class_="c m")
            end = start + per_node
            _node(scene, layout, range(start, end), axes, x, y)
            x += wide
        y += TALL + 20
    nodes = layout.gpus // per_node
    left_out = f"{nodes:,} nodes in all. " if nodes > len(rows) * MOST_NODES else ""
    words = f"{left_out}Each square is a GPU with its place along {listed(axes)}; "
    words += "those of one colour hold the same place along dp."
    scene.add("text", words, x=LEFT, y=y + 8, font_size=13, class_="m")
    return y + 28


def _node(
    scene: Scene, layout: ParallelLayout, gpus: range, axes: list[str], x: float, y: float
) -> None:
    """One node: a square for each of its GPUs."""
    wide = len(gpus) * SQUARE
    scene.add("rect", x=x - 4, y=y - 4, width=wide + 6, height=TALL + 8, rx=6, class_="node")
    for number, gpu in enumerate(gpus):
        place = place_of(layout, gpu)
        kind = place["dp"] % 8
        left = x + number * SQUARE
        rect = scene.add(
            "rect", x=left, y=y, width=SQUARE - 2, height=TALL, rx=3, class_=f"part f{kind}"
        )
        rect.add("title", f"GPU {gpu}: " + ", ".join(f"{a} {n}" for a, n in place.items()))
        top = y + TALL / 2 + 3.5 - 5.5 * (len(axes) - 1)
        for line, axis in enumerate(axes):
            text = f"{axis} {place[axis]}"
            middle = left + SQUARE / 2 - 1
            scene.add("text", text, x=middle, y=top + 11 * line, font_size=9, class_=f"c o{kind}")


def place_of(layout: ParallelLayout, gpu: int) -> dict[str, int]:
    """Axis → the position of this GPU along it."""
    return {axis: gpu // stride % getattr(layout, axis) for axis, stride in layout.strides.items()}


def crossing(layout: ParallelLayout, per_node: int) -> str:
    """Which axes stay inside a node, in a sentence."""
    inside, outside = [], []
    for axis, stride in layout.strides.items():
        size = getattr(layout, axis)
        if size > 1:
            (inside if stride * size <= per_node else outside).append(f"{axis} {size}")
    parts = []
    if inside:
        parts.append(f"{listed(inside)} stay{'s' * (len(inside) == 1)} inside a node, on NVLink.")
    if outside:
        verb = f"cross{'es' * (len(outside) == 1)}"
        parts.append(f"{listed(outside)} {verb} nodes, on the network.")
    return " ".join(parts) or "One GPU has the whole model."


def _some(count: int, most: int) -> list[int]:
    """The first ones of `count`, and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]
