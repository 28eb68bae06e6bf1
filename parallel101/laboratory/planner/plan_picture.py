"""Draws a plan: where the time of the best layouts goes, what fills the memory of the best one, and
which GPU of which node has which part of it.

    1  dp 32 · tp 8 · pp 4 …           3.56 s     a bar for each of the best layouts
       ▇▇▇▇▇▇▇▇▇▇▇▇▒▒▒▒▓▓///                      the range, and the simulated step, below it
       ├────────◇──┤
    first stage  ▇▇▇▇▒▒▒▓▓////   67.5 GB          hatched: headroom
    stage 0   [0 1 2 3 4 5 6 7] [0 1 2 …]         a box for each node, a square for each GPU
"""

from __future__ import annotations

from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import PARTS
from parallel101.laboratory.planner.plan_report import gpus_words, model_words
from parallel101.laboratory.planner.planned_layout import PlannedLayout, RankedLayouts
from parallel101.laboratory.planner.search import layout_text, layout_words
from parallel101.laboratory.record.units import decimal_bytes, human_seconds, listed
from parallel101.laboratory.viz.scene import PHONE, Node, Scene

LEFT, RIGHT = 28.0, 932.0
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
    best = plan.best
    scene = Scene(960, 100, f"{model_words(plan)} on {gpus_words(plan)}")
    scene.style += STYLE
    scene.description = (
        f"The best layout takes {human_seconds(best.seconds)} a step: {layout_text(best.layout)}."
    )
    facts = f"{plan.batch * plan.shape.time:,} tokens a step"
    facts += f", {plan.tried:,} layouts compared" * (plan.tried > 1)
    sentence = "Bars: seconds of a step by the quick model, with their range below."
    sentence += " Diamonds: the same step on virtual GPUs." * any(of.simulated for of in plan)
    scene.head(facts, sentence)
    # `lower`: by how much a part is lower on phones, where legends take several lines
    y, lower = _times(scene, plan, 92.0, -24)
    y, lower = _memory(scene, best, y + 24, lower)
    y = _nodes(scene, best, y + 24, lower)
    scene.height = round(y)
    scene.narrow = (PHONE, round(y + lower))
    return scene


# ── time ──


def _times(scene: Scene, plan: RankedLayouts, y: float, lower: int) -> tuple[float, int]:
    """Draw the bars of the best layouts, and return where they end."""
    shown = list(plan)[:MOST_BARS]
    names = [n for n in shown[0].parts if any(of.parts[n] > 0.001 * of.seconds for of in shown)]
    kinds = [(SHORT.get(name, name), PART_CLASSES[name]) for name in names]
    lower = scene.legend(kinds, y - 9, low=lower)
    words, bars, inside, right = scene.columns(LEFT, RIGHT, PHONE - LEFT, lower)
    ends = [max(of.time.high, of.simulated.seconds if of.simulated else 0.0) for of in shown]
    scale = (RIGHT - LEFT) / max(ends)
    y += 26
    for number, of in enumerate(shown, 1):
        axes, options = layout_words(of.layout)
        weight = "b" if number == 1 else "m"
        words.write(number, LEFT, y + 12, 14, weight)
        words.write(axes, LEFT + 18, y + 12, 14, weight)
        words.write(options, LEFT, y + 28, 11, "m")
        text = f"MFU {of.mfu:.1%}"
        right.write(text, RIGHT - 70, y + 12, 14, "m e")
        text = human_seconds(of.seconds)
        right.write(text, RIGHT, y + 12, 14, "b e")
        x, top = LEFT, y + 37
        for name in names:
            width, share = of.parts[name] * scale, of.parts[name] / of.seconds
            title = f"{name}: {human_seconds(of.parts[name])}, {share:.1%}"
            kind, place = PART_CLASSES[name], (x, top, width, BAR)
            bars.rect(*place, f"part {kind}", title=title)
            if kind[0] == "f":
                inside.label(f"{share:.0%}", place, f"o{kind[1]}")
            x += width
        _range(bars, of, top + BAR + 7, scale)
        y += ROW
    return y, lower


