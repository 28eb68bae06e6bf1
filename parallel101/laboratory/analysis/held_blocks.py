"""Finds which blocks of each array the ranks of a sharded product held, from the arrays' values.

    rank 0 holds of C[I, K] {U_X}, where C = a₀b₀ + a₁b₁
        [ a₀b₀ ]  →  the block "a", with the terms (1, 0) of its sum

    a block equal to C₁'s upper half:      counts (0, 1, …)   the sum is unfinished
    a block equal to C₀ + 2·C₁ + C₂:       counts (1, 2, 1)   a term was added twice

So a forgotten sum or a wrong dim shows up as it happened. (The origin of values in messages is in
provenance.py, which chooses the values itself.) `laboratory.viz.sharded_product` draws the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.laboratory.record.trace import Trace

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; other floats may have 3 %
RecordedProduct = Any  # a parallel101.sharding.ShardedRun, whose module imports the picture


class HeldRectangle(NamedTuple):
    """A rectangle that a rank holds, in elements of the matrix."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    cell: int | None  # which block of the matrix it is; None: no part of it
    counts: tuple[int, ...] = (1,)  # how often each term of the sum is in it


class BlockColumn(NamedTuple):
    """An array at one moment."""

    title: str  # of the step that made it; "" for what the ranks began with
    array: Any  # its sharding
    state: int  # the number of the state in which the ranks hold it


def columns_of(run: RecordedProduct) -> Iterator[BlockColumn]:
    """Yield the operands, and the array that each step makes."""
    for array in run.plan.operands:
        yield BlockColumn("", array, 0)
    if run.program:
        yield BlockColumn("your program", run.plan.result, 1)
        return
    for number, step in enumerate(run.plan.steps):
        yield BlockColumn(step.title, step.after, number + 1)


def parts_of(run: RecordedProduct, column: BlockColumn, rank: int) -> list[HeldRectangle]:
    """Return the rectangles to draw for the part of an array that a rank holds."""
    plan, at = run.plan, list(run.plan.coordinates())[rank]
    block = run.held[rank][column.state].get(column.array.name)
    last = column.array.name == plan.result.name and column.state == len(run.held[rank]) - 1
    if not isinstance(block, Tensor):
        return []
    terms = terms_of(run, column.array)
    cuts = cuts_of(run, column.array.name)
    for array in [column.array, *([run.found] if last and run.found is not None else [])]:
        region = array.block(plan.sizes, plan.mesh, at)
        expected = [
            int(all(coordinates.get(axis, at[axis]) == at[axis] for axis in array.partial))
            for coordinates, _ in terms
        ]
        counts = term_counts(block, [term[region] for _, term in terms], expected)
        if counts is not None:
            rows, columns = region if len(region) == 2 else (slice(0, 1), region[0])
            return [
                HeldRectangle((top, bottom), (left, right), cell_of(cuts, top, left), counts)
                for top, bottom in pairwise(within(cuts[0], rows))
                for left, right in pairwise(within(cuts[1], columns))
            ]
    if block.dim() not in (1, 2):
        return []
    height, width = (1, *block.shape)[-2:]
    return [HeldRectangle((0, height), (0, width), None)]


def terms_of(run: RecordedProduct, array: Any) -> list[tuple[dict[str, int], Tensor]]:
    """Return the terms of the sum that an array is.

    Each is (the coordinates of the ranks that compute it, the term, as large as the whole array).
    """
    plan = run.plan
    for operand, whole in zip(plan.operands, run.operands):
        if operand.name == array.name:
            if not operand.partial:
                return [({}, whole)]
            ways = [
                dict(zip(operand.partial, coordinates))
                for coordinates in product(*(range(plan.mesh[axis]) for axis in operand.partial))
            ]
            # as `plan.shard` makes them
            return [(at, whole if not any(at.values()) else whole * 0) for at in ways]
    products = [(step.a, step.b) for step in plan.steps if hasattr(step, "b")]
    a, b = plan.operands if run.program or not products else products[0]
    summed = {
        dim: tuple(dict.fromkeys((*axes, *b.axes[b.dims.index(dim)])))
        for dim, axes in zip(a.dims, a.axes)
        if dim in b.dims and dim not in plan.result.dims
    }
    axes = list(dict.fromkeys(axis for of_dim in summed.values() for axis in of_dim))
    pieces = a._replace(axes=tuple(summed.get(dim, ()) for dim in a.dims))
    terms = []
    for coordinates in product(*(range(plan.mesh[axis]) for axis in axes)):
        at = dict(zip(axes, coordinates))
        piece, part = torch.zeros_like(run.operands[0]), pieces.block(plan.sizes, plan.mesh, at)
        piece[part] = run.operands[0][part]
        terms.append((at, plan.product(piece, run.operands[1])))
    return terms


