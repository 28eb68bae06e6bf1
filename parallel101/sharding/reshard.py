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
from itertools import combinations, count, permutations
from typing import NamedTuple

from torch import Tensor

from parallel101.autograd import all_gather, all_reduce, all_to_all, reduce_scatter
from parallel101.mesh import Group, split_sizes
from parallel101.sharding.notation import Sharding, interval


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
    def title(self) -> str:
        """The name of the step, such as AllGather_X or ReduceScatter_{X,K}."""
        axes = (
            "".join(self.axes) if all(len(axis) == 1 for axis in self.axes) else ",".join(self.axes)
        )
        if self.cut is not None:
            return f"{self.operation}_{{{axes},{self.before.dims[self.cut]}}}"
        return f"{self.operation}_{axes if len(axes) == 1 or ',' not in axes else '{' + axes + '}'}"

    def __str__(self) -> str:
        return f"{self.title} {self.before} → {self.after}"


# ── The possible steps, and the cheapest way


def moves(array: Sharding, wanted: Sharding) -> Iterator[ReshardStep]:
    """Yield each step from this sharding that puts no axis where `wanted` doesn't have it."""
    for d, axes in enumerate(array.axes):
        for k in range(len(axes)):
            kept, removed = axes[:k], axes[k:]
            yield ReshardStep("AllGather", removed, array, array.replace({d: kept}), joined=d)
            for e, there in enumerate(array.axes):
                if e != d and set(removed) <= set(wanted.axes[e]):
                    yield ReshardStep(
                        "AllToAll",
                        removed,
                        array,
                        array.replace({d: kept, e: there + removed}),
                        joined=d,
                        cut=e,
                    )
    for k in range(1, len(array.partial) + 1):
        for reduced in combinations(array.partial, k):
            left = set(array.partial) - set(reduced)
            yield ReshardStep("AllReduce", reduced, array, array.replace({}, left))
            for d, there in enumerate(array.axes):
                if set(reduced) <= set(wanted.axes[d]):
                    for order in permutations(reduced):
                        yield ReshardStep(
                            "ReduceScatter",
                            order,
                            array,
                            array.replace({d: there + order}, left),
                            cut=d,
                        )
    for d, there in enumerate(array.axes):
        for axis in wanted.axes[d]:
            if axis not in array.used:
                yield ReshardStep(
                    "Slice", (axis,), array, array.replace({d: (*there, axis)}), cut=d
                )


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
        if here in done:
            continue
        done.add(here)
        for step in moves(here, wanted):
            if step.after not in done:
                further = round(sent + elements_sent(step, sizes, mesh), 3)
                heappush(queue, (further, length + 1, next(numbered), step.after, [*steps, step]))
    return None


def elements_sent(step: ReshardStep, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> float:
    """Return the elements that a rank would send in a step if all blocks were equal: n(p−1)/p.

    `sent_in` counts them for uneven blocks.
    """
    if step.operation == "Slice":
        return 0.0
    whole = step.after if step.operation == "AllGather" else step.before
    n = math.prod(
        sizes[dim] / math.prod(mesh[axis] for axis in axes)
        for dim, axes in zip(whole.dims, whole.axes)
    )
    p = math.prod(mesh[axis] for axis in step.axes)
    return n * (p - 1) / p * (2 if step.operation == "AllReduce" else 1)


# ── What a step costs, exactly


def rounds(step: ReshardStep, mesh: Mapping[str, int]) -> int:
    """Return the number of messages on the critical path of a step."""
    along = sum(mesh[axis] - 1 for axis in step.axes)
    p = math.prod(mesh[axis] for axis in step.axes)
    return {
        "AllGather": along,
        "ReduceScatter": along,
        "AllReduce": 2 * along,
        "AllToAll": p - 1,
        "Slice": 0,
    }[step.operation]


def rings(
    step: ReshardStep, n: int, mesh: Mapping[str, int], at: Mapping[str, int]
) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield the rings of a step in order: the axis, whether it gathers, and its blocks' sizes.

    n elements are reduce-scattered along one axis after the other, or gathered to n in the opposite
    order; an AllReduce does both.
    """
    cut = [
        (axis, split_sizes(size(interval(n, step.axes[:k], mesh, at)), mesh[axis]))
        for k, axis in enumerate(step.axes)
    ]
    if step.operation in ("ReduceScatter", "AllReduce"):
        yield from ((axis, False, blocks) for axis, blocks in cut)
    if step.operation in ("AllGather", "AllReduce"):
        yield from ((axis, True, blocks) for axis, blocks in reversed(cut))


def whole_of(
    step: ReshardStep, sizes: Mapping[str, int], mesh: Mapping[str, int], at: Mapping[str, int]
) -> list[int]:
    """Return the shape of the larger of the two blocks that a rank has before and after a step."""
    array = step.after if step.operation == "AllGather" else step.before
    return [size(part) for part in array.block(sizes, mesh, at)]


def sent_in(
    step: ReshardStep, sizes: Mapping[str, int], mesh: Mapping[str, int], at: Mapping[str, int]
) -> int:
    """Return the elements that the rank at these coordinates sends in a step."""
    whole = whole_of(step, sizes, mesh, at)
    n, row = math.prod(whole), 1
    if step.operation != "AllReduce":
        n, row = whole[step.dim], math.prod(whole[: step.dim] + whole[step.dim + 1 :])
    if step.operation == "AllToAll":
        return row * (n - size(interval(n, step.axes, mesh, at)))
    # a ring sends every block but one: a reduce-scatter not the rank's own, an all-gather not its
    # right neighbour's
    return row * sum(
        sum(blocks) - blocks[(at[axis] + gathers) % mesh[axis]]
        for axis, gathers, blocks in rings(step, n, mesh, at)
    )


def size(part: slice) -> int:
    """Return the number of elements in a slice."""
    return part.stop - part.start


# ── How a rank runs it


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
    names = list(mesh)

    def along(*axes: str) -> Group:
        return group.along(*(names.index(axis) for axis in axes))

    if step.operation == "Slice":
        own = interval(x.shape[step.dim], step.axes, mesh, at)
        return x.narrow(step.dim, own.start, size(own)).clone()
    if step.operation == "AllToAll":
        joined = step.joined or 0
        whole = interval(sizes[step.before.dims[joined]], step.after.axes[joined], mesh, at)
        return all_to_all(
            x,
            step.dim,
            joined,
            group=along(*step.axes),
            split_sizes=parts(x.shape[step.dim], step.axes, mesh),
            concat_sizes=parts(size(whole), step.axes, mesh),
            algorithm="pairwise",
        )
    if step.operation == "AllReduce" and len(step.axes) == 1:
        return all_reduce(x, group=along(*step.axes), algorithm="ring")
    if step.operation == "AllReduce":
        y, n = x.reshape(-1), x.numel()
    else:
        y, n = x, whole_of(step, sizes, mesh, at)[step.dim]
    for axis, gathers, blocks in rings(step, n, mesh, at):
        if gathers:
            y = all_gather(y, step.dim, group=along(axis), sizes=blocks, algorithm="ring")
        else:
            y = reduce_scatter(y, step.dim, group=along(axis), algorithm="ring")
    return y.view(x.shape) if step.operation == "AllReduce" else y


def parts(n: int, axes: tuple[str, ...], mesh: Mapping[str, int]) -> list[int]:
    """Return the sizes of n things split over the axes, one after the other."""
    sizes = [n]
    for axis in axes:
        sizes = [part for size in sizes for part in split_sizes(size, mesh[axis])]
    return sizes
