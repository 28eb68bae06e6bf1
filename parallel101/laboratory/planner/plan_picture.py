"""Draws a plan: where the time of the best layouts goes, what fills the memory of the best one, and
which GPU of which node has which part of it.

    1  dp 32 · tp 8 · pp 4 …           3.56 s     a bar for each of the best layouts
       ▇▇▇▇▇▇▇▇▇▇▇▇▒▒▒▒▓▓///                      the range, and the simulated step, below it
       ├────────◇──┤
    first stage  ▇▇▇▇▒▒▒▓▓////   67.5 GB          hatched: headroom
    stage 0   [0 1 2 3 4 5 6 7] [0 1 2 …]         a box for each node, a square for each GPU

The parts of the bars are those of the plan's tables.
"""

from __future__ import annotations

from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import PARTS
from parallel101.cost.step_time import LIMITS
from parallel101.laboratory.planner.planned_layout import (
    PlannedLayout,
    RankedLayouts,
    layout_text,
    layout_words,
)
from parallel101.laboratory.record.units import decimal_bytes, human_seconds, listed
from parallel101.laboratory.viz.scene import PHONE, Box, Node, Scene

LEFT, RIGHT = 28.0, 932.0
MOST_BARS = 5
BAR, ROW = 20.0, 76.0
# a part's class: the colour of a chunk, or another
TIME = dict(zip(LIMITS, ("f0", "f4", "host", "f1", "f6", "f7", "f3", "f2", "idle", "f5")))
MEMORY = dict(zip(PARTS, ("f0", "f3", "f1", "f4", "f2", "f6", "f7")))
SHORT = {"matmul": "products", "memory-bound": "memory-bound kernels", "host": "launches"}
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
    scene = Scene(960, 100, f"{plan.model} on {plan.gpus}")
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
    y, lower = _times(scene, plan.layouts[:MOST_BARS], 92.0, -24)
    y, lower = _memory(scene, best, y + 24, lower)
    y = _nodes(scene.panel(f"translate(0,{lower})"), scene.panel("none"), best, y + 24)
    scene.height = round(y)
    scene.narrow = (PHONE, round(y + lower))
    return scene


# ── time ──


def _times(
    scene: Scene, shown: tuple[PlannedLayout, ...], y: float, lower: int
) -> tuple[float, int]:
    """Draw the bars of the best layouts, and return where they end."""
    names = [n for n in shown[0].parts if any(of.parts[n] > 0.001 * of.seconds for of in shown)]
    lower = scene.legend([(SHORT.get(n, n), TIME[n]) for n in names], y - 9, low=lower)
    words, bars, inside, right = scene.columns(LEFT, RIGHT, PHONE - LEFT, lower)
    ends = [max(of.time.high, of.simulated.seconds if of.simulated else 0.0) for of in shown]
    scale = (RIGHT - LEFT) / max(ends)
    for number, of in enumerate(shown, 1):
        y += 26 if number == 1 else ROW
        axes, options = layout_words(of.layout)
        weight = "b" if number == 1 else "m"
        words.write(number, LEFT, y + 12, 14, weight)
        words.write(axes, LEFT + 18, y + 12, 14, weight)
        words.write(options, LEFT, y + 28, 11, "m")
        right.write(f"MFU {of.mfu:.1%}", RIGHT - 70, y + 12, 14, "m e")
        right.write(human_seconds(of.seconds), RIGHT, y + 12, 14, "b e")
        x = LEFT
        for name in names:
            seconds, share = of.parts[name], of.parts[name] / of.seconds
            title = f"{name}: {human_seconds(seconds)}, {share:.1%}"
            box = x, y + 37, seconds * scale, BAR
            x = _part(bars, inside, box, TIME[name], title, f"{share:.0%}")
        low, high, line = LEFT + of.time.low * scale, LEFT + of.time.high * scale, y + 44 + BAR
        d = f"M{low:.1f} {line - 3}v6M{low:.1f} {line}H{high:.1f}M{high:.1f} {line - 3}v6"
        bars.path(d, "range")
        if of.simulated is not None:
            x = LEFT + of.simulated.seconds * scale
            mark = bars.path(f"M{x:.1f} {line - 5}l5 5l-5 5l-5 -5z", "run")
            mark.add("title", f"on virtual GPUs: {human_seconds(of.simulated.seconds)}")
    return y + ROW, lower


def _part(bars: Node, inside: Node, box: Box, class_: str, title: str, text: str) -> float:
    """Draw a part of a bar, with its text if there is room, and return where it ends."""
    bars.rect(*box, f"part {class_}", title=title)
    if class_[0] == "f":
        inside.label(text, box, f"o{class_[1]}")
    return box[0] + box[2]


# ── memory ──


