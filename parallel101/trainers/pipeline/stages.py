"""The stages of a pipeline: a schedule, the cut of the model that fits it, and the object that runs
this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from parallel101.collectives.comm import comm_of
from parallel101.mesh import Group
from parallel101.trainers.axis import OneStage, Syncs
from parallel101.trainers.layout import Axes, Stages
from parallel101.trainers.options import Options
from parallel101.trainers.pipeline.split import (
    all_tensors,
    cut_points,
    entries_of,
    stages_of_names,
)
from parallel101.trainers.pipeline.stage_messages import Messages
from parallel101.trainers.pipeline_parallel import Pipeline, Stage
from parallel101.trainers.schedules.schedule import schedule_for
from parallel101.trainers.schedules.with_messages import with_messages
from parallel101.trainers.support.arguments import check_model


class PipelineStages(OneStage):
    """The axis pp: the stages into which a schedule cuts a model, and this rank's among them.

    Attributes:
        placement: global stage → position along pp.

    Raises ValueError or ScheduleError for what can't run.
    """

    def __init__(self, model: nn.Module, axes: Axes, options: Options):
        if options.accumulate != 1:
            raise ValueError(
                f"accumulate={options.accumulate}: a pipeline accumulates over its microbatches; "
                f"say microbatches={options.accumulate}"
            )
        self.schedule = schedule_for(
            options.schedule, axes.sizes["pp"], options.microbatches, options.chunks
        )
        self.axes, self.device = axes, check_model(model)
        self.microbatches = self.schedule.microbatches
        batched = comm_of(axes.along(["pp"]), self.device, "pipeline").batched
        self.schedule.check("nccl" if batched else "gloo")
        self.placement, here = self.schedule.placement, axes.here["pp"]
        self.ranges = cut_points(model, len(self.placement), options.layers_per_stage)
        first: dict[int, str] = {}  # of the names that a tied tensor has
        self.first_name = {n: first.setdefault(id(t), n) for n, t in all_tensors(model)}
        self.on_stages = stages_of_names(model, self.ranges, first)
        self.mine = frozenset(s for s, position in self.placement.items() if position == here)
        self.positions = {
            name: sorted({self.placement[stage] for stage in stages})
            for name, stages in self.on_stages.items()
        }
        if axes.sizes["pp"] > 1:
            self.placements = {name: Stages(tuple(at)) for name, at in self.positions.items()}
        if options.zero_stage == 3:
            self.check_ties(model)
        if axes.size(["ep"]) > 1:
            why = f"a pipeline with experts needs one for each of {self.microbatches} microbatches"
            self.least = self.microbatches, why

    def check_ties(self, model: nn.Module) -> None:
        """Raise ValueError if a weight is tied between two stages on one rank: ZeRO-3 gathers
        weights stage by stage.
        """
        for name, p in model.named_parameters():
            if p.requires_grad and len(self.positions[name]) < len(self.on_stages[name]):
                raise ValueError(
                    f"{name!r} is tied between two stages on one rank, but zero_stage=3 "
                    "gathers weights stage by stage: expected a schedule with these stages on two "
                    "ranks, an untied model, or zero_stage=2"
                )

    def entries(self, model: nn.Module) -> list[nn.Module]:
        return entries_of(model)

    def names(self, model: nn.Module) -> set[str]:
        entries, names = entries_of(model), {m: name for name, m in model.named_modules()}
        mine = [entries[number] for stage in self.mine for number in self.ranges[stage]]
        return {names[entry] for entry in mine if entry in names}

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
        entries, mine = entries_of(model), sorted(self.mine)
        self.parts = {s: Stage({i: entries[i] for i in self.ranges[s]}) for s in mine}
        kept = {id(t) for p in self.parts.values() for t in (*p.parameters(), *p.buffers())}
        tensors = all_tensors(model)
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
        mine, stages = lists[axes.here["pp"]], len(self.placement)
        return Pipeline(self.parts, mine, messages, syncs, stages, around)

    def describe(self) -> Iterator[str]:
        for stage, part in enumerate(self.ranges):
            yield (
                f"stage {stage} on position {self.placement[stage]} of pp: modules {part.start} to "
                f"{part.stop - 1} of the model's sequence"
            )
