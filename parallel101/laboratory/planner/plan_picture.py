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

from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import PARTS
from parallel101.laboratory.planner.plan_report import model_words
from parallel101.laboratory.planner.planned_layout import PlannedLayout, RankedLayouts
from parallel101.laboratory.planner.search import layout_text, layout_words
from parallel101.laboratory.record.units import decimal_bytes, human_seconds, listed
from parallel101.laboratory.viz.scene import HATCHING, Node, Scene

LEFT, RIGHT, WIDE, NARROW = 28.0, 932.0, 960, 480
MOST_BARS = 5
BAR, ROW = 20.0, 76.0
# name of a part → its class: the colour of a chunk, or another
PART_CLASSES = {"matmul": "f0", "memory-bound": "f4", "host": "host", "tp": "f1", "cp": "f6"}
PART_CLASSES |= {"ep": "f7", "pp": "f3", "dp": "f2", "bubble": "idle", "optimizer": "f5"}
SHORT = {"matmul": "products", "memory-bound": "memory-bound kernels", "host": "launches"}
MEMORY_CLASSES = {"weights": "f0", "gradients": "f3", "optimizer": "f1", "activations": "f4"}
MEMORY_CLASSES |= {"logits": "f2", "gradient_copy": "f6", "buffers": "f7"}
MEMORY_LEFT, MEMORY_RIGHT, MEMORY_ROW = 118.0, 790.0, 30.0
SQUARE, TALL, NODE_GAP, NODES_LEFT = 32.0, 44.0, 24.0, 92.0
MOST_STAGES, MOST_NODES = 4, 3
STYLE = (
    ".host{fill:var(--mute)}"
    ".part{stroke:var(--bg);stroke-width:.6}.idle{fill:url(#hatching);stroke:var(--line)}"
    ".range{stroke:var(--mute);stroke-width:1.5;fill:none}.run{fill:var(--bg);stroke:var(--accent);"
    "stroke-width:2}.node{fill:none;stroke:var(--line);stroke-dasharray:4 4}"
)


def plan_scene(plan: RankedLayouts) -> Scene:
    """Draw a plan as a still Scene."""
    cluster, best = plan.cluster, plan.best
    where = f"{cluster.gpus:,} {cluster.chip.name}{'s' * (cluster.gpus > 1)}"
    scene = Scene(WIDE, 100, f"{model_words(plan)} on {where}")
    scene.style += STYLE
    scene.definitions.append(HATCHING)
    scene.description = (
        f"The best layout takes {human_seconds(best.seconds)} a step: {layout_text(best.layout)}."
    )
    scene.panel("translate(0,0)").add("text", scene.title, x=LEFT, y=40, class_="h")
    facts = f"{plan.batch * plan.shape.time:,} tokens a step"
    facts += f", {plan.tried:,} layouts compared" * (plan.tried > 1)
    head = scene.panel("none")
    head.add("text", facts, x=RIGHT, y=40, font_size=13, class_="m e")
    ran = any(of.simulated for of in plan)
    scene.intro = "Bars: seconds of a step by the quick model, with their range below."
    scene.intro += " Diamonds: the same step on virtual GPUs." * ran
    head.add("text", scene.intro, x=LEFT, y=64, font_size=14, class_="m")
    # `lower`: by how much a part is lower on phones, where legends take several lines
    y, lower = _times(scene, plan, 92.0, -24)
    y, lower = _memory(scene, best, y + 24, lower)
    y = _nodes(scene, best, y + 24, lower)
    scene.height = round(y)
    scene.narrow = (NARROW, round(y + lower))
    return scene


# ── time ──


def _times(scene: Scene, plan: RankedLayouts, y: float, lower: int) -> tuple[float, int]:
    """Draw the bars of the best layouts, and return where they end."""
    shown = list(plan)[:MOST_BARS]
    names = [n for n in shown[0].parts if any(of.parts[n] > 0.001 * of.seconds for of in shown)]
    kinds = {SHORT.get(name, name): PART_CLASSES[name] for name in names}
    lower = _legend(scene, kinds, y, lower)
    words, bars, inside, right = _panels(scene, lower, LEFT, RIGHT, NARROW - LEFT)
    ends = [max(of.high, of.simulated.seconds if of.simulated else 0.0) for of in shown]
    scale = (RIGHT - LEFT) / max(ends)
    y += 26
    for number, of in enumerate(shown, 1):
        axes, options = layout_words(of.layout)
        weight = "b" if number == 1 else "m"
        words.add("text", number, x=LEFT, y=y + 12, font_size=14, class_=weight)
        words.add("text", axes, x=LEFT + 18, y=y + 12, font_size=14, class_=weight)
        words.add("text", options, x=LEFT, y=y + 28, font_size=11, class_="m")
        text = f"MFU {of.mfu:.1%}"
        right.add("text", text, x=RIGHT - 70, y=y + 12, font_size=14, class_="m e")
        text = human_seconds(of.seconds)
        right.add("text", text, x=RIGHT, y=y + 12, font_size=14, class_="b e")
        x, top = LEFT, y + 37
        for name in names:
            width, share = of.parts[name] * scale, of.parts[name] / of.seconds
            title = f"{name}: {human_seconds(of.parts[name])}, {share:.1%}"
            kind = PART_CLASSES[name]
            _bar(bars, x, top, width, BAR, kind, title)
            if kind[0] == "f" and width > 34:
                _inside(inside, f"{share:.0%}", kind, x + width / 2, top + 14)
            x += width
        _range(bars, of, top + BAR + 7, scale)
        y += ROW
    return y, lower


