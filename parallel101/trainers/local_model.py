"""Preparing this rank's part of a whole model.

    the whole model ─▶ the plan, on the modules of my stages (tp) ─▶ my experts (ep)
                    ─▶ my stages (pp) ─▶ gradients (dp, with cp and ep)

Each axis says in `placements` what it does to which parameter. The order is torchtitan's.
Everything is checked before the model is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import Agreement, tensors_of
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.layout import DATA, Axes, Pieces, Stages
from parallel101.trainers.make_sync import MakeSync

if TYPE_CHECKING:
    from parallel101.trainers.experts_plan import ExpertsPlan
    from parallel101.trainers.pipeline.stages import PipelineStages
    from parallel101.trainers.tensor.plan import ResolvedPlan


class LocalModel(NamedTuple):
    """This rank's part of the model.

    Attributes:
        parts: global stage → its modules.
        local: name → parameter or buffer that this rank has, whole or a shard.
        syncs: (stages, the synchronization over dp, cp and ep of the parameters that are on just
            these).
        placements: name → axis → how it cuts this parameter or buffer of the whole model.
        sums: (names, group): gradients that are also summed over these ranks.
        notes: in words, for describe().
    """

    parts: Mapping[int, nn.Module]
    local: Mapping[str, Tensor]
    syncs: Sequence[tuple[frozenset[int], GradientSync]]
    placements: Mapping[str, Mapping[str, Any]]
    sums: Sequence[tuple[Sequence[str], Group]]
    notes: Sequence[str]


def prepare(
    model: nn.Module,
    axes: Axes,
    agree: Agreement,
    make_sync: MakeSync,
    stages: PipelineStages | None = None,
    plan: ResolvedPlan | None = None,
    experts: ExpertsPlan | None = None,
) -> LocalModel:
    """Cut the model, in place, to what this rank holds.

    Raises ValueError, on every rank, for what can't be cut like that.
    """
    names = [name for name, _ in tensors_of(model)]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    on_stages = stages.on_stages if stages else {name: [0] for name in names}
    mine = stages.mine if stages else frozenset({0})
    if plan is not None:
        plan.apply(model, axes.along(["tp"]), stages.modules_of_mine(model) if stages else None)
    if experts is not None:
        experts.apply(model, axes.along(["ep"]))
    parts: Mapping[int, nn.Module] = stages.keep_mine(model) if stages else {0: model}

    tensors = dict(tensors_of(model))
    local = {name: tensors[name] for name in names if mine.intersection(on_stages[name])}
    of_experts = experts.placements if experts is not None else {}
    labels = dict.fromkeys(plan.partial if plan is not None else (), "a part along tp")
    labels |= dict.fromkeys(of_experts, "experts")
    labels |= {name: f"tied: {name}" for name, of_name in on_stages.items() if len(of_name) > 1}
    data = tuple(axis for axis in axes.sizes if axis in DATA)
    over = {n: tuple(a for a in data if a != "ep" or n not in of_experts) for n in trained}
    lines = {names: axes.along(names) for names in set(over.values())}

    def synchronize() -> list[tuple[frozenset[int], GradientSync]]:
        by_stages: dict[frozenset[int], dict[str, nn.Parameter]] = {}
        for name in trained:
            if isinstance(p := local.get(name), nn.Parameter):
                by_stages.setdefault(mine.intersection(on_stages[name]), {})[name] = p
        return [
            (
                of,
                make_sync(
                    parts[min(of)] if len(of) == 1 else None,
                    parameters,
                    {name: lines[over[name]] for name in parameters},
                    labels,
                ),
            )
            for of, parameters in by_stages.items()
        ]

    # without stages all ranks have the same modules, and so the same errors
    doing = "prepare its part of the model"
    syncs = agree.all_or_none(doing, synchronize) if stages else synchronize()

    positions = positions_of(on_stages, stages)
    placements: dict[str, dict[str, Any]] = {name: {} for name in names}
    if axes.sizes.get("pp", 1) > 1:
        for name in names:
            placements[name]["pp"] = Stages(tuple(positions[name]))
    for name, shard in plan.placements.items() if plan is not None else ():
        placements[name]["tp"] = shard
    for name, shard in of_experts.items():
        placements[name]["ep"] = shard
    pieces = {name: p for _, sync in syncs for name, p in sync.placements.items()}
    for name in trained if make_sync.options.zero_stage else ():
        placements[name]["dp"] = pieces.get(name, Pieces(0, 0))._replace(axes=over[name])
    here = [name for name in trained if name in local]
    sums = list(sums_of(here, positions, plan.partial if plan is not None else (), axes))
    notes = [line for of in (plan, experts, stages) if of is not None for line in of.describe()]
    return LocalModel(parts, local, syncs, placements, sums, notes)


def positions_of(
    on_stages: Mapping[str, Sequence[int]], stages: PipelineStages | None
) -> dict[str, list[int]]:
    """Return, for each name, the positions along pp that have it."""
    placement = stages.placement if stages else {0: 0}
    return {name: sorted({placement[s] for s in of_name}) for name, of_name in on_stages.items()}


def sums_of(
    trained: Collection[str],
    positions: Mapping[str, Sequence[int]],
    partial: Collection[str],
    axes: Axes,
) -> Iterator[tuple[list[str], Group]]:
    """Yield the gradients that are summed over more than dp, in the same order on all ranks."""
    alike = [name for name in trained if name in partial]
    if alike:
        yield alike, axes.along(["tp"])
    for name in sorted(trained):
        if len(positions[name]) > 1:  # tied
            line = axes.along(["pp"])
            ranks = tuple(line.ranks[position] for position in positions[name])
            here = positions[name].index(axes.here["pp"])
            yield [name], Group(ranks, here, (len(ranks),), None, ("pp",))
