"""Preparing this rank's part of a whole model.

    the whole model ─▶ the plan, on the modules of my stages (tp) ─▶ my experts (ep)
                    ─▶ my stages (pp) ─▶ gradients (dp, with cp and ep)

Each axis says in `placements` what it does to which parameter. The order is torchtitan's.
Everything is checked before the model is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import Agreement, tensors_of
from parallel101.trainers.gradient_sync import GradientSync, Parameters
from parallel101.trainers.layout import DATA, Axes, Bounds, Pieces, Stages, block_at

if TYPE_CHECKING:
    from parallel101.trainers.experts_plan import ExpertsPlan
    from parallel101.trainers.pipeline.stages import PipelineStages
    from parallel101.trainers.tensor.plan import ResolvedPlan

# (the stage, or None if the parameters are on several of this rank's; its parameters; the ranks
# over which their gradients are summed; the ranks for those of experts; name → label: see
# `by_size`)
MakeSync = Callable[
    [nn.Module | None, Parameters, Group, Mapping[str, Group], Mapping[str, str]], GradientSync
]
Sums = Sequence[tuple[Sequence[str], Group]]


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
    sums: Sums
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
    on_stages = stages.on_stages if stages else {name: [0] for name in names}
    mine = stages.mine if stages else frozenset({0})
    if plan is not None:
        plan.apply(model, axes.along(["tp"]), stages.modules_of_mine(model) if stages else None)
    if experts is not None:
        experts.apply(model, axes.along(["ep"]))
    parts: Mapping[int, nn.Module] = stages.keep_mine(model) if stages else {0: model}

    tensors = dict(tensors_of(model))
    local = {name: tensors[name] for name in names if mine.intersection(on_stages[name])}
    partial = plan.partial if plan is not None else ()
    apart = dict.fromkeys(partial, "a part on each rank along tp")
    of_experts = experts.placements if experts is not None else {}
    apart |= dict.fromkeys(of_experts, "experts")
    apart |= {name: f"tied: {name}" for name, of_name in on_stages.items() if len(of_name) > 1}

    def synchronize() -> list[tuple[frozenset[int], GradientSync]]:
        by_stages: dict[frozenset[int], dict[str, nn.Parameter]] = {}
        for name, p in trained_of(local).items():
            by_stages.setdefault(mine.intersection(on_stages[name]), {})[name] = p
        line, without_ep = axes.along(data), axes.along(same_experts)
        return [
            (
                of,
                make_sync(
                    parts[min(of)] if len(of) == 1 else None,
                    parameters,
                    line,
                    {name: without_ep for name in parameters if name in of_experts},
                    apart,
                ),
            )
            for of, parameters in by_stages.items()
        ]

    data = tuple(axis for axis in axes.sizes if axis in DATA)
    same_experts = tuple(axis for axis in data if axis != "ep")
    # without stages all ranks have the same modules, and so the same errors
    doing = "prepare its part of the model"
    syncs = agree.all_or_none(doing, synchronize) if stages else synchronize()

    placements: dict[str, dict[str, Any]] = {name: {} for name in names}
    if axes.sizes.get("pp", 1) > 1:
        for name, positions in positions_of(on_stages, stages).items():
            placements[name]["pp"] = Stages(tuple(positions))
    for name, shard in plan.placements.items() if plan is not None else ():
        placements[name]["tp"] = shard
    for name, shard in of_experts.items():
        placements[name]["ep"] = shard
    pieces = {name: at.bounds for _, sync in syncs for name, at in sync.placements.items()}
    for name, blocks in bounds_of_all(axes, agree, pieces).items():
        over = same_experts if name in of_experts else data
        placements[name]["dp"] = Pieces(blocks[min(blocks)], over, blocks)
    sums = list(sums_of(trained_of(local), positions_of(on_stages, stages), partial, axes))
    notes = [line for of in (plan, experts, stages) if of is not None for line in of.describe()]
    return LocalModel(parts, local, syncs, placements, sums, notes)


def trained_of(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {
        name: p for name, p in tensors.items() if isinstance(p, nn.Parameter) and p.requires_grad
    }


def positions_of(
    on_stages: Mapping[str, Sequence[int]], stages: PipelineStages | None
) -> dict[str, list[int]]:
    """Return, for each name, the positions along pp that have it."""
    placement = stages.placement if stages else {0: 0}
    return {name: sorted({placement[s] for s in of_name}) for name, of_name in on_stages.items()}


def bounds_of_all(
    axes: Axes, agree: Agreement, mine: Mapping[str, Bounds]
) -> dict[str, dict[tuple[int, int], Bounds]]:
    """Return how each parameter is cut into pieces, also those of other stages: name → place
    along (tp, ep), where other blocks may be cut unevenly → bounds.
    """
    if len(agree.ranks) == axes.size(["dp", "cp"]):
        return {name: {(0, 0): bounds} for name, bounds in mine.items()}
    found: dict[str, dict[tuple[int, int], Bounds]] = {}
    others = ("pp", "tp", "ep")  # along dp and cp all ranks know the same
    line = axes.line(others)
    if len(line) < len(agree.ranks):
        agree = Agreement(axes.along(others), agree.device)
    for position, text in zip(line, agree.texts(json.dumps(mine))):
        block = block_at(axes.coordinates(position))
        for name, bounds in json.loads(text).items():
            found.setdefault(name, {})[block] = tuple(map(tuple, bounds))
    return found


def sums_of(
    trained: Parameters,
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