def _range(panel: Node, of: PlannedLayout, y: float, scale: float) -> None:
    """Draw the range of the quick model, and the simulated step."""
    low, high = LEFT + of.low * scale, LEFT + of.high * scale
    d = f"M{low:.1f} {y - 3}v6M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 3}v6"
    panel.add("path", d=d, class_="range")
    if of.simulated is not None:
        x = LEFT + of.simulated.seconds * scale
        mark = panel.add("path", d=f"M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z", class_="run")
        mark.add("title", f"on virtual GPUs: {human_seconds(of.simulated.seconds)}")


def _panels(
    scene: Scene, lower: int, left: float, right: float, narrow_right: float
) -> tuple[Node, Node, Node, Node]:
    """Return panels for words, for bars, for the numbers in bars, and for numbers at the right.

    The bars reach from `left` to `right`, on phones to `narrow_right`. The numbers in bars are not
    shown on phones.
    """
    k = (narrow_right - left) / (right - left)
    return (
        scene.panel(f"translate(0,{lower})"),
        scene.panel(f"translate({left * (1 - k):.1f},{lower}) scale({k:.4f},1)"),
        scene.panel("none"),
        scene.panel(f"translate({NARROW - WIDE},{lower})"),
    )


def _bar(
    panel: Node, x: float, y: float, width: float, height: float, kind: str, title: str
) -> None:
    rect = panel.add("rect", x=x, y=y, width=max(width, 0.1), height=height, class_=f"part {kind}")
    rect.add("title", title)


def _inside(panel: Node, text: str, kind: str, x: float, y: float) -> None:
    """Write a text in the middle of a bar of this class, f0 to f7."""
    panel.add("text", text, x=x, y=y, font_size=12, class_=f"c o{kind[1]}")


def _legend(scene: Scene, kinds: Mapping[str, str], y: float, lower: int) -> int:
    """Write names beside boxes of their classes, and return `lower` for what is below.

    On phones a legend takes several lines.
    """
    x = start = LEFT
    for name, kind in kinds.items():
        wide = 40 + 7 * len(name)
        if x - start + wide > NARROW - LEFT:
            start, lower = x, lower + 18
        entry = scene.panel(f"translate({LEFT - start:g},{lower})")
        entry.add("rect", x=x, y=y - 9, width=14, height=10, rx=2, class_=kind)
        entry.add("text", name, x=x + 20, y=y, font_size=12.5, class_="m")
        x += wide
    return lower


# ── memory ──


def _memory(scene: Scene, best: PlannedLayout, y: float, lower: int) -> tuple[float, int]:
    """Draw the memory of the first and of the last stage, and return where it ends."""
    have = best.cluster.memory_bytes
    words = f"Memory of layout 1, of {decimal_bytes(have)} on each GPU"
    heading = scene.panel(f"translate(0,{lower})")
    heading.add("text", words, x=LEFT, y=y, font_size=15, class_="b")
    kinds = {PARTS[name]: kind for name, kind in MEMORY_CLASSES.items()}
    lower = _legend(scene, {**kinds, "headroom": "idle"}, y + 24, lower)
    names, bars, inside, right = _panels(scene, lower, MEMORY_LEFT, MEMORY_RIGHT, 366)
    y += 40
    scale = (MEMORY_RIGHT - MEMORY_LEFT) / max(have, *(s.total for s in best.memory))
    stages = {"first stage": best.memory[0], "last stage": best.memory[-1]}
    if best.layout.pp == 1:
        stages = {"every GPU": best.memory[0]}
    for words, stage in stages.items():
        names.add("text", words, x=MEMORY_LEFT - 10, y=y + 15, font_size=13, class_="m e")
        bars.add("rect", x=MEMORY_LEFT, y=y, width=have * scale, height=BAR + 2, class_="idle")
        drawn = 0.0
        for name, kind in MEMORY_CLASSES.items():
            nbytes = getattr(stage, name)
            # they don't all have their peaks at the same time
            part = min(nbytes, stage.total - drawn)
            x, width, text = MEMORY_LEFT + drawn * scale, part * scale, decimal_bytes(nbytes)
            _bar(bars, x, y, width, BAR + 2, kind, f"{PARTS[name]}: {text}")
            if 7 * len(text) + 6 < width:
                _inside(inside, text, kind, x + width / 2, y + 15)
            drawn += part
        text = decimal_bytes(stage.total)
        right.add("text", text, x=RIGHT, y=y + 17, font_size=17, class_="b e")
        y += MEMORY_ROW
    return y, lower


