"""BatchNorm, an example of a network on these layers: the batch is cut over the ranks of a mesh.

Its mean and variance are those of the whole batch.

    rank 0  x₀ ── Σx₀ ─┐
                       ├─ AllSumReduce ─▶ mean of x on both ranks ─▶ (x − mean) / √(variance + ε)
    rank 1  x₁ ── Σx₁ ─┘

The code is that of one process, with one AllSumReduce in each sum. Its adjoint gives the right
gradients without a further line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import copy_to_group
from parallel101.layers.along_axes import AllSumReduce
from parallel101.layers.axes import mesh_axes
from parallel101.mesh import split_sizes

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # as torch calls them


class BatchNorm(nn.Module):
    """Normalizes a batch cut over a mesh, as torch's BatchNorm1d, 2d and 3d do a whole one.

    Ranks may have any number of samples each.

    Args:
        mesh: a DeviceMesh. Axis 0 cuts the samples and axis 1 the channels (by `split_sizes`),
            further axes cut the further dims. A mesh of one axis cuts the samples. A rank outside
            it gives and gets a zero-volume tensor, and sends nothing.
        num_features: the number of channels of the whole tensor. This rank has the parameters and
            statistics of its own.
        eps, momentum, affine, track_running_stats: see torch.nn.BatchNorm2d.
        device, dtype: of the parameters and statistics.

    Forward takes (samples, channels, …) and returns a new tensor of that shape and dtype; it
    computes in float32 at least. In training it makes two all-reduces of one number for each
    channel, in evaluation none. The gradients of weight and bias are summed over the ranks that
    share them, as if the whole batch were on one rank. So they are the same on these ranks: don't
    average them again.

    Raises ValueError or TypeError for wrong arguments; ValueError for other shapes, and in training
    for only one value per channel.

    Source: Ioffe and Szegedy (arXiv 1502.03167); DistDL's DistributedBatchNorm.
    """

    # tensors, or None
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def __init__(
        self,
        mesh: DeviceMesh,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        axes = range(len(mesh_axes(mesh).shape))
        self.mesh = mesh_axes(mesh, [axis for axis in axes if axis != 1])
        self.sum = AllSumReduce(mesh, self.mesh.axes)
        self.eps, self.momentum = eps, momentum
        channels = split_sizes(num_features, *self.mesh.shape[1:2] or (1,))
        at = self.mesh.coordinate
        self.channels = 0 if at is None else channels[at[1] if len(at) > 1 else 0]
        ones = torch.ones(self.channels, device=device, dtype=dtype)
        zeros = torch.zeros_like(ones)
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(zeros.clone()) if affine else None
        count = torch.tensor(0, device=device)
        for name, value in zip(STATISTICS, (zeros, ones, count)):
            self.register_buffer(name, value if track_running_stats else None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.mesh.takes(x, cut=()):
            return x.clone()
        if x.dim() < 2 or x.shape[1] != self.channels or not x.is_floating_point():
            raise ValueError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype}: expected (samples, "
                f"{self.channels} channels, …) of a floating-point dtype on this rank"
            )
        # bfloat16 can't represent 257, so it can't count the samples
        given, x = x, x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training or self.running_mean is None:
            mean, variance, n = self.statistics(x)
            if self.training:
                self.track(mean.detach(), variance.detach() * n / (n - 1))
        else:
            mean, variance = self.running_mean, self.running_var
        y = (x - along_dim_1(mean, x)) / along_dim_1((variance + self.eps).sqrt(), x)
        if self.weight is not None and self.bias is not None:
            both, group = torch.stack([self.weight, self.bias]), self.mesh.line(*self.mesh.axes)
            weight, bias = (along_dim_1(of, x) for of in copy_to_group(both, group=group))
            y = y * weight + bias
        return y.to(given.dtype)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return each channel's mean and variance over all ranks, and the number of values."""
        others = [dim for dim in range(x.dim()) if dim != 1]
        count = x.new_tensor([x.shape[:1].numel() * x.shape[2:].numel()])
        *_, total = sums = self.sum(torch.cat([x.sum(others), count]))
        n, mean = int(total), sums[:-1] / total
        if n < 2:
            raise ValueError(
                f"the batch has {n} values per channel on all ranks together: expected at "
                "least 2 in training"
            )
        variance = self.sum((x - along_dim_1(mean, x)).square().sum(others)) / n
        return mean, variance, n

    @torch.no_grad()
    def track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if self.running_mean is None:
            return
        self.num_batches_tracked += 1
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"


def along_dim_1(value: Tensor, x: Tensor) -> Tensor:
    """Return one value for each channel, in a shape that multiplies x."""
    return value.view(-1, *[1] * (x.dim() - 2))
