"""The collectives along axes of a mesh as modules: five of DistDL's family.

AllGather joins the blocks along axes of a mesh; ReduceScatter, its adjoint, sums whole tensors and
leaves each rank its block:

    axes=(1,) of a mesh 2 × 3:     a b c      abc abc abc        AllGather ─▶
                                   d e f      def def def        ◀─ ReduceScatter

AllSumReduce leaves every rank the sum. It is its own adjoint:

                                   a b c      s s s              s = a + b + c
                                   d e f      t t t              t = d + e + f

Broadcast copies tensors along axes; SumReduce, its adjoint, sums along them. A dot is a rank that
holds no tensor:

                                   a · ·      a a a              Broadcast ─▶
                                   d · ·      d d d

                                   a b c      s · ·              SumReduce ─▶
                                   d e f      t · ·

A rank that holds no tensor of shape [3, 7] has a zero-volume one of shape [0, 3, 7]. So it still
knows the shape that it will receive, and nobody sends a message to ask: SumReduce followed by
Broadcast is AllSumReduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from parallel101.collectives.checks import tensor_of
from parallel101.layers.axes import AxesLike, MeshAxes, block_shape, mesh_axes
from parallel101.mesh import Group, split_sizes


class AlongAxes(nn.Module):
    """The arguments that these layers share: the mesh, its axes, and the whole tensor's shape."""

    def __init__(self, mesh: DeviceMesh, axes: AxesLike, *, shape: Sequence[int] | None = None):
        super().__init__()
        self.mesh = mesh_axes(mesh, axes, shape)

    def extra_repr(self) -> str:
        return str(self.mesh)


class AllGather(AlongAxes):
    """Joins the blocks of a tensor along some axes of the mesh that cuts it.

    Mesh axis i cuts dim i, and its blocks are joined along dim i. On a mesh of shape (2, 2, 3),
    `AllGather(mesh, axes=(2,))` turns a block of [3, 7, 4] into [3, 7, 12].

    Args:
        mesh: a DeviceMesh. A rank outside it gives and gets a zero-volume tensor, and sends
            nothing.
        axes: its axes by number or name. Without any, the result is a clone.
        shape: of the whole tensor, whose blocks are then those of `split_sizes` along each dim.
            Default: all blocks are as large as mine.

    Forward takes this rank's block and returns a new tensor on every rank. Where the result has n
    elements and the axes have p ranks, each rank sends n(p−1)/p elements. Adjoint: ReduceScatter.

    Raises ValueError or TypeError for wrong arguments, and for a block that contradicts `shape`,
    before any message.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def forward(self, x: Tensor) -> Tensor:
        whole, y = self.mesh.whole, x
        if not self.mesh.takes(x, cut=range(len(self.mesh.shape))):
            return x.clone()
        for axis in reversed(self.mesh.axes):
            sizes = whole and split_sizes(whole[axis], self.mesh.shape[axis])
            y = all_gather(y, axis, group=self.mesh.line(axis), sizes=sizes)
        return x.clone() if y is x else y


class ReduceScatter(AlongAxes):
    """Sums tensors over some axes of the mesh, and leaves each rank its block of the sum.

    Mesh axis i cuts dim i. On a mesh of shape (2, 2, 3), `ReduceScatter(mesh, axes=(2,))` turns
    [3, 7, 12] into [3, 7, 4].

    Args:
        mesh, axes: see AllGather.
        shape: of the whole tensor; only checked. The blocks are always those of `split_sizes`.

    Forward takes a tensor that the mesh's other axes cut, and returns this rank's block, a new
    tensor. Each rank sends n(p−1)/p elements of the n it gives. Adjoint: AllGather. Raises
    ValueError or TypeError as AllGather does.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if not self.mesh.takes(x, cut=self.mesh.others):
            return x.clone()
        for axis in self.mesh.axes:
            y = reduce_scatter(y, axis, group=self.mesh.line(axis))
        return x.clone() if y is x else y


