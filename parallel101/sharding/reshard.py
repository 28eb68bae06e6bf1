"""The collectives that take an array from one sharding to another with the fewest bytes.

    AllGather_X           A[I_X, J] → A[I, J]           removes a subscript
    ReduceScatter_{X,J}   A[I, J] {U_X} → A[I, J_X]     adds the terms up, and leaves the sum cut
    AllReduce_X           A[I, J] {U_X} → A[I, J]       ReduceScatter, then AllGather
    AllToAll_{X,J}        A[I_X, J] → A[I, J_X]         moves a subscript
    Slice_{X,J}           A[I, J] → A[I, J_X]           each rank keeps its own block: no message

Along an axis of p ranks, with n bytes in the larger of the two blocks, the rank sends n(p−1)/p
bytes, and 2n(p−1)/p for AllReduce. All are rings, along one axis after the other, except AllToAll.
A new subscript is always the innermost, and only the innermost can be removed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count, permutations
from typing import NamedTuple

from torch import Tensor

from parallel101.autograd import all_gather, all_to_all, reduce_scatter
from parallel101.mesh import Group, split_sizes
from parallel101.sharding.notation import Sharding, interval, subscripted

SUM = -1  # in place of a dim: the axes along which an array is partial
# by where a step takes its axes from: its name if they then cut a dim, and if not
OPERATIONS = {None: ("Slice", ""), SUM: ("ReduceScatter", "AllReduce")}
FROM_A_DIM = ("AllToAll", "AllGather")


class ReshardStep(NamedTuple):
    """A collective on one array, or a slice."""

    operation: str  # AllGather, ReduceScatter, AllReduce, AllToAll or Slice
    axes: tuple[str, ...]
    before: Sharding
    after: Sharding
    joined: int | None = None  # the dim that loses the axes
    cut: int | None = None  # the dim that gains them

    @property
    def dim(self) -> int:
        """The dim along which blocks are cut or joined; 0 for AllReduce."""
        return self.joined or 0 if self.cut is None else self.cut

    @property
    def larger(self) -> Sharding:
        """The sharding, before or after the step, of which the blocks are larger."""
        return self.after if self.operation == "AllGather" else self.before

    @property
    def title(self) -> str:
        """The name of the step, such as AllGather_X or ReduceScatter_{X,K}."""
        if self.cut is None:
            return subscripted(self.operation, self.axes)
        axes = subscripted("", self.axes).strip("_{}")
        return f"{self.operation}_{{{axes},{self.before.dims[self.cut]}}}"

    def __str__(self) -> str:
        return f"{self.title} {self.before} → {self.after}"


# ── The possible steps, and the cheapest way


def moves(array: Sharding, wanted: Sharding) -> Iterator[ReshardStep]:
    """Yield each step from this sharding that puts no axis where `wanted` doesn't have it."""
    cut = [(d, axes[k:]) for d, axes in enumerate(array.axes) for k in range(len(axes))]
    lengths = range(1, len(array.partial) + 1)
    added = [(SUM, axes) for k in lengths for axes in permutations(array.partial, k)]
    new = [(None, (axis,)) for axes in wanted.axes for axis in axes if axis not in array.used]
    for source, axes in [*cut, *added, *new]:
        for target in (None, *range(len(array.dims))):
            allowed = axes if target is None else wanted.axes[target]
            if target != source and set(axes) <= set(allowed):
                places = [
                    tuple(axis for axis in old if axis not in axes)
                    for old in (*array.axes, array.partial)
                ]
                if target is not None:
                    places[target] += axes
                after = array._replace(axes=tuple(places[:-1]), partial=places[-1])
                operation = OPERATIONS.get(source, FROM_A_DIM)[target is None]
                joined = None if source == SUM else source
                yield ReshardStep(operation, axes, array, after, joined, target)


