"""From a whole model to this rank's part of it, by successive functions; each says in `placements`
what it did.

    the whole model ─▶ cut into stages (pp) ─▶ the plan, on the modules of my stages (tp) ─▶ how gradients are synchronised (dp)

The order is torchtitan's. Everything is checked before the model is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.executor import Executor
from parallel101.trainers.gradient_sync import GradientSync, Parameters
from parallel101.trainers.layout import Axes, Entry, Pieces, Stages
from parallel101.trainers.pipeline.messages import Messages
from parallel101.trainers.pipeline.split import Part, cut_points, entries_of, names_by_stage
from parallel101.trainers.schedules.messages import has_messages, with_messages
from parallel101.trainers.schedules.schedule import Schedule
from parallel101.trainers.support.arguments import SHARDED, LossFn
from parallel101.trainers.tensor.loss import is_vocabulary_loss
from parallel101.trainers.tensor.plan import Plan, Resolved, resolve

# (the stage, or None if the parameters are on several of this rank's; its parameters; the ranks
# along dp; apart: see `by_size`)
MakeSync = Callable[[nn.Module | None, Parameters, Group, Mapping[str, str]], GradientSync]


class Prepared(NamedTuple):
    """This rank's part of the model.

    Attributes: parts: global stage → its modules. local: names of the parameters and buffers that
        this rank has, whole or a shard. trained: name → Parameter, those of them that are trained.
        syncs: (stages, how the gradients of their parameters are synchronised over dp). entries: every parameter and buffer of the whole model,
        with its placements. sums: (names, group): gradients that are also summed over these ranks:
        of weights tied across stages, and of what acts on a part
            of each sequence.
        loss_fn: which knows its tp group if the logits stay cut.
        notes: in words, for describe().
    """

    parts: Mapping[int, nn.Module]
    local: Sequence[str]
    trained: Parameters
    syncs: Sequence[tuple[frozenset[int], GradientSync]]
    entries: Mapping[str, Entry]
    sums: Sequence[tuple[Sequence[str], Group]]
    loss_fn: LossFn | None
    notes: Sequence[str]


def prepare(
    model: nn.Module,
    loss_fn: LossFn | None,
    axes: Axes,
    agree: Agreement,
    entries: Mapping[str, Entry],
    make_sync: MakeSync,
    *,
    schedule: Schedule,
    plan: Plan | None,
    sequence_parallel: bool,
    layers_per_stage: Sequence[int] | None,
) -> Prepared:
    """Cut the model, in place, to what this rank holds.

    Raises ValueError, on every rank, for what can't be cut like that.
    """
    resolved = (
        None
        if plan is None
        else resolve(plan, model, loss_fn, axes.sizes.get("tp", 1), sequence_parallel)
    )
    cuts = (
        cut_points(model, len(schedule.placement), layers_per_stage)
        if len(schedule.placement) > 1
        else None
    )
    where = Where(
        names_by_stage(model, cuts) if cuts else [list(dict(tensors_of(model)))],
        schedule.placement,
        axes.here.get("pp", 0),
    )
    aliases = names_of_aliases(model)

    if resolved is not None:
        modules = (
            None
            if cuts is None
            else module_names(model, [number for stage in where.mine for number in cuts[stage]])
        )
        resolved.apply(model, axes.along(["tp"]), modules)
    parts: dict[int, nn.Module] = {0: model}
    if cuts is not None:
        sequence = entries_of(model)
        parts = {
            stage: Part({number: sequence[number] for number in cuts[stage]})
            for stage in where.mine
        }
        keep_only(model, parts.values(), aliases)
    SHARDED.update(model.modules() if cuts or resolved else ())

    here = dict(tensors_of(model))
    trained = {
        name: p
        for name in where.local
        if isinstance(p := here[name], nn.Parameter) and p.requires_grad
    }
    summed = resolved.partial if resolved is not None else set()
    apart = dict.fromkeys(summed, "a part on each rank along tp") | {
        name: f"tied: {name}" for name in where.tied
    }

    def synchronise() -> list[tuple[frozenset[int], GradientSync]]:
        by_stages: dict[frozenset[int], dict[str, nn.Parameter]] = {}
        for name, p in trained.items():
            by_stages.setdefault(where.mine.intersection(where.stages[name]), {})[name] = p
        only = {stages: parts[min(stages)] if len(stages) == 1 else None for stages in by_stages}
        return [
            (stages, make_sync(only[stages], of_these, axes.along(["dp"]), apart))
            for stages, of_these in by_stages.items()
        ]

    #  without stages all ranks have the same modules, and so the same errors
    syncs = (
        synchronise()
        if cuts is None
        else agree.all_or_none("prepare its part of the model", synchronise)
    )

    pieces = gather_placements(
        axes, agree, {name: p for _, sync in syncs for name, p in sync.placements.items()}
    )
    placed: dict[str, Entry] = {}
    for name, entry in entries.items():
        of_axes: dict[str, Any] = (
            {"pp": Stages(tuple(where.ranks[name]))} if axes.sizes.get("pp", 1) > 1 else {}
        )
        of_axes |= (
            {"tp": resolved.placements[name]}
            if resolved is not None and name in resolved.placements
            else {}
        )
        of_axes |= {"dp": pieces[name]} if name in pieces else {}
        placed[name] = entry._replace(placements=of_axes)
    if is_vocabulary_loss(loss_fn):
        cut_logits = resolved is not None and resolved.vocabulary
        loss_fn = partial(loss_fn, group=axes.along(["tp"] if cut_logits else []))
    added = list(sums(trained, where.ranks, summed, axes))
    return Prepared(
        parts,
        where.local,
        trained,
        syncs,
        placed,
        added,
        loss_fn,
        list(notes(resolved, cuts, schedule.placement)),
    )


class Where:
    """On which stages, and so on which positions along pp, the parameters and buffers are.

    Args: names: of the parameters and buffers, by stage. placement: stage → position along pp.
        here: this rank's.

    Attributes: stages, ranks: name → stages, or positions along pp, that have it. mine: this rank's
        stages. local: the names of what is on them. tied: the names of what is on several stages.
    """

    def __init__(self, names: Sequence[Sequence[str]], placement: Mapping[int, int], here: int):
        self.stages: dict[str, list[int]] = {}
        for stage, of_stage in enumerate(names):
            for name in of_stage:
                self.stages.setdefault(name, []).append(stage)
        self.ranks = {
            name: sorted({placement[stage] for stage in stages})
            for name, stages in self.stages.items()
        }
        self.mine = frozenset(stage for stage, rank in placement.items() if rank == here)
        self.local = [name for name, ranks in self.ranks.items() if here in ranks]
        self.tied = [name for name, stages in self.stages.items() if len(stages) > 1]


def build_executor(
    prepared: Prepared,
    axes: Axes,
    schedule: Schedule,
    autocast: torch.dtype | None,
    device: torch.device,
) -> Executor:
    """What runs this rank's list of the schedule."""
    lists = with_messages(schedule.ranks, schedule.placement)
    messages = (
        Messages(axes, lists, schedule.placement, has_messages(schedule.ranks), device)
        if len(lists) > 1
        else None
    )
    return Executor(
        prepared.parts,
        prepared.loss_fn,
        lists[axes.here.get("pp", 0)],
        stages=len(schedule.placement),
        syncs=prepared.syncs,
        device=device,
        messages=messages,
        autocast=autocast,
        goes_on=axes.sizes.get("tp", 1) == 1,
    )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def module_names(model: nn.Module, numbers: Sequence[int]) -> set[str]:
    """The names of these entries of the model's sequence."""
    sequence, names = entries_of(model), {module: name for name, module in model.named_modules()}
    return {names[sequence[number]] for number in numbers if sequence[number] in names}


