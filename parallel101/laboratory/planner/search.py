"""Ranks the layouts of a model on a cluster by the quick model: of each mesh the fastest that fits.

    meshes ─▶ layouts of each ─▶ seconds of a step ─▶ sorted ─▶ fits the memory?

Nothing is left out by a guess: of a search without fixed fields, the best layout is the best of all
that layout_rules.py lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import TRAINERS, Software
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.layout_rules import (
    Refusals,
    can_be_staged,
    choices,
    divisors,
    layouts_of,
    meshes_of,
    why_not_mesh,
)
from parallel101.laboratory.planner.planned_layout import (
    PlannedLayout,
    RankedLayouts,
    WhyNot,
    bar,
    fixed_words,
    layout_text,
    most_of,
)
from parallel101.laboratory.record.units import decimal_bytes


class NoLayoutError(ValueError):
    """No layout fits. `smallest_gpus`: the smallest number of GPUs on which one would; None if the
    reason is another, or no number would do.
    """

    def __init__(self, message: str, smallest_gpus: int | None = None):
        super().__init__(message)
        self.smallest_gpus = smallest_gpus


def search(
    shape: ModelShape,
    cluster: Cluster,
    batch: int,
    fixed: Mapping[str, Any],
    *,
    top: int,
    every: bool = False,
    software: Software = TRAINERS,
    progress: bool = True,
) -> RankedLayouts:
    """Return the `top` fastest layouts that fit, one of each mesh, and why others were refused.

    All layouts are timed, and from the fastest on their memory is counted until enough fit. Of
    equally fast layouts, those that need less memory are first.

    Args:
        batch: samples of a step.
        fixed: fields of ParallelLayout that are not searched.
        every: several layouts of a mesh, too.
        software: TRAINERS, or OWN_RING.
        progress: show a bar, if it takes longer than a second.

    Raises NoLayoutError if none fits.
    """
    of_meshes: Refusals = []
    of_layouts: Refusals = []
    meshes = list(meshes_of(shape, cluster, batch, fixed, of_meshes))
    timed = [
        step_time(shape, layout, cluster, software=software)
        for mesh in bar(meshes, "layouts of each mesh", progress)
        for layout in layouts_of(shape, mesh, batch, fixed, of_layouts)
    ]
    timed.sort(key=lambda time: time.seconds)
    best: dict[Any, PlannedLayout] = {}  # by mesh
    too_large: list[PlannedLayout] = []  # faster than the last of `best`
    slowest = 0.0
    for time in bar(timed, "memory of each layout", progress):
        if len(best) >= top and time.seconds > slowest:
            break
        key = time.layout if every else time.layout.mesh
        if key in best and time.seconds > best[key].time.seconds:
            continue
        memory = step_memory(shape, time.layout, fused_ring=software.fused_ring)
        one = PlannedLayout(time, memory)
        if one.headroom < 0:
            too_large.append(one)
            continue
        slowest = time.seconds
        if key not in best or one.most < best[key].most:
            best[key] = one
    why_not = []
    for refused, what in ((of_meshes, "meshes"), (of_layouts, "layouts")):
        example = dict(reversed(refused))  # the first of each reason
        counts = Counter(reason for reason, _ in refused).most_common()
        why_not += [WhyNot(reason, count, what, example[reason]) for reason, count in counts]
    smallest = min(too_large, key=lambda one: one.most, default=None)
    if smallest:
        reason = "fast enough, and don't fit"
        why_not.append(WhyNot(reason, len(too_large), "layouts", smallest.layout))
    layouts = sorted(best.values(), key=lambda one: (one.seconds, one.most))[:top]
    chosen = {key: value for key, value in fixed.items() if key != "precision"}
    plan = RankedLayouts(shape, cluster, batch, tuple(layouts), len(timed), tuple(why_not), chosen)
    if not layouts:
        raise nothing_fits(plan, smallest)
    return plan


# ── if nothing fits ──


def nothing_fits(plan: RankedLayouts, smallest: PlannedLayout | None) -> NoLayoutError:
    """Return the error that says what is missing, and how many GPUs would do.

    Args: smallest: the layout that needs the least memory, if there is one.
    """
    shape, cluster, batch, have = plan.shape, plan.cluster, plan.batch, plan.cluster.memory_bytes
    fixed = fixed_words(plan)
    if smallest is None:
        why = "; ".join(f"{row.reason} ({row.count:,}×)" for row in plan.why_not)
        why = why or "the sizes of the axes don't multiply to the GPUs"
        return NoLayoutError(
            f"{plan.model} can't be laid out on {plan.gpus} with {batch:,} samples a step{fixed}: "
            f"{why}. Expected numbers that divide each other: change the number of GPUs, the "
            "batch, or what the layout fixes"
        )
    kept = {**plan.fixed, "precision": smallest.layout.precision}
    least = smallest_gpus(shape, cluster, batch, kept)
    advice = f"The smallest number of GPUs that would do is {least or 0:,}"
    if least is None:
        advice = "More GPUs wouldn't help: use GPUs with more memory, a smaller batch or model, or "
        advice += "fix less of the layout"
    return NoLayoutError(
        f"{plan.model} fits on {plan.gpus} with {decimal_bytes(have)} each in none of "
        f"{plan.why_not[-1].count:,} layouts{fixed}. The smallest needs "
        f"{decimal_bytes(smallest.most)}, {decimal_bytes(smallest.most - have)} more than there "
        f"is: {layout_text(smallest.layout)}. {advice}",
        least,
    )


def smallest_gpus(
    shape: ModelShape, cluster: Cluster, batch: int, fixed: Mapping[str, Any]
) -> int | None:
    """Return the smallest number of GPUs on which a layout fits, in whole nodes above one node.

    With more GPUs a rank's share of the weights is smaller, but a batch has only so many samples to
    share, and a model so many layers and heads: None if no number would do.
    """
    stages = sorted({*divisors(shape.layers), *divisors(shape.layers + 2)})
    axes = {
        "tp": [n for n in divisors(shape.kv) if n <= cluster.nodes_of],
        "pp": [n for n in stages if can_be_staged(shape.layers, n)],
        "cp": [1, *(n for n in divisors(shape.time // 2) if 1 < n <= 32)],
        "ep": divisors(shape.experts) if shape.experts else [1],
        "dp": divisors(batch),
    }
    meshes = [ParallelLayout(**sizes) for sizes in choices(axes, fixed)]
    for mesh in sorted(meshes, key=lambda mesh: mesh.gpus):
        whole = mesh.gpus <= cluster.nodes_of or mesh.gpus % cluster.nodes_of == 0
        if mesh.gpus <= cluster.gpus or not whole or why_not_mesh(shape, mesh, batch, fixed):
            continue
        # the options with which a mesh needs the least memory; ZeRO's stage is left open
        lean = {"recompute": "full", "sequence_parallel": mesh.tp > 1, "chunks": 1, **fixed}
        lean = lean if "microbatches" in fixed else {"microbatch": 1, **lean}
        for layout in layouts_of(shape, mesh, batch, lean, []):
            if most_of(step_memory(shape, layout)) <= cluster.memory_bytes:
                return mesh.gpus
    return None
