"""Halo exchange: every rank gets the entries around its block that a kernel needs.

They come from the ranks that hold them.

forward    rank 0  a b c d          →  a b c d e
           rank 1          e f g h  →        d e f g h
backward   rank 0  ∂ of a b c d e   →  sends ∂e back
           rank 1  adds ∂e to its own

Dims are exchanged one after the other. The messages of the second dim include what arrived along
the first, so corners need no messages to diagonal neighbours. How large the halos are is in
halo_sizes.py. Convolutions and pooling that use this are in halo_spatial.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.layers.axes import mesh_axes, outside, whole_shape
from parallel101.layers.halo_sizes import Halo, halos
from parallel101.layers.regions import Region, exchange
from parallel101.mesh import Group


class HaloExchange(nn.Module):
    """Turns this rank's block of a tensor into a kernel's input, with halos and padding.

    A convolution or pooling with the same kernel, stride and dilation, and without padding, then
    computes this rank's block of the output. Inputs and outputs are both cut by `split_sizes`, and
    mesh axis i cuts tensor dim i.

    Args:
        mesh: a DeviceMesh. A rank outside it gives and gets a zero-volume tensor, and sends
            nothing.
        shape: of the whole tensor.
        kernel_size: one size for each of the last dims, such as (3, 3) for images; an int is for
            the last dim. The others have 1.
        stride, padding, dilation: one for each size in `kernel_size`, or one int for all. A padding
            may be a pair, before and after.
        fill: the value of the padding. Use -inf for max pooling.

    Forward takes this rank's block and returns a new tensor. It leaves out entries that no kernel
    of this rank covers. A dim that needs no halos costs no messages. Adjoint: the halos go back to
    where they came from, and are added there.

    Raises ValueError or TypeError for wrong arguments; ValueError, before any message, for an x
    that isn't this rank's block.

    Source: Hewett and Grady (arXiv 2006.03108), halo exchange.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        fill: float = 0.0,
    ):
        super().__init__()
        self.mesh = mesh_axes(mesh, ())
        self.shape = whole_shape(shape, self.mesh.shape) or ()
        self.fill = fill
        # the halos along each dim
        self.lines = _lines(self.shape, self.mesh.shape, kernel_size, stride, padding, dilation)
        # the shape of the whole output
        self.output_shape = tuple(line[-1].computes.stop for line in self.lines)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.coordinate is None:
            return outside(x)
        axes = range(len(self.mesh.shape))
        self.mesh.check_block(x, self.shape, cut=axes)
        y = x
        for dim, line in enumerate(self.lines):
            if any(halo.needs != halo.holds or halo.padding != (0, 0) for halo in line):
                y = exchange_halos(
                    y,
                    dim,
                    line,
                    group=self.mesh.line(dim) if dim in axes else self.mesh.line(),
                    fill=self.fill,
                )
        return x.clone() if y is x else y

    def extra_repr(self) -> str:
        return f"mesh {'×'.join(map(str, self.mesh.shape))}, {self.shape} → {self.output_shape}"


def exchange_halos(
    x: Tensor, dim: int, line: list[Halo], *, group: Group, fill: float = 0.0
) -> Tensor:
    """Exchange halos along one dim, among the ranks of one line of the mesh.

    Each entry comes straight from the rank that holds it. In backward it goes back there, and is
    added.

    Args:
        x: what this rank holds.
        dim: the dim of x.
        line: the Halo of each position in `group`, as `halos` returns it.
        group: the ranks of the line.
        fill: the value of the padding.

    Returns what this rank needs: padding, entries from the left, own entries, entries from the
    right, padding.
    """
    others = (*x.shape[:dim], *x.shape[dim + 1 :])

    def region(entries: range) -> Region:
        return tuple(entries if i == dim else range(n) for i, n in enumerate(x.shape))

    has, needs = [region(halo.holds) for halo in line], [region(halo.needs) for halo in line]
    y = exchange(x, group, has, needs, "halo_exchange", shape_in_the_other_dims=others)
    assert group.position is not None
    inner = [0, 0] * (x.dim() - 1 - dim)  # F.pad counts dims from the last
    return F.pad(y, [*inner, *line[group.position].padding], value=fill)


def _lines(
    shape: Sequence[int],
    axes: Sequence[int],
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> list[list[Halo]]:
    """Return, for each dim, the entries each rank of a line along it holds, computes and needs."""
    for name, given in (
        ("kernel_size", kernel_size),
        ("stride", stride),
        ("padding", padding),
        ("dilation", dilation),
    ):
        if not isinstance(given, int | Sequence):
            raise TypeError(
                f"{name}={given!r}: expected an int, or one for each dim of the kernel, such "
                "as (3, 3)"
            )
    kernel = [kernel_size] if isinstance(kernel_size, int) else list(kernel_size)
    others = len(shape) - len(kernel)  # the first dims: their kernel is 1
    if others < 0:
        raise ValueError(
            f"kernel_size={kernel_size} has {len(kernel)} sizes: expected at most {len(shape)} "
            f"for a tensor of shape {shape}"
        )
    window = []
    for name, neutral, given in (
        ("kernel_size", 1, kernel),
        ("stride", 1, stride),
        ("padding", 0, padding),
        ("dilation", 1, dilation),
    ):
        values = [given] * len(kernel) if isinstance(given, int) else list(given)
        if len(values) != len(kernel):
            raise ValueError(
                f"{name}={given}: expected an int, or one for each dim of the kernel, whose "
                f"size is {tuple(kernel)}"
            )
        window.append([neutral] * others + values)
    lines = []
    for dim, (n, *of_dim) in enumerate(zip(shape, *window, strict=True)):
        try:
            lines.append(halos(n, axes[dim] if dim < len(axes) else 1, *of_dim))
        except ValueError as error:
            raise ValueError(f"dim {dim} of a tensor of shape {shape}: {error}") from None
    return lines
