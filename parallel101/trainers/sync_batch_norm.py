"""BatchNorm along dp: each rank has a share of the batch, and the mean and variance are those of
the whole batch.

    rank 0   3 samples: their mean, variance and number ──┐ all-gather    the mean and variance of
    rank 1   2 samples: theirs                          ──┘        ─────▶ all 5 samples, on both

    mean = Σ nᵢ meanᵢ / n        variance = Σ nᵢ (varianceᵢ + (meanᵢ − mean)²) / n

The all-gather is differentiable, and its backward adds up what all ranks' losses say about each
rank's mean and variance. The gradients of weight and bias are this rank's part, as those of any
other parameter: the trainer sums them. torch's nn.SyncBatchNorm does this on GPUs.
`layers/batch_norm.py` is a BatchNorm for a batch that any mesh cuts. Source: Ioffe and Szegedy
(arXiv 1502.03167); Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.autograd import all_gather
from parallel101.mesh import Group
from parallel101.trainers.axis import Axis, OneStage
from parallel101.trainers.batches import Batch
from parallel101.trainers.layout import DATA, Axes
from parallel101.trainers.options import Options
from parallel101.trainers.torch_functions import Replacing

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Norms(Axis):
    """A model's BatchNorms, whose statistics are those of the whole batch.

    Raises ValueError for a norm that would see a part of the batch only: a rank's share along dp,
    or a microbatch.
    """

    def __init__(self, model: nn.Module, axes: Axes, options: Options, microbatches: int):
        self.norms, self.synchronized = [*norms_of(model)], options.sync_batch_norm
        self.data = axes.along([axis for axis in axes.sizes if axis in DATA])
        self.microbatches = microbatches
        self.check_batch()

    def check_batch(self, *_: Batch) -> None:
        """Raise ValueError for such a norm, also if it was frozen and is not any more."""
        for name, module in self.norms:
            if not module.training and module.running_mean is not None:
                continue  # it is frozen
            if self.microbatches > 1:
                why = f"a step runs it on {self.microbatches} microbatches, one by one"
                how = "one microbatch per step (accumulate=1; in a pipeline microbatches=1)"
            elif self.data.size > 1 and not self.synchronized:
                why = "each rank has only its share"
                how = "sync_batch_norm=True (not in a TensorParallelTrainer or PipelineTrainer)"
            else:
                continue
            freeze = f", or freeze it: model.get_submodule({name!r}).eval()"
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which looks at the whole batch, but "
                f"{why}: the result would differ from one process. Use {how}, or LayerNorm, "
                f"GroupNorm or RMSNorm{freeze if module.running_mean is not None else ''}"
            )

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        """Let the norms take the statistics of all ranks' samples from now on.

        Each forward and backward of a norm in training mode sends a message, so all ranks must use
        the same norms in the same order. These messages have a process group of their own, so that
        they are never taken for gradients, which leave at any time during backward.
        """
        if not self.synchronized or self.data.size == 1:
            return
        ranks = list(self.data.ranks)
        own = dist.new_group(ranks, use_local_synchronization=True, group_desc="mesh_dp")
        group = self.data._replace(process_group=own)
        for _, module in self.norms:
            module.forward = MethodType(partial(forward, group), module)
        self.least = 1, "sync_batch_norm needs one on each rank"


def norms_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, NORMS))


def forward(group: Group, norm: Any, x: Tensor) -> Tensor:
    """Run a norm's own code, which decides when to use and update which statistics."""
    with Replacing({F.batch_norm: partial(batch_norm, group)}):
        return type(norm).forward(norm, x)


def batch_norm(
    group: Group,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.batch_norm of x (samples, channels, …), with the statistics of all ranks' samples
    if `training`.

    It computes in float32 at least. Running statistics become the same on all ranks, bit by bit.
    """
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=0)
    count = x.new_tensor([x.numel() // len(mean)])
    rows = all_gather(torch.cat([mean, variance, count]).unsqueeze(0), group=group)
    means, variances, counts = rows.split([len(mean), len(mean), 1], dim=1)
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    variance = (counts * (variances + (means - mean).square())).sum(0) / n
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * n / (n - 1)).to(running_var.dtype), momentum)
    scale, shape = (variance + eps).rsqrt(), (-1, *[1] * (x.dim() - 2))  # of values by channel
    y = (x - mean.view(shape)) * (scale if weight is None else scale * weight).view(shape)
    return (y if bias is None else y + bias.view(shape)).to(dtype)
