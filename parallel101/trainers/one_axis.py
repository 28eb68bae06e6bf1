"""Data parallel: every rank has the whole model and a share of the batch.

Gradients are summed, and all ranks take the same step.

It is a Trainer on one axis with naive, bucketed or overlapped gradient synchronisation: see
gradients.py for those.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from parallel101.mesh import Group, GroupLike, group_of
from parallel101.trainers.data_parallel import Bucketed, Naive, Overlapped
from parallel101.trainers.gradient_sync import GradientSync, Parameters, default_bucket_bytes
from parallel101.trainers.layout import Axes
from parallel101.trainers.prepare import MakeSync
from parallel101.trainers.schedules.schedule import schedule
from parallel101.trainers.support.arguments import (
    LossFn,
    OptimizerFn,
    check_accumulate,
    check_bucket_bytes,
)
from parallel101.trainers.trainer import Trainer


class DataParallelTrainer(Trainer):
    """Trains one model on all ranks of a group, each with its share of the batch; equal to one
    process with the whole batch.

    Args: model, loss_fn, optimizer, clip_norm, autocast, sync, sync_batch_norm, verify: see
        `Trainer`. group: the ranks that train together; see `group_of`. None: all, or this one
        alone if there is no process group. overlap: send gradients while backward still computes
        others. bucket_bytes: how many bytes of gradients travel together, at least one gradient.
        None: half of them all, at most 25 MiB;
            0: each on its own, and with overlap=False that is the naive all-reduce after backward.
        accumulate: microbatches into which a rank's share of the batch is cut: as many forwards and
            backwards, one communication.

    Bytes sent by each rank in a step: 2(n−1)/n of the gradients' bytes, and to each other rank 32
    bytes: counts, losses, their weights. Source: Li et al., "PyTorch Distributed: Experiences on
    Accelerating Data Parallel Training" (2020), section 3.2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        overlap: bool = True,
        bucket_bytes: int | None = None,
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
            make_sync=replicated(overlap, bucket_bytes),
            schedule=schedule("1f1b", stages=1, microbatches=check_accumulate(accumulate)),
            clip_norm=clip_norm,
            autocast=autocast,
            sync=sync,
            sync_batch_norm=sync_batch_norm,
            verify=verify,
        )


def replicated(overlap: bool, bucket_bytes: int | None) -> MakeSync:
    """How gradients are synchronised if every position along dp has all of them."""
    check_bucket_bytes(bucket_bytes)

    def make_sync(
        part: nn.Module | None, parameters: Parameters, group: Group, apart: Mapping[str, str]
    ) -> GradientSync:
        size = default_bucket_bytes(parameters, 2) if bucket_bytes is None else bucket_bytes
        if overlap:
            return Overlapped(parameters, group, size)
        return Bucketed(parameters, group, size) if size else Naive(parameters, group)

    return make_sync