def names_of_aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer → the first of its names, which differ if it is tied."""
    names = {id(t): name for name, t in tensors_of(model)}
    everything = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: names[id(t)] for name, t in everything}


def keep_only(model: nn.Module, parts: Iterable[nn.Module], aliases: Mapping[str, str]) -> None:
    """Free the memory of what is in none of these parts.

    What is tied to something in them stays tied.
    """
    kept = {id(t) for part in parts for _, t in tensors_of(part)}
    everything = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    here = {aliases[name]: t for name, t in everything if id(t) in kept}
    for name, t in everything:
        if aliases[name] not in here:
            t.data = t.data.new_empty(0)
        elif id(t) not in kept:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, here[aliases[name]])


def gather_placements(
    axes: Axes, agree: Agreement, mine: Mapping[str, Pieces]
) -> dict[str, Pieces]:
    """How dp cuts every parameter, also those of other stages; and for each position along tp,
    which may have cut it unevenly.
    """
    if len(agree.ranks) == axes.sizes.get("dp", 1):
        return dict(mine)
    of_ranks = [
        json.loads(text)
        for text in agree.texts(json.dumps({name: pieces.bounds for name, pieces in mine.items()}))
    ]
    found: dict[str, dict[int, Any]] = {}
    for position, of_rank in enumerate(of_ranks):
        at = axes.coordinates(position)
        for name, bounds in of_rank.items():
            found.setdefault(name, {})[at.get("tp", 0)] = tuple((low, high) for low, high in bounds)
    return {
        name: Pieces(by_tp[0], tuple(by_tp[i] for i in sorted(by_tp)))
        for name, by_tp in found.items()
    }


def sums(
    trained: Parameters, on_ranks: Mapping[str, Sequence[int]], summed: Collection[str], axes: Axes
) -> Iterator[tuple[list[str], Group]]:
    """Which gradients are summed over more than dp, in an order that is the same on all ranks."""
    alike = [name for name in trained if name in summed]
    if alike:
        yield alike, axes.along(["tp"])
    for name in sorted(trained):
        if len(on_ranks[name]) > 1:
            line = axes.along(["pp"])
            ranks = tuple(line.ranks[position] for position in on_ranks[name])
            yield (
                [name],
                Group(ranks, on_ranks[name].index(axes.here["pp"]), (len(ranks),), None, ("pp",)),
            )


def notes(
    resolved: Resolved | None, cuts: Sequence[range] | None, placement: Mapping[int, int]
) -> Iterator[str]:
    if resolved is not None:
        yield from resolved.describe()
    for stage, part in enumerate(cuts or ()):
        yield (
            f"stage {stage} on position {placement[stage]} of pp: modules {part.start} to "
            f"{part.stop - 1} of the model's sequence"
        )
