"""Sharded data parallel (ZeRO, FSDP): like data parallel, but each rank holds only 1/n of what
would be the same on all ranks.

It is a Trainer on one axis whose gradient synchronisation also decides who owns what: see
zero/stage12.py and zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from parallel101.mesh import Group, GroupLike, group_of
from parallel101.trainers.gradient_sync import GradientSync, Parameters, default_bucket_bytes
from parallel101.trainers.layout import Axes
from parallel101.trainers.prepare import MakeSync
from parallel101.trainers.schedules.schedule import schedule
from parallel101.trainers.support.arguments import (
    SHARDED,
    LossFn,
    OptimizerFn,
    check_accumulate,
    check_bucket_bytes,
)
from parallel101.trainers.trainer import Trainer
from parallel101.trainers.zero.stage3 import ZeRO3
from parallel101.trainers.zero.stage12 import ZeRO12


class ShardedTrainer(Trainer):
    """Trains one model on all ranks of a group, each with its share of the batch and of the memory;
    equal to one process.

                     weights   gradients   optimizer state      sent by each rank in a step
        zero_stage 1  all       all         1/n                  2(n−1)/n of the gradients' bytes
        zero_stage 2  all       1/n         1/n                  the same
        zero_stage 3  1/n       1/n         1/n                  3(n−1)/n of the weights' bytes

    Args: model: on stage 3 its parameters are empty outside of their layer's forward and backward;
        `state_dict` gathers them. loss_fn, clip_norm, autocast, sync, sync_batch_norm, verify: see
        `Trainer`. optimizer: a function of the whole parameters, so that it may make groups by name
        or shape. It is then handed this rank's pieces,
            which are 1-D. So it must be elementwise, as SGD, Adam, AdamW, Adagrad and most are. An
            optimizer that looks at whole
            matrices or their norms, as Muon, Adafactor and LAMB do, is refused before the first
            step; see `verify`.
        group: the ranks that train together; see `group_of`. None: all, or this one alone if there
            is no process group.
        zero_stage: 1, 2 or 3; see above.
        overlap: send gradients, and on stage 3 fetch the next layer, while this one computes.
        bucket_bytes: on stages 1 and 2, how many bytes of gradients travel together. None: a
            quarter of them all, at most 25 MiB.
        layers: on stage 3, the types of the modules that are gathered one at a time, such as
            (Block,). None: see `layers_of`. Parameters
            in none of them, or in several of them (tied weights), are whole for all of a forward
            and all of a backward.
        accumulate: microbatches in a step. Stage 1 adds up their gradients where they are and sends
            them once. Stages 2 and 3 have no place to add them up: they send after each microbatch,
            and stage 3 gathers for each. That is the price of their memory.

    Parameters that need no gradient, and buffers, stay whole on every rank. `describe()` also tells
    the most bytes that were held for a moment in the last step: gathered layers, and gradients in
    flight. On stage 3 all ranks must use the layers in the same order, though each may leave some
    out, and a weight may be used only in the forward of a module that has it. Source: Rajbhandari
    et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections
    5 and 7.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        zero_stage: int = 3,
        overlap: bool = True,
        bucket_bytes: int | None = None,
        layers: Sequence[type[nn.Module]] | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        sync: bool = False,
        sync_batch_norm: bool = False,
        verify: bool = True,
    ):
        super().__init__(
            model,
            loss_fn,
            optimizer,
            axes=Axes(group, {"dp": group_of(group).size}),
            make_sync=sharded(
                zero_stage, overlap, bucket_bytes, layers, autocast, goes_on=not sync_batch_norm
            ),
            schedule=schedule("1f1b", stages=1, microbatches=check_accumulate(accumulate)),
            clip_norm=clip_norm,
            autocast=autocast,
            sync=sync,
            sync_batch_norm=sync_batch_norm,
            verify=verify,
        )


def sharded(
    zero_stage: int,
    overlap: bool,
    bucket_bytes: int | None,
    layers: Sequence[type[nn.Module]] | None,
    autocast: torch.dtype | None,
    goes_on: bool,
) -> MakeSync:
    """How gradients are synchronised if each position along dp owns 1/n of the parameters.

    Raises ValueError for other stages.

    Args: see `ShardedTrainer`. goes_on: see `Executor`.
    """
    if zero_stage not in (1, 2, 3):
        raise ValueError(
            f"zero_stage={zero_stage!r}: expected 1 (optimizer state is sharded), 2 (gradients "
            "too) or 3 (weights too); "
            "to shard nothing, use DataParallelTrainer, or HybridTrainer with zero_stage=0"
        )
    check_bucket_bytes(bucket_bytes)

    def make_sync(
        part: nn.Module | None, parameters: Parameters, group: Group, apart: Mapping[str, str]
    ) -> GradientSync:
        if zero_stage == 3:
            assert part is not None, (
                "HybridTrainer refuses weights that are tied between two stages on one rank"
            )
            SHARDED.update(part.modules())
            return ZeRO3(
                part,
                parameters,
                group,
                layers=layers,
                overlap=overlap,
                autocast=autocast,
                apart=apart,
                goes_on=goes_on,
            )
        size = default_bucket_bytes(parameters, 4) if bucket_bytes is None else bucket_bytes
        return ZeRO12(
            parameters,
            group,
            zero_stage=zero_stage,
            bucket_bytes=size,
            overlap=overlap,
            apart=apart,
            goes_on=goes_on,
        )

    return make_sync
