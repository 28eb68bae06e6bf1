"""The axes of a mesh, and the blocks into which they cut a tensor: mesh axis i cuts dim i.

    mesh 2 × 3    0 1 2      a tensor of shape [5, 7, 2],     3×3 3×2 3×2
                  3 4 5      cut into six blocks              2×3 2×2 2×2

Dim 0 is cut into 3 + 2, dim 1 into 3 + 2 + 2, and no axis cuts dim 2. Blocks are balanced
(`split_sizes`). This file sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel101.mesh import Group, group_of, split_sizes

AxesLike = int | str | Sequence[int | str]


class MeshAxes(NamedTuple):
    """A mesh, with the axes that a layer works along."""

    mesh: Group  # its ranks; without a position on a rank outside the mesh
    shape: tuple[int, ...]  # of the mesh, known outside it too
    axes: tuple[int, ...]  # in ascending order
    coordinate: tuple[int, ...] | None  # of this rank; None: it is outside the mesh

    @property
    def others(self) -> list[int]:
        """The axes along which the layer doesn't work."""
        return [axis for axis in range(len(self.shape)) if axis not in self.axes]

    def line(self, *axes: int) -> Group:
        """Return the group of the ranks that differ from this one along these axes only."""
        return self.mesh.along(*axes)

    def check_block(self, x: Tensor, whole: Sequence[int] | None, cut: Sequence[int]) -> None:
        """Raise ValueError if x can't be this rank's block of a tensor that the axes in `cut` cut.

        `whole` is the shape of that tensor, if it is known.
        """
        check_tensor(x)
        if whole is not None and self.coordinate is not None:
            block = block_shape(whole, self.shape, {axis: self.coordinate[axis] for axis in cut})
            if tuple(x.shape) != block:
                raise ValueError(
                    f"x has shape {tuple(x.shape)}, but on a mesh of shape {self.shape} a tensor "
                    f"of shape {tuple(whole)} has the block {block} at coordinate "
                    f"{self.coordinate}: check shape=, which is that of the whole tensor"
                )
        check_dims(x.shape, self.shape, "x")

    def __repr__(self) -> str:
        return f"mesh {'×'.join(map(str, self.shape))}, axes={self.axes}"


def mesh_axes(mesh: DeviceMesh, axes: AxesLike = ()) -> MeshAxes:
    """Return the mesh with its axes, given by number (negative counts from the end) or by name.

    Raises TypeError for anything else; ValueError for an axis that the mesh doesn't have, or that
    is named twice.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: expected a DeviceMesh, such as "
            "torch.distributed.init_device_mesh('cpu', (2, 3)) returns"
        )
    several: object = (axes,) if isinstance(axes, int | str) else axes
    if not isinstance(several, Sequence):
        raise TypeError(
            f"axes={axes!r}: expected axes of the mesh by number or name, such as (0, 2); () "
            "for none"
        )
    n, names = mesh.ndim, mesh.mesh_dim_names or ()
    number = {axis: axis % n for axis in range(-n, n)} | {name: i for i, name in enumerate(names)}
    for axis in several:
        if type(axis) not in (int, str) or axis not in number:
            raise ValueError(
                f"axes: the mesh has no axis {axis!r}: it has shape {tuple(mesh.shape)}, so "
                f"expected {-n} to {n - 1}, or "
                + (f"one of the names {names}" if names else "names, which its axes don't have")
            )
    chosen = sorted(number[axis] for axis in several)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"axes={axes!r} names an axis twice: expected each axis at most once")
    where = mesh.get_coordinate()
    return MeshAxes(
        group_of(mesh),
        tuple(mesh.shape),
        tuple(chosen),
        None if where is None else tuple(where),
    )


def block_shape(
    whole: Sequence[int], mesh_shape: Sequence[int], at: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the shape of a block of a tensor, at these coordinates along the axes that cut it."""
    return tuple(
        split_sizes(n, mesh_shape[dim])[at[dim]] if dim in at else n for dim, n in enumerate(whole)
    )


def whole_shape(shape: Sequence[int], mesh_shape: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the argument `shape=` of a layer as a tuple. Raises TypeError or ValueError."""
    if not isinstance(shape, Sequence) or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError(
            f"shape={shape!r}: expected the shape of the whole tensor, such as (6, 14, 12)"
        )
    check_dims(shape, mesh_shape, "shape")
    return tuple(shape)


def check_dims(shape: Sequence[int], mesh_shape: Sequence[int], name: str) -> None:
    """Raise ValueError if the mesh has more axes than the tensor has dims."""
    if len(shape) < len(mesh_shape):
        raise ValueError(
            f"{name} has {len(shape)} dims ({tuple(shape)}), but the mesh has {len(mesh_shape)} "
            f"axes {tuple(mesh_shape)}: axis i of the mesh "
            "cuts dim i. Expected at least as many dims; use a mesh of fewer axes, such as "
            "mesh['name'], or add dims of size 1."
        )


def check_tensor(x: Tensor) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: expected a tensor")


def outside(x: Tensor) -> Tensor:
    """Return the result on a rank outside the mesh: a copy of its zero-volume input.

    Raises ValueError if the tensor has elements.
    """
    check_tensor(x)
    if x.numel():
        raise ValueError(
            f"x has shape {tuple(x.shape)} on a rank outside the layer's mesh: expected a "
            "zero-volume tensor there, such as torch.empty(0)"
        )
    return x.clone(memory_format=torch.contiguous_format)