# ── nodes ──


def _nodes(scene: Scene, best: PlannedLayout, y: float, lower: int) -> float:
    """Draw which GPU has which part of the model and the batch, and return where it ends."""
    layout, per_node = best.layout, min(best.cluster.nodes_of, best.layout.gpus)
    words = scene.panel(f"translate(0,{lower})")
    words.add("text", "Layout 1 on the nodes", x=LEFT, y=y, font_size=15, class_="b")
    for sentence in crossing(layout, per_node):
        y += 20
        words.add("text", sentence, x=LEFT, y=y + 2, font_size=14, class_="m")
    y += 16
    # rows: the stages, if each has whole nodes; otherwise one row of nodes
    of_stage = layout.gpus // layout.pp
    by_stage = layout.pp > 1 and of_stage % per_node == 0
    rows, inside = {"": 0}, layout.gpus
    if by_stage:
        rows, inside = {f"stage {s}": s * of_stage for s in _some(layout.pp, MOST_STAGES)}, of_stage
    wide = per_node * SQUARE + NODE_GAP
    fit = max(1, int((RIGHT - NODES_LEFT + NODE_GAP) // wide))
    axes = [a for a in ("pp", "dp", "ep", "cp", "tp") if getattr(layout, a) > 1]
    axes = [a for a in axes if a != "pp" or not by_stage] or ["dp"]
    panels = [scene.panel(f"translate(0,{lower})" if k == 0 else "none") for k in range(MOST_NODES)]
    for name, first in rows.items():
        words.add("text", name, x=LEFT, y=y + 26, font_size=13, class_="m")
        x, end = NODES_LEFT, first
        for panel, node in zip(panels, _some(inside // per_node, min(fit, MOST_NODES))):
            start = first + node * per_node
            if node and start != end:
                middle = x - NODE_GAP / 2 - 1
                panel.add("text", "…", x=middle, y=y + 26, font_size=13, class_="c m")
            end = start + per_node
            _node(panel, layout, range(start, end), axes, x, y)
            x += wide
        y += TALL + 20
    nodes = layout.gpus // per_node
    many = f" {nodes:,} nodes in all." if nodes > 1 else ""
    for sentence in (
        f"Each square is a GPU with its place along {listed(axes)}.",
        f"One colour is one place along dp.{many}",
    ):
        words.add("text", sentence, x=LEFT, y=y + 8, font_size=13, class_="m")
        y += 18
    return y + 12


def _node(
    panel: Node, layout: ParallelLayout, gpus: range, axes: list[str], x: float, y: float
) -> None:
    """Draw one node: a square for each of its GPUs."""
    wide = len(gpus) * SQUARE
    panel.add("rect", x=x - 4, y=y - 4, width=wide + 6, height=TALL + 8, rx=6, class_="node")
    for number, gpu in enumerate(gpus):
        place = place_of(layout, gpu)
        kind, left = f"f{place['dp'] % 8}", x + number * SQUARE
        title = f"GPU {gpu}: " + ", ".join(f"{a} {n}" for a, n in place.items())
        _bar(panel, left, y, SQUARE - 2, TALL, kind, title)
        top = y + TALL / 2 + 3.5 - 5.5 * (len(axes) - 1)
        middle = left + SQUARE / 2 - 1
        for line, axis in enumerate(axes):
            text, below = f"{axis} {place[axis]}", top + 11 * line
            size = 9 if len(text) < 6 else 8 if len(text) < 7 else 7
            panel.add("text", text, x=middle, y=below, font_size=size, class_=f"c o{kind[1]}")


def place_of(layout: ParallelLayout, gpu: int) -> dict[str, int]:
    """Return the position of a GPU along each axis."""
    return {axis: gpu // stride % getattr(layout, axis) for axis, stride in layout.strides.items()}


def crossing(layout: ParallelLayout, per_node: int) -> list[str]:
    """Return sentences that say which axes stay inside a node and which don't."""
    inside: list[str] = []
    outside: list[str] = []
    for axis, stride in layout.strides.items():
        size = getattr(layout, axis)
        if size > 1:
            (inside if stride * size <= per_node else outside).append(f"{axis} {size}")
    found = []
    if inside:
        found.append(f"{listed(inside)} stay{'s' * (len(inside) == 1)} inside a node, on NVLink.")
    if outside:
        verb = f"cross{'es' * (len(outside) == 1)}"
        found.append(f"{listed(outside)} {verb} nodes, on the network.")
    return found or ["One GPU has the whole model."]


def _some(count: int, most: int) -> list[int]:
    """Return the first ones of `count`, and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]