def cuts_of(run: RecordedProduct, name: str) -> tuple[list[int], list[int]]:
    """Return where the rows and the columns of a matrix are cut, in any of its shardings.

    The blocks are between these places.
    """
    plan = run.plan
    shardings = [column.array for column in columns_of(run) if column.array.name == name]
    if run.program and name == plan.result.name:
        of_dim = {dim: axes for array in plan.operands for dim, axes in zip(array.dims, array.axes)}
        # of the blocks' product
        shardings.append(plan.result._replace(axes=tuple(of_dim[d] for d in plan.result.dims)))
        shardings += [] if run.found is None else [run.found]
    cuts: list[set[int]] = [{0, plan.sizes[dim]} for dim in shardings[0].dims]
    for array in shardings:
        for at in plan.coordinates():
            for cut, part in zip(cuts, array.block(plan.sizes, plan.mesh, at)):
                cut |= {part.start, part.stop}
    rows, columns = [sorted(cut) for cut in cuts] if len(cuts) == 2 else ([0, 1], sorted(cuts[0]))
    return rows, columns


def cell_of(cuts: tuple[list[int], list[int]], row: int, column: int) -> int:
    """Return the number of the block with this element, row by row."""
    down, across = (sum(cut <= i for cut in of_dim) - 1 for of_dim, i in zip(cuts, (row, column)))
    return down * (len(cuts[1]) - 1) + across


def within(cuts: Sequence[int], part: slice) -> list[int]:
    return [cut for cut in cuts if part.start <= cut <= part.stop]


def bytes_by_step(trace: Trace) -> dict[int, int]:
    """Return, by number of the step, the bytes of the rank that sent most in it.

    The plan's steps are spans that carry the name of an array.
    """
    trace.need_all_events("The bytes of each step")
    spans = [
        [e for e in trace.spans() if e.rank == rank and "array" in (e.args or {})]
        for rank in range(trace.world_size)
    ]
    sent: dict[tuple[int, int], int] = {}
    for event in trace.events:
        if event.kind == "send":
            # the span that began last
            number = sum(span.start <= event.posted for span in spans[event.rank]) - 1
            if number >= 0:
                sent[number, event.rank] = sent.get((number, event.rank), 0) + event.nbytes
    return {
        number: max(sent.get((number, rank), 0) for rank in range(trace.world_size))
        for number in range(len(spans[0]))
    }


# ── Which terms of its sum a block holds


def term_counts(
    block: Tensor, terms: Sequence[Tensor], expected: Sequence[int]
) -> tuple[int, ...] | None:
    """Return how often each term is in the block; None if it isn't a sum of them.

    Args:
        block: on one rank.
        terms: the same part of each term of the sum.
        expected: the counts to try first. For values that don't distinguish the terms, such as
            ones, they are the answer if they fit.
    """
    if any(block.shape != term.shape for term in terms):
        return None
    stacked = torch.stack([term.detach().double().flatten() for term in terms], 1)
    values, dtype = block.detach().double().flatten(), terms[0].dtype

    def fits(counts: Sequence[int]) -> bool:
        """Return whether the block and this sum differ by rounding only."""
        found, summed = values.to(dtype), (stacked @ stacked.new_tensor(list(counts))).to(dtype)
        if not dtype.is_floating_point:
            return torch.equal(found, summed)
        largest = max(summed.abs().max().item(), 1e-300) if summed.numel() else 1.0
        bound = ROUNDING.get(dtype, 3e-2) * largest
        return torch.allclose(found.double(), summed.double(), rtol=0, atol=bound)

    if fits(expected):
        return tuple(expected)
    solved = torch.linalg.lstsq(stacked, values[:, None], driver="gelsd").solution
    counts = tuple(round(count) for count in solved[:, 0].tolist())
    return counts if min(counts) >= 0 and fits(counts) else None
