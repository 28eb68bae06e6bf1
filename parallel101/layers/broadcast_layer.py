"""Broadcast copies tensors along axes of a mesh; SumReduce, its adjoint, sums along them.

A dot is a rank that holds no tensor.

    axes=(1,) of a mesh 2 × 3:     a · ·      a a a        Broadcast ─▶
                                   d · ·      d d d

                                   a b c      s · ·        SumReduce ─▶        s = a + b + c
                                   d e f      t · ·                            t = d + e + f

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

from parallel101.autograd import broadcast, reduce
from parallel101.layers.axes import (
    AxesLike,
    MeshAxes,
    check_tensor,
    mesh_axes,
    outside,
    whole_shape,
)
from parallel101.mesh import Group, split_sizes


class Broadcast(nn.Module):
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
        super().__init__()
        self.mesh = mesh_axes(mesh, axes)
        self.lines = lines_of(
            mesh, self.mesh, source, "source", whole_shape(shape, self.mesh.shape)
        )

    def forward(self, x: Tensor) -> Tensor:
        return along_lines(
            broadcast,
            x,
            self.lines,
            gives=lambda line: line.is_root,
            gets=lambda line: line.in_mesh,
        )

    def extra_repr(self) -> str:
        return str(self.mesh)


class SumReduce(nn.Module):
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
        super().__init__()
        self.mesh = mesh_axes(mesh, axes)
        self.lines = lines_of(
            mesh, self.mesh, target, "target", whole_shape(shape, self.mesh.shape)
        )

    def forward(self, x: Tensor) -> Tensor:
        return along_lines(
            reduce, x, self.lines, gives=lambda line: line.in_mesh, gets=lambda line: line.is_root
        )

    def extra_repr(self) -> str:
        return str(self.mesh)


class Line(NamedTuple):
    """The ranks of one broadcast or reduction: a line (plane, …) of the mesh, and its root.

    The root may be a rank outside the line.
    """

    group: Group
    root: int  # its position in the group
    in_mesh: bool  # whether this rank is in the mesh, and not only the line's root
    block: tuple[int, ...] | None  # the shape of the tensors, if shape= was given

    @property
    def is_root(self) -> bool:
        return self.group.position == self.root


def lines_of(
    mesh: DeviceMesh,
    chosen: MeshAxes,
    roots: DeviceMesh | None,
    name: str,
    whole: Sequence[int] | None,
) -> list[Line]:
    """Return the lines in which this rank takes part, in an order that is the same on all ranks.

    They are none, one, or two if it is the root of another line than its own. The order keeps two
    ranks from waiting for each other.
    """
    kept = [axis for axis in range(mesh.ndim) if axis not in chosen.axes]
    one_root_each = tuple(mesh.shape[axis] if axis in kept else 1 for axis in range(mesh.ndim))
    lines = mesh.mesh.permute(*kept, *chosen.axes).reshape(torch.Size(one_root_each).numel(), -1)
    at = lines[:, 0] if roots is None else _ranks_of(roots, one_root_each, name)
    names = tuple(mesh.mesh_dim_names[axis] for axis in chosen.axes) if mesh.mesh_dim_names else ()
    coordinates = list(product(*(range(mesh.shape[axis]) for axis in kept)))
    me, found = dist.get_rank(), []
    for i in ((lines == me).any(1) | (at == me)).nonzero().flatten().tolist():
        members, root = lines[i].tolist(), int(at[i])
        ranks = tuple(members if root in members else [root, *members])
        group = Group(ranks, ranks.index(me), (len(ranks),), None, names)
        block = None
        if whole is not None:
            sizes = {
                axis: split_sizes(whole[axis], mesh.shape[axis])[c]
                for axis, c in zip(kept, coordinates[i])
            }
            block = tuple(sizes.get(dim, n) for dim, n in enumerate(whole))
        found.append(Line(group, ranks.index(root), me in members, block))
    return found


def _ranks_of(roots: DeviceMesh, expected: tuple[int, ...], name: str) -> Tensor:
    if not isinstance(roots, DeviceMesh):
        raise TypeError(
            f"{name}={roots!r}: expected a DeviceMesh of shape {expected}, or None for the "
            "ranks with coordinate 0"
        )
    if (1,) * (len(expected) - roots.ndim) + tuple(roots.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(roots.shape)}: expected {expected}, the shape of the "
            "mesh with 1 along the layer's axes"
        )
    return roots.mesh.flatten()


def along_lines(
    operation: Callable[..., Tensor],
    x: Tensor,
    lines: list[Line],
    *,
    gives: Callable[[Line], bool],
    gets: Callable[[Line], bool],
) -> Tensor:
    """Broadcast or reduce in each of this rank's lines, and return its result.

    x is given in one of them at most, and the result comes from one at most.
    """
    if not lines:
        return outside(x)
    check_tensor(x)
    has_x = any(map(gives, lines))
    shapes = [shape_in(line, x, gives(line), has_x) for line in lines]
    result, absent = None, []
    for line, shape in zip(lines, shapes):
        given = x if gives(line) else zeros(x).expand(shape)
        y = operation(given, line.root, group=line.group)
        if gets(line):
            result = y
        else:
            absent.append(y.reshape(-1)[:0].view(0, *shape))
    if result is None:
        return absent[0]
    for y in absent:  # this rank got nothing there, but takes part in the backward
        result = result + zeros(y) if y.requires_grad else result
    return result


def shape_in(line: Line, x: Tensor, gives: bool, has_x: bool) -> tuple[int, ...]:
    """Return the shape of the tensors in this line.

    Raises ValueError if x contradicts it or doesn't tell it.
    """
    if line.block is not None:
        if tuple(x.shape) != line.block and (gives or (x.numel() and not has_x)):
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but here the whole tensor has a block of shape "
                f"{line.block}: check shape="
            )
        return line.block
    if has_x or x.numel():
        return tuple(x.shape)
    if x.dim() < 2 or x.shape[0]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, which doesn't say what this rank will receive: "
            "expected a zero-volume tensor such as "
            "torch.empty(0, 3, 7) for a tensor of shape (3, 7); or give the layer shape=, the "
            "shape of the whole tensor"
        )
    return tuple(x.shape[1:])


def zeros(x: Tensor) -> Tensor:
    """Return a zero of shape () that depends on x.

    With it, a receiving rank belongs to the graph.
    """
    return x.reshape(-1)[:0].sum(dtype=x.dtype)
