"""Spatial parallelism: a convolution or pooling over a tensor that is cut across ranks.

Its values and gradients are those of one process. On a mesh of shape (1, 1, 2, 2):

    conv = nn.Conv2d(3, 8, kernel_size=3, padding=1)
    layer = SpatialParallel(conv, mesh, shape=(32, 3, 224, 224))
    y = layer(x)      # x: this rank's (32, 3, 112, 112);  y: its block of the output, here
                      # (32, 8, 112, 112)

Each rank gets the halo of its block, and then calls torch's own layer. Every rank has the whole
kernel, and the gradients of the kernel are summed over the mesh. The halo exchange is in halo.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from parallel101.autograd.replicated import copy_to_group
from parallel101.collectives import broadcast
from parallel101.layers.axes import whole_shape
from parallel101.layers.halo import HaloExchange

SLIDING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)
SUPPORTED = {"padding_mode": "zeros", "ceil_mode": False, "return_indices": False}


class SpatialParallel(nn.Module):
    """Runs a convolution or pooling on a tensor that is cut across a mesh.

    Values and gradients are those of one process.

    Args:
        module: an nn.Conv, nn.MaxPool or nn.AvgPool of 1, 2 or 3 dims. It is copied, and every rank
            gets the weights of position 0 of the mesh.
        mesh: a DeviceMesh. Axis i cuts dim i of input and output. A convolution needs all channels,
            so axis 1 has one rank there. A rank outside the mesh gives and gets a zero-volume
            tensor, and sends nothing.
        shape: of the whole input: samples, channels, and then the dims that the kernel slides over.

    Forward takes this rank's block of the input and returns its block of the output, both cut by
    `split_sizes`. The whole output has the shape `output_shape`, which is the next layer's `shape`.
    All ranks of the mesh construct the layer together. Backward sums the gradients of weight and
    bias over the mesh. They are then the same on all its ranks, so don't sum or average them again.

    Raises TypeError for another module; ValueError for an option that has no distributed form, and
    for shapes that don't fit together.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, shape: Sequence[int]):
        super().__init__()
        kind = type(module).__name__
        if type(module) not in SLIDING:
            raise TypeError(
                f"module is a {kind}: expected a convolution or pooling, "
                f"{', '.join(sliding.__name__ for sliding in SLIDING)}"
            )
        shape, dims = whole_shape(shape), int(kind[-2])  # over which the kernel slides
        if len(shape) != dims + 2:
            raise ValueError(
                f"shape={shape}: expected {dims + 2} dims for a {kind}, samples and channels first"
            )
        self.window = window_of(module, dims)
        fill = -math.inf if "MaxPool" in kind else 0.0
        self.exchange = HaloExchange(mesh, shape=shape, **self.window, fill=fill)
        self.group = self.exchange.mesh.mesh
        self.output_shape = self.exchange.output_shape
        local: Any = copy.deepcopy(module)
        local.padding = (0,) * dims  # the exchange adds it
        self.module = local
        if "Conv" in kind:
            if self.exchange.mesh.shape[1:2] not in ((), (1,)):
                raise ValueError(
                    f"the mesh has shape {self.exchange.mesh.shape}: expected one rank on axis "
                    f"1, since a {kind} needs all channels"
                )
            if shape[1] != local.in_channels:
                raise ValueError(
                    f"shape={shape} has {shape[1]} channels, but the {kind} expects "
                    f"{local.in_channels}"
                )
            self.output_shape = (self.output_shape[0], local.out_channels, *self.output_shape[2:])
        if self.group.position is not None:
            for parameter in self.module.parameters():
                parameter.data = broadcast(parameter.data, group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        block = self.exchange(x)
        if self.group.position is None:
            return block
        kernel, dilation = self.window["kernel_size"], self.window["dilation"]
        extents = [1, 1, *(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))]
        # With more ranks than outputs, some rank has none. It computes one output from zeros
        # and drops it, so that it takes part in backward.
        absent = [0 if n else extent for n, extent in zip(block.shape, extents, strict=True)]
        pad = [entries for extent in reversed(absent) for entries in (0, extent)]
        weights = {
            name: copy_to_group(parameter, group=self.group)
            for name, parameter in self.module.named_parameters()
        }
        y = functional_call(self.module, weights, F.pad(block, pad))
        return y[tuple(slice(0) if extent else slice(None) for extent in absent)]


def window_of(module: Any, dims: int) -> dict[str, Any]:
    """Return the module's kernel_size, stride, padding and dilation, each with one entry per dim.

    Raises ValueError for unsupported options.
    """
    for option, supported in SUPPORTED.items():
        if (given := getattr(module, option, supported)) != supported:
            raise ValueError(
                f"{option}={given!r} has no distributed form here: use {option}={supported!r}"
            )
    if module.padding not in (0, (0,) * dims) and not getattr(module, "count_include_pad", True):
        raise ValueError(
            "count_include_pad=False has no distributed form here: use count_include_pad=True "
            "or padding=0"
        )
    window: dict[str, Any] = {
        name: getattr(module, name, 1) for name in ("kernel_size", "stride", "padding", "dilation")
    }
    if window["padding"] == "valid":
        window["padding"] = 0
    for name, value in window.items():
        window[name] = (value,) * dims if isinstance(value, int) else value
    if window["padding"] == "same":
        totals = [d * (k - 1) for k, d in zip(window["kernel_size"], window["dilation"])]
        window["padding"] = tuple((total // 2, total - total // 2) for total in totals)
    return window