class AllSumReduce(AlongAxes):
    """Sums tensors over some axes of the mesh; every rank gets the sum.

    On a mesh of shape (2, 2, 3), `AllSumReduce(mesh, axes=(1, 2))` sums over six ranks.

    Args:
        mesh: a DeviceMesh. A rank outside it gives and gets a zero-volume tensor, and sends
            nothing.
        axes: its axes by number or name. Without any, the result is a clone.

    Forward takes tensors of one shape, with any number of dims, on all ranks that are summed, and
    returns a new tensor of that shape. It is its own adjoint. Raises ValueError or TypeError for
    wrong arguments.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.mesh.takes(x) and self.mesh.axes):
            return x.clone()
        return all_reduce(x, group=self.mesh.line(*self.mesh.axes))


class Broadcast(AlongAxes):
    """Copies each source's tensor to all ranks of its line along some axes of the mesh.

    On a mesh of shape (2, 3), `Broadcast(mesh, axes=(1,))` copies from the two ranks with
    coordinate 0 along axis 1 to six.

    Args:
        mesh: a DeviceMesh, of the ranks that get a tensor. Any other rank gives and gets a
            zero-volume tensor, and sends nothing.
        axes: its axes by number or name. Without any, the result is a clone.
        source: a DeviceMesh of the ranks that have a tensor, of any ranks. It has the mesh's shape
            but 1 along `axes`; ones on the left may be left out. Default: the ranks with coordinate
            0 along `axes`.
        shape: of the whole tensor, if the mesh's other axes cut it into blocks by `split_sizes`.
            Default: not needed if each rank's x says which shape it will receive.

    Forward takes a source's tensor. On the other ranks x only says which shape and dtype they
    receive: it is a zero-volume tensor of shape (0, *shape), which SumReduce returns (with `shape=`
    any zero-volume one), or a tensor of that shape, whose values are ignored. Forward returns a new
    tensor; on a source outside the mesh a zero-volume one. Adjoint: SumReduce. Raises ValueError or
    TypeError for wrong arguments and tensors.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: AxesLike,
        *,
        source: DeviceMesh | None = None,
        shape: Sequence[int] | None = None,
    ):
        super().__init__(mesh, axes, shape=shape)
        self.lines = lines_of(mesh, self.mesh, source, "source")

    def forward(self, x: Tensor) -> Tensor:
        return along_lines(broadcast, x, self.mesh, self.lines)


