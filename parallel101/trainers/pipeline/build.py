"""Building a pipeline: the schedule, the cut of the model, and the object that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parallel101.collectives.comm import comm_of
from parallel101.trainers.layout import Axes
from parallel101.trainers.local_model import LocalModel
from parallel101.trainers.pipeline.split import StageCut
from parallel101.trainers.pipeline.stage_messages import Messages
from parallel101.trainers.pipeline_parallel import Pipeline
from parallel101.trainers.schedules.schedule import Schedule, schedule_for
from parallel101.trainers.schedules.with_messages import has_messages, with_messages
from parallel101.trainers.support.arguments import check_accumulate, check_model


class PipelinePlan:
    """A schedule and a cut that fit each other and the ranks along pp.

    Args: see `PipelineTrainer`. Raises ValueError or ScheduleError for what can't run.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        schedule: str | Schedule,
        microbatches: int | None,
        chunks: int,
        layers_per_stage: Sequence[int] | None,
        accumulate: int,
    ):
        if check_accumulate(accumulate) != 1:
            raise ValueError(
                f"accumulate={accumulate}: a pipeline accumulates over its microbatches; say "
                f"microbatches={accumulate}"
            )
        self.schedule = schedule_for(schedule, axes.sizes["pp"], microbatches, chunks)
        batched = comm_of(axes.along(["pp"]), check_model(model), "pipeline").batched
        self.schedule.check("nccl" if batched else "gloo")
        placement = self.schedule.placement
        self.cut = StageCut(model, placement, layers_per_stage, axes.here["pp"])

    def check_ties(self, model: nn.Module) -> None:
        """Raise ValueError if a weight is tied between two stages on one rank: ZeRO-3 gathers
        weights stage by stage.
        """
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for name, stages in self.cut.on_stages.items():
            positions = [self.schedule.placement[stage] for stage in stages]
            if name in trained and len(set(positions)) < len(positions):
                raise ValueError(
                    f"{name!r} is tied between two stages on one rank, but zero_stage=3 "
                    "gathers weights stage by stage: expected a schedule with these stages on two "
                    "ranks, an untied model, or zero_stage=2"
                )

    def runner(
        self, local: LocalModel, axes: Axes, autocast: Callable[[], Any], device: torch.device
    ) -> Pipeline:
        """Return the Pipeline that carries out this rank's list."""
        ranks, placement = self.schedule.ranks, self.schedule.placement
        lists = with_messages(ranks, placement)
        mine = lists[axes.here["pp"]]
        messages = Messages(axes, lists, placement, has_messages(ranks), device)
        return Pipeline(local.parts, mine, messages, local.syncs, len(placement), autocast)
