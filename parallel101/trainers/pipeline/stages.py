"""The stages of a pipeline: a schedule, the cut of the model that fits it, and the object that runs
this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel101.collectives.comm import comm_of
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.layout import Axes
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


class PipelineStages:
    """The stages into which a schedule cuts a model, and this rank's among them. Nothing is changed
    until `keep_mine`.

    Args: options: see `PipelineTrainer`.

    Attributes:
        placement: global stage → position along pp.
        on_stages: name of each parameter and buffer → the stages that use it; several if tied.
        mine: this rank's stages.
        entries: the modules of the sequence. The first is called with the inputs.

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
        batched = comm_of(axes.along(["pp"]), check_model(model), "pipeline").batched
        self.schedule.check("nccl" if batched else "gloo")
        self.placement, here = self.schedule.placement, axes.here["pp"]
        self.ranges = cut_points(model, len(self.placement), options.layers_per_stage)
        self.entries = entries_of(model)
        first: dict[int, str] = {}  # of the names that a tied tensor has
        self.first_name = {n: first.setdefault(id(t), n) for n, t in all_tensors(model)}
        self.on_stages = stages_of_names(model, self.ranges, first)
        self.mine = frozenset(s for s, position in self.placement.items() if position == here)

    def check_ties(self, model: nn.Module) -> None:
        """Raise ValueError if a weight is tied between two stages on one rank: ZeRO-3 gathers
        weights stage by stage.
        """
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for name, stages in self.on_stages.items():
            positions = [self.placement[stage] for stage in stages]
            if name in trained and len(set(positions)) < len(positions):
                raise ValueError(
                    f"{name!r} is tied between two stages on one rank, but zero_stage=3 "
                    "gathers weights stage by stage: expected a schedule with these stages on two "
                    "ranks, an untied model, or zero_stage=2"
                )

    def modules_of_mine(self, model: nn.Module) -> set[str]:
        """Return the names of the entries of the model's sequence that this rank has."""
        entries, names = entries_of(model), {m: name for name, m in model.named_modules()}
        mine = [entries[number] for stage in self.mine for number in self.ranges[stage]]
        return {names[entry] for entry in mine if entry in names}

    def keep_mine(self, model: nn.Module) -> Mapping[int, nn.Module]:
        """Return the part of the model of each of this rank's stages. The memory of all other
        parameters is freed; a tensor that is tied to one here stays tied.
        """
        entries = entries_of(model)
        parts = {s: Stage({i: entries[i] for i in self.ranges[s]}) for s in sorted(self.mine)}
        kept = {id(t) for part in parts.values() for t in (*part.parameters(), *part.buffers())}
        tensors = all_tensors(model)
        here = {self.first_name[name]: t for name, t in tensors if id(t) in kept}
        for name, t in tensors:
            if self.first_name[name] not in here:
                t.data = t.data.new_empty(0)
            elif id(t) not in kept:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, here[self.first_name[name]])
        return parts

    def runner(
        self,
        parts: Mapping[int, nn.Module],
        syncs: Sequence[tuple[frozenset[int], GradientSync]],
        axes: Axes,
        autocast: Callable[[], Any],
        device: torch.device,
    ) -> Pipeline:
        """Return the Pipeline that carries out this rank's list; see LocalModel."""
        lists = with_messages(self.schedule.ranks, self.placement)
        messages, mine = Messages(axes, lists, self.placement, device), lists[axes.here["pp"]]
        return Pipeline(parts, mine, messages, syncs, len(self.placement), autocast)

    def describe(self) -> Iterator[str]:
        for stage, part in enumerate(self.ranges):
            yield (
                f"stage {stage} on position {self.placement[stage]} of pp: modules {part.start} to "
                f"{part.stop - 1} of the model's sequence"
            )
