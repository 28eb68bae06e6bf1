"""From a whole model to this rank's part of it.

    the whole model ─▶ my stages (pp) ─▶ the plan, on their modules (tp) ─▶ gradients (dp)

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
from parallel101.trainers.layout import Axes, Pieces, Stages

if TYPE_CHECKING:
    from parallel101.trainers.pipeline.split import StageCut
    from parallel101.trainers.tensor.plan import ResolvedPlan

# (the stage, or None if the parameters are on several of this rank's; its parameters; the ranks
# along dp; name → label: see `by_size`)
MakeSync = Callable[[nn.Module | None, Parameters, Group, Mapping[str, str]], GradientSync]
Sums = Sequence[tuple[Sequence[str], Group]]


class LocalModel(NamedTuple):
    """This rank's part of the model.

    Attributes:
        parts: global stage → its modules.
        local: name → parameter or buffer that this rank has, whole or a shard.
        syncs: (stages, the synchronisation over dp of the parameters that are on just these).
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
    stages: StageCut | None = None,
    plan: ResolvedPlan | None = None,
) -> LocalModel:
    """Cut the model, in place, to what this rank holds.

    Raises ValueError, on every rank, for what can't be cut like that.
    """
    names = [name for name, _ in tensors_of(model)]
    on_stages = stages.on_stages if stages else {name: [0] for name in names}
    mine = stages.mine if stages else frozenset({0})
    if plan is not None:
        plan.apply(model, axes.along(["tp"]), stages.modules_of_mine(model) if stages else None)
    parts: Mapping[int, nn.Module] = stages.keep_mine(model) if stages else {0: model}

    tensors = dict(tensors_of(model))
    local = {name: tensors[name] for name in names if mine.intersection(on_stages[name])}
    partial = plan.partial if plan is not None else ()
    apart = dict.fromkeys(partial, "a part on each rank along tp")
    apart |= {name: f"tied: {name}" for name, of_name in on_stages.items() if len(of_name) > 1}

    def synchronise() -> list[tuple[frozenset[int], GradientSync]]:
        by_stages: dict[frozenset[int], dict[str, nn.Parameter]] = {}
        for name, p in trained_of(local).items():
            by_stages.setdefault(mine.intersection(on_stages[name]), {})[name] = p
        line = axes.along(["dp"])
        return [
            (of, make_sync(parts[min(of)] if len(of) == 1 else None, parameters, line, apart))
            for of, parameters in by_stages.items()
        ]

    # without stages all ranks have the same modules, and so the same errors
    doing = "prepare its part of the model"
    syncs = agree.all_or_none(doing, synchronise) if stages else synchronise()

    placements: dict[str, dict[str, Any]] = {name: {} for name in names}
    if axes.sizes.get("pp", 1) > 1:
        for name, positions in positions_of(on_stages, stages).items():
            placements[name]["pp"] = Stages(tuple(positions))
    for name, shard in plan.placements.items() if plan is not None else ():
        placements[name]["tp"] = shard
    pieces = {name: at for _, sync in syncs for name, at in sync.placements.items()}
    for name, at in pieces_of_all(axes, agree, pieces).items():
        placements[name]["dp"] = at
    sums = list(sums_of(trained_of(local), positions_of(on_stages, stages), partial, axes))
    notes = [*(plan.describe() if plan is not None else ()), *(stages.describe() if stages else ())]
    return LocalModel(parts, local, syncs, placements, sums, notes)


def trained_of(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {
        name: p for name, p in tensors.items() if isinstance(p, nn.Parameter) and p.requires_grad
    }


def positions_of(
    on_stages: Mapping[str, Sequence[int]], stages: StageCut | None
) -> dict[str, list[int]]:
    """Name → the positions along pp that have it."""
    placement = stages.placement if stages else {0: 0}
    return {name: sorted({placement[s] for s in of_name}) for name, of_name in on_stages.items()}


def pieces_of_all(axes: Axes, agree: Agreement, mine: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """How dp cuts every parameter, also those of other stages; and for each position along tp,
    which may have cut it unevenly.
    """
    if len(agree.ranks) == axes.sizes["dp"]:
        return dict(mine)
    bounds = {name: pieces.bounds for name, pieces in mine.items()}
    found: dict[str, dict[int, Any]] = {}
    for position, text in enumerate(agree.texts(json.dumps(bounds))):
        at = axes.coordinates(position)
        for name, of_name in json.loads(text).items():
            found.setdefault(name, {})[at.get("tp", 0)] = tuple(map(tuple, of_name))
    return {
        name: Pieces(by_tp[0], tuple(by_tp[i] for i in sorted(by_tp)))
        for name, by_tp in found.items()
    }


def sums_of(
    trained: Parameters,
    positions: Mapping[str, Sequence[int]],
    partial: Collection[str],
    axes: Axes,
) -> Iterator[tuple[list[str], Group]]:
    """Which gradients are summed over more than dp, in an order that is the same on all ranks."""
    alike = [name for name in trained if name in partial]
    if alike:
        yield alike, axes.along(["tp"])
    for name in sorted(trained):
        if len(positions[name]) > 1:  # tied
            line = axes.along(["pp"])
            ranks = tuple(line.ranks[position] for position in positions[name])
            here = positions[name].index(axes.here["pp"])
            yield [name], Group(ranks, here, (len(ranks),), None, ("pp",))
