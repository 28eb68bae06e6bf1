"""Who takes part: groups of ranks in order, the axes of a mesh, and how n things are cut over p ranks.

world 0 1 2 3 4 5      group=[4, 0, 2]: rank 4 stands at position 0, rank 0 at 1, rank 2 at 2; 1, 3 and 5 are idle
mesh [[0, 1, 2],       group=mesh: six positions, row by row; mesh["x"]: the ranks of my own line along axis x
      [3, 4, 5]]       split_sizes(7, 3) = [3, 2, 2]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

GroupLike = None | Sequence[int] | dist.ProcessGroup | DeviceMesh

OUTSIDE: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns on a rank that is not in the group


class Group(NamedTuple):
    """Ranks in order. A rank's place in that order is its position: roots and peers of collectives are positions."""

    ranks: tuple[int, ...]  #  ranks of the world, by position; empty where an idle rank can't know them
    position: int | None  #  this rank's own place; None: this rank is idle
    shape: tuple[int, ...]  #  of the mesh, one number an axis, positions running row by row; (size,) for a flat group
    process_group: dist.ProcessGroup | None  #  whose messages are used; None: the default group's

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(group: GroupLike = None) -> Group:
    """What `group=` of every collective means.

    Args:
        group: None: all ranks (without a process group: this one rank alone). A sequence of ranks of the world, in order: no call of
            `new_group` is needed, and the others need not know. A ProcessGroup, or what `new_group` gave on a rank outside it.
            A DeviceMesh of one axis or several: its ranks row by row.

    Raises:
        TypeError: for anything else. ValueError: for ranks that repeat or that the world does not have.
        RuntimeError: where ranks were named and torch.distributed has no process group.
    """
    if not dist.is_initialized():
        if group is None:
            return Group((0,), 0, (1,), None)
        raise RuntimeError(f"group={group!r}, but there is no process group: run inside parallel101.launch(…) or call init_process_group")
    me, world_size = dist.get_rank(), dist.get_world_size()
    if group is None:
        return Group(tuple(range(world_size)), me, (world_size,), None)
    if isinstance(group, int) and group == OUTSIDE:
        return Group((), None, (0,), None)
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
        return Group(ranks, ranks.index(me), (len(ranks),), group)
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:  # an idle rank cannot even ask a sliced mesh for its ranks
            return Group((), None, (0,), None)
        ranks = tuple(group.mesh.flatten().tolist())
        return Group(ranks, ranks.index(me), tuple(group.mesh.shape), None)
    ranks = _ranks_in_order(group, world_size)
    return Group(ranks, ranks.index(me) if me in ranks else None, (len(ranks),), None)


def _ranks_in_order(group: Sequence[int], world_size: int) -> tuple[int, ...]:
    ranks = tuple(group) if isinstance(group, Sequence) else ()  # a set has no order, a generator ends
    if not ranks or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise TypeError(f"group={group!r}: expected None (all ranks), ranks in order such as [0, 2, 3], a ProcessGroup or a DeviceMesh")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"group={list(ranks)} names a rank twice; every rank has one position")
    if not all(0 <= rank < world_size for rank in ranks):
        raise ValueError(f"group={list(ranks)}: the world has the ranks 0 to {world_size - 1}")
    return ranks


def along(shape: Sequence[int], position: int, axes: Sequence[int]) -> list[int]:
    """Positions of the ranks that differ from `position` along `axes` only, row by row.

    On a mesh of shape (2, 3): `along((2, 3), 4, [1])` is [3, 4, 5], the row of position 4, and `along((2, 3), 4, [0])` its column [1, 4].
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    line = [position - sum(position // strides[axis] % shape[axis] * strides[axis] for axis in axes)]
    for axis in axes:
        line = [start + i * strides[axis] for start in line for i in range(shape[axis])]
    return line


def split_sizes(n: int, p: int) -> list[int]:
    """Sizes of a balanced cut of n things over p ranks: n // p each, and one more for each of the first n % p.

    So rank i starts at (n // p) * i + min(i, n % p). Raises ValueError for n < 0 or p < 1.
    """
    if type(n) is not int or type(p) is not int or n < 0 or p < 1:
        raise ValueError(f"split_sizes({n}, {p}): expected n >= 0 things over p >= 1 ranks")
    return [n // p + (i < n % p) for i in range(p)]