class SumReduce(AlongAxes):
    """Sums tensors along some axes of the mesh; one rank of each line, its target, gets the sum.

    On a mesh of shape (2, 3), `SumReduce(mesh, axes=(1,))` sums over three ranks, twice. The sums
    are on the ranks with coordinate 0.

    Args:
        mesh: a DeviceMesh, of the ranks that have a tensor. Any other rank gives and gets a
            zero-volume tensor, and sends nothing.
        axes: its axes by number or name. Without any, the result is a clone.
        target: a DeviceMesh of the ranks that get a sum; see `source` of Broadcast. Default: the
            ranks with coordinate 0 along `axes`.
        shape: see Broadcast. Only a target outside the mesh needs it, or an x that says which shape
            it will receive.

    Forward takes tensors of one shape on all ranks of a line. It returns a new tensor on the
    targets, and elsewhere a zero-volume one of shape (0, *shape of x), which Broadcast takes.
    Adjoint: Broadcast. Raises ValueError or TypeError as Broadcast does.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: AxesLike,
        *,
        target: DeviceMesh | None = None,
        shape: Sequence[int] | None = None,
    ):
        super().__init__(mesh, axes, shape=shape)
        self.lines = lines_of(mesh, self.mesh, target, "target")

    def forward(self, x: Tensor) -> Tensor:
        return along_lines(reduce, x, self.mesh, self.lines)


class Line(NamedTuple):
    """The ranks of one broadcast or reduction: a line (plane, …) of the mesh, and its root.

    The root may be a rank outside the line.
    """

    group: Group
    root: int  # its position in the group
    gives: bool  # whether this rank has a tensor
    gets: bool  # whether it gets a result
    block: tuple[int, ...] | None  # the shape of the tensors, if shape= was given


def lines_of(mesh: DeviceMesh, chosen: MeshAxes, roots: DeviceMesh | None, name: str) -> list[Line]:
    """Return the lines in which this rank takes part, in an order that is the same on all ranks.

    `roots` are the sources of a broadcast or the targets of a sum, as `name` says. The lines are
    none, one, or two if this rank is the root of another line than its own. The order keeps two
    ranks from waiting for each other.
    """
    kept = chosen.others
    expected = tuple(n if axis in kept else 1 for axis, n in enumerate(chosen.shape))
    shape = tuple(roots.shape) if isinstance(roots, DeviceMesh) else ()
    if roots is not None and (1,) * (len(expected) - len(shape)) + shape != expected:
        raise ValueError(
            f"{name}={roots!r}: expected a DeviceMesh of shape {expected}, which is the mesh's "
            "with 1 along the layer's axes, or None for the ranks with coordinate 0"
        )
    lines = mesh.mesh.permute(*kept, *chosen.axes).reshape(torch.Size(expected).numel(), -1)
    at = lines[:, 0] if roots is None else roots.mesh.flatten()
    names = tuple(mesh.mesh_dim_names[axis] for axis in chosen.axes) if mesh.mesh_dim_names else ()
    coordinates = list(product(*(range(mesh.shape[axis]) for axis in kept)))
    me, found = dist.get_rank(), []
    for i in ((lines == me).any(1) | (at == me)).nonzero().flatten().tolist():
        members, root = lines[i].tolist(), int(at[i])
        ranks = tuple(members if root in members else [root, *members])
        group = Group(ranks, ranks.index(me), (len(ranks),), None, names)
        has = [me == root, me in members]
        gives, gets = has if name == "source" else has[::-1]
        place = dict(zip(kept, coordinates[i]))
        block = chosen.whole and block_shape(chosen.whole, chosen.shape, place)
        found.append(Line(group, ranks.index(root), gives, gets, block))
    return found


def along_lines(
    operation: Callable[..., Tensor], x: Tensor, mesh: MeshAxes, lines: list[Line]
) -> Tensor:
    """Broadcast or reduce in each of this rank's lines, and return its result.

    x is given in one of them at most, and the result comes from one at most.
    """
    if not lines:
        mesh.takes(x)
        return x.clone()
    tensor_of(x)
    has_x = any(line.gives for line in lines)
    shapes = [shape_in(line, x, has_x) for line in lines]
    results = []
    for line, shape in zip(lines, shapes):
        given = x if line.gives else zeros(x).expand(shape)
        y = operation(given, line.root, group=line.group)
        results.append(y if line.gets else y.reshape(-1)[:0].view(0, *shape))
    gets = [line.gets for line in lines]
    result = results.pop(gets.index(True) if any(gets) else 0)
    for y in results:  # this rank got nothing there, but takes part in the backward
        result = result + zeros(y) if y.requires_grad else result
    return result


def shape_in(line: Line, x: Tensor, has_x: bool) -> tuple[int, ...]:
    """Return the shape of the tensors in this line.

    Raises ValueError if x contradicts it or doesn't tell it.
    """
    if line.block is None:
        if has_x or x.numel():
            return tuple(x.shape)
        if x.dim() < 2 or x.shape[0]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, which doesn't say what this rank will receive: "
                "expected a zero-volume tensor such as torch.empty(0, 3, 7) for a tensor of shape "
                "(3, 7); or give the layer shape=, the shape of the whole tensor"
            )
        return tuple(x.shape[1:])
    if tuple(x.shape) != line.block and (line.gives or (x.numel() and not has_x)):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but here the whole tensor has a block of shape "
            f"{line.block}: check shape="
        )
    return line.block


def zeros(x: Tensor) -> Tensor:
    """Return a zero of shape () that depends on x.

    With it, a receiving rank belongs to the graph.
    """
    return x.reshape(-1)[:0].sum(dtype=x.dtype)
