"""Halo exchange: every rank gets the entries around its block that a kernel needs.

They come from the ranks that hold them.

forward    rank 0  a b c d          →  a b c d e
           rank 1          e f g h  →        d e f g h
backward   rank 0  ∂ of a b c d e   →  sends ∂e back
           rank 1  adds ∂e to its own

Dims are exchanged one after the other. The messages of the second dim include what arrived along
the first, so corners need no messages to diagonal neighbours. Convolutions and pooling that use
this are in halo_spatial.py.

`halos` computes the sizes. Here n = 11 entries, a kernel of 5, 3 ranks, no padding: 7 outputs, cut
into 3, 2 and 2 (the publication's unbalanced convolution).

                                              outputs    from the left    from the right
rank 0   [0  1  2  3] 4  5  6                 0 1 2      0 entries        3
rank 1             3 [4  5  6  7] 8           3 4        1                1
rank 2                   5  6  7 [8  9  10]   5 6        3                0

Source: Hewett and Grady (arXiv 2006.03108), halo exchange; DistDL's HaloMixin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.layers.axes import mesh_axes, whole_shape
from parallel101.layers.repartition import Region, exchange
from parallel101.mesh import split_ranges


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
        self.mesh = mesh_axes(mesh, (), whole_shape(shape))
        self.shape, self.fill = whole_shape(shape), fill
        window = {"stride": stride, "padding": padding, "dilation": dilation}
        windows = windows_of(len(shape), kernel_size=kernel_size, **window)
        ranks = (*self.mesh.shape, *[1] * len(shape))
        # the halos along each dim
        self.lines = [halos(n, p, **of_dim) for n, p, of_dim in zip(shape, ranks, windows)]
        # the shape of the whole output
        self.output_shape = tuple(line[-1].computes.stop for line in self.lines)

    def forward(self, x: Tensor) -> Tensor:
        axes, y = range(len(self.mesh.shape)), x
        if not self.mesh.takes(x, cut=axes):
            return x.clone()
        for dim, line in enumerate(self.lines):
            if any(halo.needs != halo.holds or halo.padding != (0, 0) for halo in line):
                group = self.mesh.line(*({dim} & {*axes}))
                has = [region(y.shape, dim, halo.holds) for halo in line]
                needs = [region(y.shape, dim, halo.needs) for halo in line]
                agreed = {"shape in the other dims": (*y.shape[:dim], *y.shape[dim + 1 :])}
                y = exchange(y, group, has, needs, "halo_exchange", **agreed)
                inner = [0, 0] * (y.dim() - 1 - dim)  # F.pad counts dims from the last
                y = F.pad(y, [*inner, *line[group.position or 0].padding], value=self.fill)
        return x.clone() if y is x else y

    def extra_repr(self) -> str:
        return f"mesh {'×'.join(map(str, self.mesh.shape))}, {self.shape} → {self.output_shape}"


def region(shape: Sequence[int], dim: int, entries: range) -> Region:
    """Return these entries along one dim, and all of the others."""
    return tuple(entries if i == dim else range(n) for i, n in enumerate(shape))


def windows_of(dims: int, **window: Any) -> list[dict[str, Any]]:
    """Return the kernel_size, stride, padding and dilation along each dim of a tensor."""
    kernel_size = window["kernel_size"]
    sizes = len(kernel_size) if isinstance(kernel_size, Sequence) else 1
    values = {name: [x] * sizes if isinstance(x, int) else x for name, x in window.items()}
    for name, value in window.items():
        each = values[name]
        if not isinstance(each, Sequence) or len(each) != sizes or sizes > dims:
            raise ValueError(
                f"{name}={value!r}: expected an int, or one for each dim of the kernel, such as "
                f"{(3,) * sizes}; the tensor has {dims} dims"
            )
    slides: list[dict[str, Any]] = [dict(zip(window, of_dim)) for of_dim in zip(*values.values())]
    return [{"kernel_size": 1}] * (dims - sizes) + slides


class Halo(NamedTuple):
    """The entries that one rank holds, computes and needs along one dim.

    Entries are counted in the whole tensor: range(4, 8) means the entries 4, 5, 6 and 7.
    """

    holds: range  # of the input
    computes: range  # of the output
    needs: range  # of the input, to compute these outputs
    # entries that it adds before and after, because a kernel reaches over an end of the tensor
    padding: tuple[int, int]

    @property
    def left(self) -> int:
        """The number of entries that the rank gets from its left.

        A negative number counts the rank's own first entries that it does not need.
        """
        return self.holds.start - self.needs.start

    @property
    def right(self) -> int:
        """The number of entries that the rank gets from its right.

        A negative number counts the rank's own last entries that it does not need.
        """
        return self.needs.stop - self.holds.stop


def halos(
    n: int,
    p: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
) -> list[Halo]:
    """Return the entries that each of p ranks holds, computes and needs, of n along one dim.

    Inputs and outputs are both cut by `split_sizes`. A rank can get halos on both sides, on one or
    on none, of different sizes, and from ranks beyond its neighbours if the shards are small.

    Args:
        n: entries of the whole input along this dim.
        p: ranks that share them.
        kernel_size, stride, dilation: of the convolution or pooling, as in torch.
        padding: entries added at both ends of the whole input; or a pair, before and after.

    Returns one Halo per position. Raises ValueError for sizes that make no sense, and for a kernel
    larger than the padded input.
    """
    pair = padding if isinstance(padding, Sequence) else (padding, padding)
    window = (kernel_size, stride, dilation, *pair)
    least = (1, 1, 1, 0, 0)
    if len(window) != 5 or any(type(x) is not int or x < low for x, low in zip(window, least)):
        raise ValueError(
            f"kernel_size={kernel_size!r}, stride={stride!r}, padding={padding!r}, "
            f"dilation={dilation!r}: expected ints of at least 1, and for the padding an int of "
            "at least 0, or a pair, before and after"
        )
    before, after = pair
    extent = dilation * (kernel_size - 1) + 1  # from the first entry under the kernel to the last
    if n + before + after < extent:
        raise ValueError(
            f"the kernel covers {extent} entries (kernel_size={kernel_size}, "
            f"dilation={dilation}), but the input has only {n}, and {before + after} of padding: "
            "make the kernel smaller or the padding larger"
        )
    outputs, line = (n + before + after - extent) // stride + 1, []
    for holds, computes in zip(split_ranges(n, p), split_ranges(outputs, p)):
        needs, added = range(holds.start, holds.start), (0, 0)
        if computes:  # not if there are more ranks than outputs
            # counted in the input: the padding before it has negative numbers
            start = computes.start * stride - before
            stop = (computes.stop - 1) * stride - before + extent
            needs = range(min(max(start, 0), n), min(max(stop, 0), n))
            added = max(0, min(stop, 0) - start), max(0, stop - max(start, n))
        line.append(Halo(holds, computes, needs, added))
    return line
