"""The stages of a pipeline: a schedule, the cut of the model that fits it, and the object that runs
this rank's part. A stage is consecutive modules of a sequence whose composition is the model's
forward.

    GPT, 2 stages     embedding  block 0  block 1  |  block 2  block 3  norm  head
    MLP, 2 stages     linear  GELU  linear  GELU   |  linear  GELU  linear

By default each stage gets as many modules with parameters as the others. A module without any goes
with the one before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from parallel101.collectives.comm import comm_of
from parallel101.mesh import Group, split_sizes
from parallel101.trainers.agreement import named_tensors
from parallel101.trainers.axis import OneStage, Syncs
from parallel101.trainers.expect import expect
from parallel101.trainers.layout import Axes, Stages
from parallel101.trainers.model_layers import order_of
from parallel101.trainers.options import Options
from parallel101.trainers.pipeline.stage_messages import Messages
from parallel101.trainers.pipeline_parallel import Pipeline, Stage
from parallel101.trainers.schedules.actions import with_messages
from parallel101.trainers.schedules.schedule import schedule_for


class PipelineStages(OneStage):
    """The axis pp: the stages into which a schedule cuts a model, and this rank's among them.

    Attributes:
        placement: global stage → position along pp.

    Raises ValueError or ScheduleError for what can't run.
    """

    def __init__(self, model: nn.Module, axes: Axes, options: Options):
        many = options.accumulate
        expected = f"1, since a pipeline accumulates over microbatches; say microbatches={many}"
        expect("accumulate", many, many == 1, expected)
        numbers = axes.sizes["pp"], options.microbatches, options.chunks
        self.schedule, self.axes = schedule_for(options.schedule, *numbers), axes
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.microbatches = self.schedule.microbatches
        batched = comm_of(axes.along(["pp"]), self.device, "pipeline").batched
        self.schedule.check("nccl" if batched else "gloo")
        self.placement, here = self.schedule.placement, axes.here["pp"]
        entries = order_of(model)
        if entries is None:
            raise ValueError(
                f"a {type(model).__name__} can't be cut into pipeline stages: expected an "
                "nn.Sequential without a forward of its own, or a model with a method .sequence() "
                "that returns the modules whose composition is its forward, in order"
            )
        self.sequence = entries
        self.ranges = cut_points(entries, len(self.placement), options.layers_per_stage)
        first = {id(t): name for name, t in named_tensors(model)}  # of the names of a tied tensor
        all_names = named_tensors(model, remove_duplicate=False)
        self.first_name = {name: first[id(t)] for name, t in all_names}
        self.local = frozenset(s for s, position in self.placement.items() if position == here)
        parts = [nn.ModuleList(entries[i] for i in numbers) for numbers in self.ranges]
        used = [{id(t) for _, t in named_tensors(part)} for part in parts]
        self.on_stages, self.positions = {}, {}
        for name, t in named_tensors(model):
            stages = [stage for stage, ids in enumerate(used) if id(t) in ids]
            positions = sorted({self.placement[stage] for stage in stages})
            if not stages:
                raise ValueError(
                    f"{name!r} is in no module of the model's sequence, so it would be on no "
                    "stage: expected .sequence() to return all modules with parameters or buffers"
                )
            if options.zero_stage == 3 and t.requires_grad and len(positions) < len(stages):
                raise ValueError(
                    f"{name!r} is tied between two stages on one rank, but zero_stage=3 "
                    "gathers weights stage by stage: expected a schedule with these stages on two "
                    "ranks, an untied model, or zero_stage=2"
                )
            self.on_stages[name], self.positions[name] = stages, positions
        if axes.sizes["pp"] > 1:
            self.placements = {name: Stages((*where,)) for name, where in self.positions.items()}
        if axes.size(["ep"]) > 1:
            why = f"a pipeline with experts needs one for each of {self.microbatches} microbatches"
            self.least = self.microbatches, why

    def names(self, model: nn.Module) -> set[str]:
        here = {self.sequence[number] for stage in self.local for number in self.ranges[stage]}
        return {name for name, module in model.named_modules() if module in here}

    def sums(self, names: Sequence[str]) -> Iterator[tuple[list[str], Group]]:
        """Yield each tied weight of this rank, and the ranks of the stages that use it."""
        line = self.axes.along(["pp"])
        for name in sorted(names):
            positions = self.positions[name]
            if len(positions) > 1:
                ranks = tuple(line.ranks[position] for position in positions)
                here = positions.index(self.axes.here["pp"])
                yield [name], Group(ranks, here, (len(ranks),), None, ("pp",))

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        """Make a part of the model of each of this rank's stages. The memory of all other
        parameters is freed; a tensor that is tied to one here stays tied.
        """
        self.parts = {
            s: Stage(OrderedDict((str(i), self.sequence[i]) for i in self.ranges[s]))
            for s in sorted(self.local)
        }
        kept = {id(t) for p in self.parts.values() for t in (*p.parameters(), *p.buffers())}
        tensors = list(named_tensors(model, remove_duplicate=False))
        here = {self.first_name[name]: t for name, t in tensors if id(t) in kept}
        for name, t in tensors:
            if self.first_name[name] not in here:
                t.data = t.data.new_empty(0)
            elif id(t) not in kept:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, here[self.first_name[name]])

    def runner(self, syncs: Syncs, axes: Axes, around: Callable[[], Any]) -> Pipeline:
        """Return the Pipeline that carries out this rank's list."""
        lists = with_messages(self.schedule.ranks, self.placement)
        messages = Messages(axes, lists, self.placement, self.device)
        return Pipeline(self, lists[axes.here["pp"]], messages, syncs, around)

    def describe(self) -> Iterator[str]:
        for stage, part in enumerate(self.ranges):
            yield (
                f"stage {stage} on position {self.placement[stage]} of pp: modules {part.start} to "
                f"{part.stop - 1} of the model's sequence"
            )


def cut_points(
    entries: Sequence[nn.Module], stages: int, layers_per_stage: Sequence[int] | None
) -> list[range]:
    """Return, for each stage, its entries of the sequence.

    Raises ValueError for a model that can't be cut like that.
    """
    with_parameters = [i for i, entry in enumerate(entries) if [*entry.parameters()]]
    if len(with_parameters) < stages:
        raise ValueError(
            f"the model has {len(with_parameters)} modules with parameters, too few for "
            f"{stages} pipeline stages: "
            "expected at least one per stage; use fewer stages (ranks or chunks) or a deeper model"
        )
    if layers_per_stage is None:
        firsts = list(accumulate(split_sizes(len(with_parameters), stages), initial=0))[1:-1]
        cuts = [0, *(with_parameters[first] for first in firsts), len(entries)]
        return [range(a, b) for a, b in pairwise(cuts)]
    given = layers_per_stage if isinstance(layers_per_stage, Sequence) else []
    right = all(type(count) is int and count > 0 for count in given) and sum(given) == len(entries)
    parts = [range(a, b) for a, b in pairwise(accumulate(given, initial=0))] if right else []
    right = len(parts) == stages and not any(map(set(with_parameters).isdisjoint, parts))
    expected = (
        f"{stages} numbers, one for each stage, 1 or more, that add up to the {len(entries)} "
        "modules of the model's sequence, and on each stage a module with parameters"
    )
    expect("layers_per_stage", layers_per_stage, right, expected)
    return parts
