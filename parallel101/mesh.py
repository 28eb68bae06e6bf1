"""The group of a collective: its ranks in order, often an axis of a mesh.

This file also says how n things are split over p ranks: split_sizes(7, 3) = [3, 2, 2].

    world 0 1 2 3 4 5     group=[4, 0, 2]: rank 4 has position 0, rank 0 position 1, rank 2
                          position 2; ranks 1, 3 and 5 are idle
    mesh [[0, 1, 2],      group=mesh: six positions, row by row
          [3, 4, 5]]      group=mesh["x"]: the ranks on this rank's line along axis x

The mesh is torch's DeviceMesh. This file makes neither meshes nor process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel101.spans import axis_described

# what new_group returns on a rank that is not in the group
OUTSIDE: object = dist.GroupMember.NON_GROUP_MEMBER


class Group(NamedTuple):
    """The ranks of a collective, in order. A rank's place in that order is its position.

    Roots and peers of collectives are positions, not global ranks.
    """

    # ranks of the world, by position; empty if an idle rank cannot know them
    ranks: tuple[int, ...]
    position: int | None  # of this rank; None: this rank is idle
    # of the mesh, its positions counted row by row; (size,) for a flat group
    shape: tuple[int, ...]
    process_group: dist.ProcessGroup | None  # carries the messages; None: the default group
    axes: tuple[str, ...] = ()  # the names of the mesh's axes, if they have names

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def axis(self) -> str | None:
        """The name of the mesh's axis, or the names of several, joined by "_" as in torch."""
        return "_".join(self.axes) or None

    def along(self, *axes: int) -> Group:
        """Return the group of the ranks on my line (plane, …) along these axes of the mesh."""
        assert self.position is not None
        positions = along(self.shape, self.position, axes)
        names = tuple(self.axes[axis] for axis in axes) if self.axes else ()
        return self._replace(
            ranks=tuple(self.ranks[position] for position in positions),
            position=positions.index(self.position),
            shape=tuple(self.shape[axis] for axis in axes),
            axes=names,
        )


GroupLike = None | Sequence[int] | dist.ProcessGroup | DeviceMesh | Group


def group_of(group: GroupLike = None) -> Group:
    """Return the group that the argument `group=` of a collective means.

    Args:
        group: one of - None: all ranks; without a process group, this one rank alone. - A sequence
            of global ranks, in order. It needs no `new_group`, and the other ranks need not know of
            it. - A ProcessGroup, or what `new_group` returned on a rank outside it. - A DeviceMesh
            of one axis or several: its ranks, row by row. - A Group: itself.

    Raises TypeError for anything else; ValueError for a rank named twice, or one that the world
    does not have; RuntimeError for a group without a process group, as before `init_process_group`.
    """
    if isinstance(group, Group):
        return group
    world = dist.group.WORLD
    if world is None:
        if group is None:
            return Group((0,), 0, (1,), None)
        raise RuntimeError(
            f"group={group!r}, but there is no process group: run inside parallel101.launch(…) "
            "or call init_process_group"
        )
    me, world_size = world.rank(), world.size()
    if group is None:
        return Group(tuple(range(world_size)), me, (world_size,), None)
    if isinstance(group, int) and group == OUTSIDE:
        return Group((), None, (0,), None)
    if isinstance(group, dist.ProcessGroup):
        ranks, axis = tuple(dist.get_process_group_ranks(group)), axis_described(group.group_desc)
        return Group(ranks, ranks.index(me), (len(ranks),), group, (axis,) if axis else ())
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:  # on an idle rank a sliced mesh does not know its ranks
            return Group((), None, (0,), None)
        ranks, names = tuple(group.mesh.flatten().tolist()), tuple(group.mesh_dim_names or ())
        return Group(ranks, ranks.index(me), tuple(group.mesh.shape), None, names)
    # not a set, which has no order
    given: tuple[Any, ...] = (*group,) if isinstance(group, Sequence) else ()
    if not given or any(type(rank) is not int for rank in given):
        raise TypeError(
            f"group={group!r}: expected None (all ranks), ranks in order such as [0, 2, 3], a "
            "ProcessGroup or a DeviceMesh"
        )
    if len(set(given)) < len(given) or not all(0 <= rank < world_size for rank in given):
        raise ValueError(
            f"group={list(given)}: expected ranks from 0 to {world_size - 1}, none of them twice"
        )
    return Group(given, given.index(me) if me in given else None, (len(given),), None)


def along(shape: Sequence[int], position: int, axes: Sequence[int]) -> list[int]:
    """Return the positions that differ from `position` along `axes` only, row by row.

    On a mesh of shape (2, 3), `along((2, 3), 4, [1])` is the row of position 4, [3, 4, 5], and
    `along((2, 3), 4, [0])` its column, [1, 4].
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    line = [
        position - sum(position // strides[axis] % shape[axis] * strides[axis] for axis in axes)
    ]
    for axis in axes:
        line = [start + i * strides[axis] for start in line for i in range(shape[axis])]
    return line


def split_sizes(n: int, p: int) -> list[int]:
    """Return the sizes of n things split over p ranks as evenly as possible.

    Each rank gets n // p, and each of the first n % p ranks one more. So rank i starts at
    (n // p) * i + min(i, n % p). Raises ValueError for n < 0 or p < 1.

    Example:
        >>> p101.split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    if type(n) is not int or type(p) is not int or n < 0 or p < 1:
        raise ValueError(f"split_sizes({n}, {p}): expected n >= 0 things over p >= 1 ranks")
    return [n // p + (i < n % p) for i in range(p)]


def split_ranges(n: int, p: int) -> list[range]:
    """Return each rank's range of the things 0 to n − 1, split as `split_sizes` splits them."""
    sizes = split_sizes(n, p)
    return [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes))]
