"""p101.plan(model, gpus=1024): ranks the layouts of a model on a cluster by the quick model.

    meshes ─▶ layouts of each ─▶ seconds of a step ─▶ sorted ─▶ fits the memory?

All layouts are timed, and from the fastest on their memory is counted until enough fit: of each
mesh the fastest. Of equally fast layouts, those that need less memory are first. Nothing is left
out by a guess: of a search without fixed fields, the best layout is the best of all that
layout_rules.py lists.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import CHIPS, chip_of
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import OWN_RING, TRAINERS
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.known_models import BATCHES, shape_of_model
from parallel101.laboratory.planner.layout_rules import (
    KEYS,
    Refusals,
    can_be_staged,
    check_fixed,
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
from parallel101.laboratory.planner.trainer_call import why_no_model
from parallel101.laboratory.record.errors import DeadlockError, LaunchTimeout, RankFailed
from parallel101.laboratory.record.units import decimal_bytes

if TYPE_CHECKING:
    from parallel101.laboratory.viz.scene import Scene

RINGS = {"fused": TRAINERS, "own": OWN_RING}
BATCH_TOKENS = 2**22  # of a step, if neither the user nor the model's source gives a number


@dataclass(frozen=True)
class TrainingPlan(RankedLayouts):
    """The best layouts, fastest first: with tables, a picture and JSON of them."""

    def simulate(self, count: int = 3, progress: bool = True) -> TrainingPlan:
        """Return the same plan, with the first `count` layouts run on virtual GPUs.

        Layouts that can't be run say why in `not_simulated`. If this package has no model of that
        shape, nothing is run.
        """
        if not count or why_no_model(self.shape):
            return self
        from parallel101.laboratory.planner.simulated_step import simulate_step

        layouts = list(self.layouts)
        for number, one in enumerate(bar(layouts[:count], "running on virtual GPUs", progress)):
            try:
                step = simulate_step(one.shape, one.layout, one.cluster)
                layouts[number] = replace(one, simulated=step)
            except (RankFailed, DeadlockError, LaunchTimeout) as error:
                layouts[number] = replace(one, not_simulated=str(error).partition("\n")[0])
        return replace(self, layouts=tuple(layouts))

    def __str__(self) -> str:
        from parallel101.laboratory.planner import plan_report

        return plan_report.quick_text(self) + plan_report.simulated_text(self)

    def picture(self) -> Scene:
        """Return a still picture of the plan.

        It shows where the time goes, what fills the memory, and who is on which node.
        """
        from parallel101.laboratory.planner.plan_picture import plan_scene

        return plan_scene(self)

    def _repr_html_(self) -> str:
        return self.picture().html()

    def save(self, path: str | os.PathLike) -> Path:
        """Write everything as JSON. Returns the path."""
        from parallel101.laboratory.planner.plan_report import plan_json

        path = Path(path)
        path.write_text(plan_json(self), encoding="utf-8")
        return path


class NoLayoutError(ValueError):
    """No layout fits. `smallest_gpus`: the smallest number of GPUs on which one would; None if the
    reason is another, or no number would do.
    """

    def __init__(self, message: str, smallest_gpus: int | None = None):
        super().__init__(message)
        self.smallest_gpus = smallest_gpus


def plan(
    model: str | os.PathLike | Mapping[str, Any] | ModelShape,
    *,
    gpus: int,
    device: str = "H100",
    batch_tokens: int | None = None,
    memory: float | None = None,
    nodes_of: int = 8,
    attention: str = "fused",
    precision: str = "bf16-mixed",
    layout: Mapping[str, Any] | ParallelLayout | None = None,
    simulate: int = 3,
    top: int = 10,
    every: bool = False,
    ring: str = "fused",
    time: int | None = None,
    progress: bool = True,
) -> TrainingPlan:
    """Plan how to train a model on a cluster: of each mesh the fastest layout that fits.

    Args:
        model: a name such as "llama-3-70b" (see planner/known_models.py), the path of a JSON file,
            "h,L,a,V,s", or a ModelShape.
        gpus, device, nodes_of, memory: how many GPUs of which kind, how many of them in a node, and
            the bytes of each; None: the device's.
        batch_tokens: of a step; None: the model's own, or 4,194,304, rounded down to a
            number of samples that is a power of two, so that many layouts divide it.
        attention: "fused" or "unfused".
        precision: as HybridTrainer's.
        layout: fields of ParallelLayout that are fixed, such as {"tp": 8, "recompute": "full"}. A
            ParallelLayout fixes all of them.
        simulate: how many of the best are run on virtual GPUs.
        top: how many are returned.
        every: return several layouts of one mesh, too, if they are that fast.
        ring: how attention along cp is computed: "fused", as in Megatron-LM and torch's context
            parallel, or "own": with plain products in 32 bits, as HybridTrainer does.
        time: tokens of a sample; None: the model's own.
        progress: show bars for what takes longer than a second.

    Raises ValueError, in words, for what can't be, and NoLayoutError if no layout fits: it says
    what is missing, and has the smallest number of GPUs that would do.

    Example:
        >>> found = p101.plan("llama-3-8b", gpus=16, simulate=0, progress=False)
        >>> best = found[0].layout
        >>> best.dp, best.tp, best.pp, best.zero_stage
        (8, 1, 2, 1)
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    shape = shape_of_model(name, time=time, attention=attention)
    known = [name for name, chip in CHIPS.items() if chip.kernels is not None]
    if str(device).casefold() not in map(str.casefold, known):
        raise ValueError(f"device={device!r}: expected one of {', '.join(map(repr, known))}")
    cluster = Cluster(chip_of(device), gpus, nodes_of, memory)
    if gpus > nodes_of and gpus % nodes_of:
        raise ValueError(
            f"{gpus:,} GPUs aren't whole nodes of {nodes_of}: expected a multiple, such as "
            f"{gpus // nodes_of * nodes_of:,}"
        )
    for what, count, least in (("simulate", simulate, 0), ("top", top, 1)):
        if type(count) is not int or count < least:
            raise ValueError(f"{what}={count!r}: expected a whole number, {least} or more")
    if ring not in RINGS:
        raise ValueError(f"ring={ring!r}: expected {' or '.join(map(repr, RINGS))}")
    if not (layout is None or isinstance(layout, Mapping | ParallelLayout)):
        raise ValueError(
            f"layout={layout!r}: expected a dict of some of {', '.join(KEYS)}, or a ParallelLayout"
        )
    chosen = asdict(layout) if isinstance(layout, ParallelLayout) else layout or {}
    fixed = check_fixed({"precision": precision, **chosen})
    batch, software = samples(shape, name, batch_tokens, fixed), RINGS[ring]
    of_meshes: Refusals = []
    of_layouts: Refusals = []
    meshes = list(meshes_of(shape, cluster, batch, fixed, of_meshes))
    timed = [
        step_time(shape, layout, cluster, software=software)
        for mesh in bar(meshes, "layouts of each mesh", progress)
        for layout in layouts_of(shape, mesh, batch, fixed, of_layouts)
    ]
    timed.sort(key=lambda step: step.seconds)
    best: dict[Any, PlannedLayout] = {}  # by mesh
    too_large: list[PlannedLayout] = []  # faster than the last of `best`
    slowest = 0.0
    for step in bar(timed, "memory of each layout", progress):
        if len(best) >= top and step.seconds > slowest:
            break
        key = step.layout if every else step.layout.mesh
        if key in best and step.seconds > best[key].seconds:
            continue
        one = PlannedLayout(step, step_memory(shape, step.layout, fused_ring=software.fused_ring))
        if one.headroom < 0:
            too_large.append(one)
            continue
        slowest = step.seconds
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
    layouts = tuple(sorted(best.values(), key=lambda one: (one.seconds, one.most))[:top])
    chosen = {key: value for key, value in fixed.items() if key != "precision"}
    ranked = TrainingPlan(shape, cluster, batch, layouts, len(timed), tuple(why_not), chosen)
    if not layouts:
        raise nothing_fits(ranked, smallest)
    return ranked.simulate(simulate, progress)


def samples(
    shape: ModelShape, model: Any, batch_tokens: int | None, fixed: Mapping[str, Any]
) -> int:
    """Return the samples of a step. Raises ValueError if the tokens aren't whole samples."""
    if batch_tokens is None:
        if {"dp", "microbatch", "microbatches"} <= set(fixed):
            return fixed["dp"] * fixed.get("ep", 1) * fixed["microbatch"] * fixed["microbatches"]
        known = BATCHES.get(model.casefold()) if isinstance(model, str) else None
        return known or 2 ** max((BATCH_TOKENS // shape.time).bit_length() - 1, 0)
    if type(batch_tokens) is not int or batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens!r}: expected a whole number, 1 or more")
    whole, rest = divmod(batch_tokens, shape.time)
    if rest:
        near = [n * shape.time for n in (whole, whole + 1) if n]
        raise ValueError(
            f"batch_tokens={batch_tokens:,} aren't whole samples of {shape.time:,} tokens: "
            f"expected a multiple, such as {' or '.join(f'{n:,}' for n in near)}"
        )
    return whole


# ── if nothing fits ──


def nothing_fits(plan: TrainingPlan, smallest: PlannedLayout | None) -> NoLayoutError:
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