def _memory(scene: Scene, best: PlannedLayout, y: float, lower: int) -> tuple[float, int]:
    """Draw the memory of the first and of the last stage, and return where it ends."""
    have = best.cluster.memory_bytes
    heading = scene.panel(f"translate(0,{lower})")
    words = f"Memory of layout 1, of {decimal_bytes(have)} on each GPU"
    heading.write(words, LEFT, y, 15, "b")
    kinds = [(PARTS[name], class_) for name, class_ in MEMORY.items()]
    lower = scene.legend([*kinds, ("headroom", "idle")], y + 15, low=lower)
    names, bars, inside, right = scene.columns(MEMORY_LEFT, MEMORY_RIGHT, 366, lower)
    scale = (MEMORY_RIGHT - MEMORY_LEFT) / max(have, *(s.total for s in best.memory))
    stages = {"first stage": best.memory[0], "last stage": best.memory[-1]}
    if best.layout.pp == 1:
        stages = {"every GPU": best.memory[0]}
    y += 40
    for words, stage in stages.items():
        names.write(words, MEMORY_LEFT - 10, y + 15, 13, "m e")
        bars.rect(MEMORY_LEFT, y, have * scale, BAR + 2, "idle")
        x, end = MEMORY_LEFT, MEMORY_LEFT + stage.total * scale
        for name, class_ in MEMORY.items():
            nbytes = getattr(stage, name)
            # they don't all have their peaks at the same time
            box, text = (x, y, min(nbytes * scale, end - x), BAR + 2), decimal_bytes(nbytes)
            x = _part(bars, inside, box, class_, f"{PARTS[name]}: {text}", text)
        right.write(decimal_bytes(stage.total), RIGHT, y + 17, 17, "b e")
        y += MEMORY_ROW
    return y, lower


# ── nodes ──


def _nodes(panel: Node, more: Node, best: PlannedLayout, y: float) -> float:
    """Draw which GPU has which part of the model and the batch, and return where it ends.

    Args: more: a panel for what phones leave out: all but the first node of a row.
    """
    layout, per_node = best.layout, min(best.cluster.nodes_of, best.layout.gpus)
    panel.write("Layout 1 on the nodes", LEFT, y, 15, "b")
    for sentence in crossing(layout, per_node):
        y += 20
        panel.write(sentence, LEFT, y + 2, 14, "m")
    y += 16
    # rows: the stages, if each has whole nodes; otherwise one row of nodes
    of_stage = layout.gpus // layout.pp
    by_stage = layout.pp > 1 and of_stage % per_node == 0
    rows, inside = {"": 0}, layout.gpus
    if by_stage:
        rows, inside = {f"stage {s}": s * of_stage for s in _some(layout.pp, MOST_STAGES)}, of_stage
    wide = per_node * SQUARE + NODE_GAP
    fit = max(1, int((RIGHT - NODES_LEFT + NODE_GAP) // wide))
    axes = [axis for axis in reversed(layout.strides) if getattr(layout, axis) > 1]
    axes = [axis for axis in axes if axis != "pp" or not by_stage] or ["dp"]
    for name, first in rows.items():
        panel.write(name, LEFT, y + 26, 13, "m")
        drawn = _some(inside // per_node, min(fit, MOST_NODES))
        for column, node in enumerate(drawn):
            x, of = NODES_LEFT + column * wide, more if column else panel
            if column and node != drawn[column - 1] + 1:
                of.write("…", x - NODE_GAP / 2 - 1, y + 26, 13, "c m")
            of.rect(x - 4, y - 4, per_node * SQUARE + 6, TALL + 8, "node", rx=6)
            for number in range(per_node):
                _gpu(of, layout, first + node * per_node + number, axes, x + number * SQUARE, y)
        y += TALL + 20
    nodes = layout.gpus // per_node
    many = f" {nodes:,} nodes in all." if nodes > 1 else ""
    for sentence in (
        f"Each square is a GPU with its place along {listed(axes)}.",
        f"One colour is one place along dp.{many}",
    ):
        panel.write(sentence, LEFT, y + 8, 13, "m")
        y += 18
    return y + 12


def _gpu(
    panel: Node, layout: ParallelLayout, gpu: int, axes: list[str], x: float, y: float
) -> None:
    """Draw a square for one GPU, with its place along these axes."""
    place = {axis: gpu // n % getattr(layout, axis) for axis, n in layout.strides.items()}
    class_, title = place["dp"] % 8, ", ".join(f"{axis} {n}" for axis, n in place.items())
    panel.rect(x, y, SQUARE - 2, TALL, f"part f{class_}", title=f"GPU {gpu}: {title}")
    for line, axis in enumerate(axes):
        top = y + TALL / 2 - 5.5 * len(axes) + 11 * line
        panel.label(f"{axis} {place[axis]}", (x - 2, top, SQUARE + 2, 11), f"o{class_}", 9, 0)


def crossing(layout: ParallelLayout, per_node: int) -> list[str]:
    """Return sentences that say which axes stay inside a node and which don't."""
    axes = {axis: getattr(layout, axis) for axis in layout.strides if getattr(layout, axis) > 1}
    near = {axis for axis, n in axes.items() if layout.strides[axis] * n <= per_node}
    where = {"Inside a node, on NVLink": near, "Across nodes, on the network": {*axes} - near}
    return [
        f"{words}: {listed(f'{axis} {n}' for axis, n in axes.items() if axis in those)}."
        for words, those in where.items()
        if those
    ] or ["One GPU has the whole model."]


def _some(count: int, most: int) -> list[int]:
    """Return the first ones of `count`, and the last."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]