def reshard(
    array: Sharding, wanted: Sharding, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> list[ReshardStep] | None:
    """Return the steps to another sharding that send the fewest bytes; None if there is no way.

    Of several ways, it takes the one with the fewest steps. This is Dijkstra's algorithm: a
    sharding is a place, a step leads from one to the next, and its bytes are the distance.
    """
    numbered = count()
    queue: list[tuple[float, int, int, Sharding, list[ReshardStep]]] = [
        (0.0, 0, next(numbered), array, [])
    ]
    done: set[Sharding] = set()
    while queue:
        sent, length, _, here, steps = heappop(queue)
        if here == wanted:
            return steps
        if here not in done:
            done.add(here)
            for step in moves(here, wanted):
                further = round(sent + elements_sent(step, sizes, mesh), 3)
                heappush(queue, (further, length + 1, next(numbered), step.after, [*steps, step]))
    return None


def elements_sent(step: ReshardStep, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> float:
    """Return the elements that a rank would send in a step if all blocks were equal: n(p−1)/p.

    `Transfer.sent` counts them for uneven blocks.
    """
    whole = math.prod(sizes[dim] for dim in step.larger.dims)
    n = whole / math.prod(mesh[axis] for axes in step.larger.axes for axis in axes)
    p = math.prod(mesh[axis] for axis in step.axes)
    return n * (p - 1) / p * {"Slice": 0, "AllReduce": 2}.get(step.operation, 1)


# ── What a step sends, exactly, and how a rank runs it


class Transfer(NamedTuple):
    """A part of a step: a ring along one axis, or an AllToAll along all of the step's axes."""

    collective: str  # all_gather, reduce_scatter or all_to_all
    axes: tuple[str, ...]
    blocks: list[int]  # sizes along the step's dim, by position on the axes
    position: int  # of this rank
    row: int  # elements for each 1 along the step's dim

    @property
    def sent(self) -> int:
        """The elements that this rank sends.

        A rank sends every block but its own, in a ring that gathers all but its right neighbour's.
        """
        kept = self.position + (self.collective == "all_gather")
        return self.row * (sum(self.blocks) - self.blocks[kept % len(self.blocks)])


def transfers(
    step: ReshardStep, sizes: Mapping[str, int], mesh: Mapping[str, int], at: Mapping[str, int]
) -> Iterator[Transfer]:
    """Yield the transfers of a step, in order, on the rank at these coordinates.

    A dim is reduce-scattered along one axis after the other, or gathered in the opposite order. An
    AllReduce does both with its elements in a row.
    """
    shape = [size(part) for part in step.larger.block(sizes, mesh, at)]
    row = math.prod(shape[: step.dim] + shape[step.dim + 1 :])
    n = shape[step.dim]
    if step.operation == "AllReduce":
        n, row = n * row, 1
    if step.operation == "AllToAll":
        position = 0
        for axis in step.axes:
            position = position * mesh[axis] + at[axis]
        yield Transfer("all_to_all", step.axes, parts(n, step.axes, mesh), position, row)
    cut = []
    for k, axis in enumerate(step.axes):
        blocks = split_sizes(size(interval(n, step.axes[:k], mesh, at)), mesh[axis])
        cut.append(((axis,), blocks, at[axis], row))
    if step.operation in ("ReduceScatter", "AllReduce"):
        yield from (Transfer("reduce_scatter", *ring) for ring in cut)
    if step.operation in ("AllGather", "AllReduce"):
        yield from (Transfer("all_gather", *ring) for ring in reversed(cut))


def apply(
    step: ReshardStep,
    x: Tensor,
    group: Group,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    at: Mapping[str, int],
) -> Tensor:
    """Return a rank's block after the step.

    All ranks of the mesh call it, and it is differentiable.

    Args:
        step: the step.
        x: the block of step.before that this rank holds.
        group: the ranks of the mesh, row by row; its shape is the mesh's.
        sizes, mesh: of the whole array's dims, and of the axes.
        at: this rank's coordinates, by axis.
    """
    if step.operation == "Slice":
        own = interval(x.shape[step.dim], step.axes, mesh, at)
        return x.narrow(step.dim, own.start, size(own)).clone()
    y = x.reshape(-1) if step.operation == "AllReduce" else x
    for move in transfers(step, sizes, mesh, at):
        along, blocks = group.along(*(list(mesh).index(axis) for axis in move.axes)), move.blocks
        if move.collective == "all_gather":
            y = all_gather(y, step.dim, group=along, sizes=blocks, algorithm="ring")
        elif move.collective == "reduce_scatter":
            y = reduce_scatter(y, step.dim, group=along, sizes=blocks, algorithm="ring")
        else:
            joined = step.joined or 0
            whole = size(step.after.block(sizes, mesh, at)[joined])
            both = {"split_sizes": blocks, "concat_sizes": parts(whole, move.axes, mesh)}
            y = all_to_all(y, step.dim, joined, group=along, algorithm="pairwise", **both)
    return y.view(x.shape) if step.operation == "AllReduce" else y


def size(part: slice) -> int:
    """Return the number of elements in a slice."""
    return part.stop - part.start


def parts(n: int, axes: tuple[str, ...], mesh: Mapping[str, int]) -> list[int]:
    """Return the sizes of n things split over the axes, one after the other."""
    sizes = [n]
    for axis in axes:
        sizes = [part for size in sizes for part in split_sizes(size, mesh[axis])]
    return sizes
