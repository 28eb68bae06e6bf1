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

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd.differentiable import differentiable
from parallel101.collectives.checks import begin, tensor_of
from parallel101.collectives.comm import wait_all
from parallel101.layers.axes import mesh_axes, outside, whole_shape
from parallel101.layers.halo_sizes import Halo, halos, messages, overlap
from parallel101.mesh import Group


class HaloExchange(nn.Module):
    """Turns this rank's block of a tensor into what a kernel needs, with halos and padding.

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
    """Exchange halos along one dim, among the ranks of one line of the mesh. Backward: `add_halos`.

    Each rank sends the entries of x that others need, each entry straight from the rank that holds
    it.

    Args:
        x: what this rank holds.
        dim: the dim of x.
        line: the Halo of each position in `group`, as `halos` returns it.
        group: the ranks of the line.
        fill: the value of the padding.

    Returns what this rank needs: padding, entries from the left, own entries, entries from the
    right, padding.
    """

    def forward(x: Tensor) -> Tensor:
        x = tensor_of(x)
        comm = begin("halo_exchange", group, x, uneven=dim)
        mine, (outgoing, incoming) = line[comm.rank], _messages_of(comm.rank, line)
        first = mine.holds.start  # the entry that x begins with
        sent = [
            comm.isend(_entries(x, dim, first, block).contiguous(), to)
            for to, block in outgoing.items()
        ]
        pieces = {
            source: x.new_empty(_resized(x.shape, dim, len(block)))
            for source, block in incoming.items()
        }
        received = [comm.irecv(piece, source) for source, piece in pieces.items()]
        pieces[comm.rank] = _entries(x, dim, first, overlap(mine.holds, mine.needs))
        wait_all(sent + received)
        before, after = (x.new_full(_resized(x.shape, dim, size), fill) for size in mine.padding)
        return torch.cat([before, *(pieces[source] for source in sorted(pieces)), after], dim)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return add_halos(g, dim, line, group=group)

    return differentiable("halo_exchange", x, group, forward, backward)


def add_halos(g: Tensor, dim: int, line: list[Halo], *, group: Group) -> Tensor:
    """Send each halo back to the rank that holds its entries, which adds them up.

    It is the transpose of `exchange_halos`: it takes what that returns, and returns what that
    takes. Backward: `exchange_halos`, with zeros as padding.
    """

    def forward(g: Tensor) -> Tensor:
        g = tensor_of(g)
        comm = begin("halo_sum", group, g, uneven=dim)
        mine, (outgoing, incoming) = line[comm.rank], _messages_of(comm.rank, line)
        first = mine.needs.start - mine.padding[0]  # the entry that g begins with
        # what came in goes out, and the other way round
        sent = [
            comm.isend(_entries(g, dim, first, block).contiguous(), source)
            for source, block in incoming.items()
        ]
        pieces = {
            to: g.new_empty(_resized(g.shape, dim, len(block))) for to, block in outgoing.items()
        }
        received = [comm.irecv(piece, to) for to, piece in pieces.items()]
        result = g.new_zeros(_resized(g.shape, dim, len(mine.holds)))
        own = overlap(mine.holds, mine.needs)
        _entries(result, dim, mine.holds.start, own).copy_(_entries(g, dim, first, own))
        wait_all(sent + received)
        for to, piece in pieces.items():
            _entries(result, dim, mine.holds.start, outgoing[to]).add_(piece)
        return result

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return exchange_halos(g, dim, line, group=group)

    return differentiable("halo_sum", g, group, forward, backward)


def _messages_of(me: int, line: list[Halo]) -> tuple[dict[int, range], dict[int, range]]:
    """Return the entries that I send, by destination, and those that I receive, by source.

    Both are positions in the line.
    """
    blocks = messages(line).items()
    return {to: block for (source, to), block in blocks if source == me}, {
        source: block for (source, to), block in blocks if to == me
    }


def _entries(x: Tensor, dim: int, first: int, entries: range) -> Tensor:
    """Return these entries of x along `dim`, where x begins with entry `first`."""
    return x.narrow(dim, entries.start - first, len(entries)) if entries else x.narrow(dim, 0, 0)


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _lines(
    shape: Sequence[int],
    axes: Sequence[int],
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> list[list[Halo]]:
    """Return for each dim what each rank of a line along it holds, computes and needs."""
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
