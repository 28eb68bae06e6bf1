"""The axes of a mesh, and the blocks into which they cut a tensor: mesh axis i cuts dim i.

    mesh 2 × 3    0 1 2      a tensor of shape [5, 7, 2],     3×3 3×2 3×2
                  3 4 5      cut into six blocks              2×3 2×2 2×2

Dim 0 is cut into 3 + 2, dim 1 into 3 + 2 + 2, and no axis cuts dim 2. Blocks are balanced
(`split_sizes`). This file sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel101.collectives.checks import tensor_of
from parallel101.mesh import Group, group_of, split_sizes

AxesLike = int | str | Sequence[int | str]


class MeshAxes(NamedTuple):
    """A mesh, the axes that a layer works along, and the shape of the whole tensor."""

    mesh: Group  # its ranks; without a position on a rank outside the mesh
    shape: tuple[int, ...]  # of the mesh, known outside it too
    axes: tuple[int, ...]  # in ascending order
    coordinate: tuple[int, ...] | None  # of this rank; None: it is outside the mesh
    whole: tuple[int, ...] | None  # the shape of the whole tensor, if the layer was given it

    @property
    def others(self) -> list[int]:
        """The axes along which the layer doesn't work."""
        return [axis for axis in range(len(self.shape)) if axis not in self.axes]

    def line(self, *axes: int) -> Group:
        """Return the group of the ranks that differ from this one along these axes only."""
        return self.mesh.along(*axes)

    def takes(self, x: Tensor, cut: Iterable[int] | None = None) -> bool:
        """Return whether this rank is in the mesh, and so takes part in the layer's messages.

        Args:
            x: this rank's tensor: without elements if the rank is outside the mesh, and otherwise
                its block of the whole tensor.
            cut: the axes that cut the whole tensor. None: x may have any shape.

        Raises TypeError or ValueError for another x.
        """
        tensor_of(x)
        if self.coordinate is None:
            if x.numel():
                raise ValueError(
                    f"x has shape {tuple(x.shape)} on a rank outside the layer's mesh: expected a "
                    "zero-volume tensor there, such as torch.empty(0)"
                )
            return False
        if cut is not None:
            if self.whole is not None:
                at = {axis: self.coordinate[axis] for axis in cut}
                if tuple(x.shape) != (block := block_shape(self.whole, self.shape, at)):
                    raise ValueError(
                        f"x has shape {tuple(x.shape)}, but on a mesh of shape {self.shape} a "
                        f"tensor of shape {self.whole} has the block {block} at coordinate "
                        f"{self.coordinate}: check shape=, which is that of the whole tensor"
                    )
            check_dims(x.shape, self.shape, "x")
        return True

    def __repr__(self) -> str:
        return f"mesh {'×'.join(map(str, self.shape))}, axes={self.axes}"


def mesh_axes(
    mesh: DeviceMesh, axes: AxesLike = (), shape: Sequence[int] | None = None
) -> MeshAxes:
    """Return the mesh with its axes, given by number (negative counts from the end) or by name.

    `shape` is that of the whole tensor. Raises TypeError for anything else; ValueError for an axis
    that the mesh doesn't have, or that is named twice, and for a shape of fewer dims than axes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: expected a DeviceMesh, such as "
            "torch.distributed.init_device_mesh('cpu', (2, 3)) returns"
        )
    several = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    n, names = mesh.ndim, mesh.mesh_dim_names or ()
    number = {axis: axis % n for axis in range(-n, n)} | {name: i for i, name in enumerate(names)}
    for axis in several:
        if type(axis) not in (int, str) or axis not in number:
            raise ValueError(
                f"axes: the mesh has no axis {axis!r}: it has shape {tuple(mesh.shape)}, so "
                f"expected {-n} to {n - 1}, or one of its axes' names {names}"
            )
    chosen = tuple(sorted(number[axis] for axis in several))
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"axes={axes!r} names an axis twice: expected each axis at most once")
    where = mesh.get_coordinate()
    at = None if where is None else tuple(where)
    whole = None if shape is None else whole_shape(shape, tuple(mesh.shape))
    return MeshAxes(group_of(mesh), tuple(mesh.shape), chosen, at, whole)


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
            f"axes {tuple(mesh_shape)}: axis i of the mesh cuts dim i. Expected at least as many "
            "dims; use a mesh of fewer axes, such as mesh['name'], or add dims of size 1."
        )