def _range(panel: Node, of: PlannedLayout, y: float, scale: float) -> None:
    """Draw the range of the quick model, and the simulated step."""
    low, high = LEFT + of.time.low * scale, LEFT + of.time.high * scale
    d = f"M{low:.1f} {y - 3}v6M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 3}v6"
    panel.path(d, "range")
    if of.simulated is not None:
        x = LEFT + of.simulated.seconds * scale
        mark = panel.path(f"M{x:.1f} {y - 5}l5 5l-5 5l-5 -5z", "run")
        mark.add("title", f"on virtual GPUs: {human_seconds(of.simulated.seconds)}")


# ── memory ──


def _memory(scene: Scene, best: PlannedLayout, y: float, lower: int) -> tuple[float, int]:
    """Draw the memory of the first and of the last stage, and return where it ends."""
    have = best.cluster.memory_bytes
    words = f"Memory of layout 1, of {decimal_bytes(have)} on each GPU"
    heading = scene.panel(f"translate(0,{lower})")
    heading.write(words, LEFT, y, 15, "b")
    kinds = [(PARTS[name], kind) for name, kind in MEMORY_CLASSES.items()]
    lower = scene.legend([*kinds, ("headroom", "idle")], y + 15, low=lower)
    names, bars, inside, right = scene.columns(MEMORY_LEFT, MEMORY_RIGHT, 366, lower)
    y += 40
    scale = (MEMORY_RIGHT - MEMORY_LEFT) / max(have, *(s.total for s in best.memory))
    stages = {"first stage": best.memory[0], "last stage": best.memory[-1]}
    if best.layout.pp == 1:
        stages = {"every GPU": best.memory[0]}
    for words, stage in stages.items():
        names.write(words, MEMORY_LEFT - 10, y + 15, 13, "m e")
        bars.rect(MEMORY_LEFT, y, have * scale, BAR + 2, "idle")
        drawn = 0.0
        for name, kind in MEMORY_CLASSES.items():
            nbytes = getattr(stage, name)
            # they don't all have their peaks at the same time
            part = min(nbytes, stage.total - drawn)
            place = MEMORY_LEFT + drawn * scale, y, part * scale, BAR + 2
            text = decimal_bytes(nbytes)
            bars.rect(*place, f"part {kind}", title=f"{PARTS[name]}: {text}")
            inside.label(text, place, f"o{kind[1]}")
            drawn += part
        text = decimal_bytes(stage.total)
        right.write(text, RIGHT, y + 17, 17, "b e")
        y += MEMORY_ROW
    return y, lower


# ── nodes ──


def _nodes(scene: Scene, best: PlannedLayout, y: float, lower: int) -> float:
    """Draw which GPU has which part of the model and the batch, and return where it ends."""
    layout, per_node = best.layout, min(best.cluster.nodes_of, best.layout.gpus)
    words = scene.panel(f"translate(0,{lower})")
    words.write("Layout 1 on the nodes", LEFT, y, 15, "b")
    for sentence in crossing(layout, per_node):
        y += 20
        words.write(sentence, LEFT, y + 2, 14, "m")
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
        words.write(name, LEFT, y + 26, 13, "m")
        x, end = NODES_LEFT, first
        for panel, node in zip(panels, _some(inside // per_node, min(fit, MOST_NODES))):
            start = first + node * per_node
            if node and start != end:
                middle = x - NODE_GAP / 2 - 1
                panel.write("…", middle, y + 26, 13, "c m")
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
        words.write(sentence, LEFT, y + 8, 13, "m")
        y += 18
    return y + 12


def _node(
    panel: Node, layout: ParallelLayout, gpus: range, axes: list[str], x: float, y: float
) -> None:
    """Draw one node: a square for each of its GPUs."""
    wide = len(gpus) * SQUARE
    panel.rect(x - 4, y - 4, wide + 6, TALL + 8, "node", rx=6)
    for number, gpu in enumerate(gpus):
        place = place_of(layout, gpu)
        kind, left = f"f{place['dp'] % 8}", x + number * SQUARE
        title = f"GPU {gpu}: " + ", ".join(f"{a} {n}" for a, n in place.items())
        panel.rect(left, y, SQUARE - 2, TALL, f"part {kind}", title=title)
        top = y + TALL / 2 - 5.5 * len(axes)
        for line, axis in enumerate(axes):
            inside = left - 2, top + 11 * line, SQUARE + 2, 11
            panel.label(f"{axis} {place[axis]}", inside, f"o{kind[1]}", 9, 0)


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
