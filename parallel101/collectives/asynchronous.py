"""Collectives that begin now and finish later: a rank computes while messages are in flight.

    total = all_reduce_async(gradient)   sends each block to its owner          ┐ meanwhile: compute
    total.advance()                      waits, adds, sends each sum to all     ┘ meanwhile: compute
    total = total.wait()                 waits for the rest

Each is the generator of a "direct" algorithm, which yields when it has posted messages and can only
wait for them. Nothing runs in the background: between two calls of `advance` messages travel, but
no sums are computed. The results have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel101.collectives.all_gather import direct_steps as direct_all_gather
from parallel101.collectives.blocks import Blocks, row_of
from parallel101.collectives.checks import (
    Sizes,
    begin,
    block_sizes,
    nothing,
    shard_sizes,
    tensor_of,
)
from parallel101.collectives.comm import Comm
from parallel101.collectives.meta_device import same_memory
from parallel101.collectives.reduce_scatter import direct_steps as direct_reduce_scatter
from parallel101.collectives.reductions import Reduction, reduction_of
from parallel101.mesh import GroupLike, group_of


class AsyncCollective:
    """A collective that has begun. `wait` returns its result.

    All ranks must begin and advance theirs in the same order, since messages between two ranks are
    matched in the order of posting.
    """

    def __init__(self, steps: Iterator[None], result: Tensor):
        self._steps, self._result, self.done = steps, result, False
        self.advance()

    def advance(self) -> bool:
        """Wait for the messages posted last and post the next ones.

        Returns True if the result is complete.
        """
        self.done = self.done or next(self._steps, "done") == "done"
        return self.done

    def wait(self) -> Tensor:
        """Take all remaining steps and return the result.

        Before that, read and change neither the result nor the input.
        """
        while not self.advance():
            pass
        return self._result


class SideBySide:
    """Several collectives that have begun and take each further step together."""

    def __init__(self, each: Sequence[AsyncCollective]):
        self._each = each

    def advance(self) -> bool:
        """Advance each collective. Returns True if all results are complete."""
        done = [one.advance() for one in self._each]  # all of them, before the answer
        return all(done)

    def wait(self) -> list[Tensor]:
        """Take all remaining steps and return the results."""
        while not self.advance():
            pass
        return [one.wait() for one in self._each]


def all_reduce_async(
    x: Tensor,
    op: str = "sum",
    *,
    group: GroupLike = None,
    sizes: Sizes = None,
    out: Tensor | None = None,
) -> AsyncCollective:
    """Begin an `all_reduce`, which has two steps. Each rank sends 2n(p−1)/p bytes, where x has n.

    The result has no gradient.

    Args:
        x: this rank's array, contiguous, of the same shape and dtype on every rank. Do not change
            it before the result is complete.
        op, group: as in `all_reduce`.
        sizes: how many elements of x, flattened, each rank adds up and sends to all. None: as even
            a split as possible.
        out: the tensor for the result, contiguous and like x; x itself for an all-reduce in place.
            None: a new tensor.

    Raises ValueError or TypeError for wrong arguments, before any message.
    """
    x, reduction, members = contiguous(x, "x"), reduction_of(op, x), group_of(group)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    result, sizes = result_in(out, x, x.shape), block_sizes(x.view(-1), 0, sizes, members)
    comm = begin("all_reduce_async", members, x, op=op, sizes=sizes)
    if comm.size == 1:
        return AsyncCollective(iter(()), result.copy_(x))
    blocks, sums = Blocks(x.view(-1), sizes), Blocks(result.view(-1), sizes)

    def steps() -> Iterator[None]:
        """Add up this rank's block and send the sum to all. `sums` may be `blocks`."""
        yield from _reduce_scatter_steps(blocks, sums[comm.rank], reduction, comm)
        yield from direct_all_gather(sums, comm)

    return AsyncCollective(steps(), result)


def reduce_scatter_async(
    x: Tensor,
    op: str = "sum",
    *,
    group: GroupLike = None,
    sizes: Sizes = None,
    out: Tensor | None = None,
) -> AsyncCollective:
    """Begin a `reduce_scatter` along dim 0, which has one step.

    Each rank sends n(p−1)/p bytes, where x has n. The result has no gradient.

    Args:
        x: this rank's array, contiguous, of the same shape and dtype on every rank. Do not change
            it before the result is complete.
        op, group, sizes: as in `reduce_scatter`.
        out: the tensor for this rank's block of the result, contiguous; it may be that block of x.
            None: a new tensor.

    Raises ValueError or TypeError for wrong arguments, before any message.
    """
    x, reduction, members = contiguous(x, "x"), reduction_of(op, x), group_of(group)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    sizes = block_sizes(x, 0, sizes, members)
    result = result_in(out, x, (sizes[members.position], *x.shape[1:]))
    comm = begin("reduce_scatter_async", members, x, op=op, sizes=sizes)
    if comm.size == 1:
        return AsyncCollective(iter(()), result.copy_(x))
    row = row_of(x, 0)
    blocks = Blocks(x.view(-1), [size * row for size in sizes])
    return AsyncCollective(_reduce_scatter_steps(blocks, result.view(-1), reduction, comm), result)


def all_gather_async(
    x: Tensor,
    *,
    group: GroupLike = None,
    sizes: Sizes = None,
    out: Tensor | None = None,
) -> AsyncCollective:
    """Begin an `all_gather` along dim 0, which has one step.

    Each rank sends n(p−1)/p bytes, where the result has n. The result has no gradient.

    Args:
        x: this rank's shard, contiguous. It is copied into the result at once, unless it is already
            a part of it.
        group, sizes: as in `all_gather`.
        out: the tensor for the result, contiguous; x may be this rank's block of it. None: a new
            tensor.

    Raises ValueError or TypeError for wrong arguments, before any message.
    """
    x, members = contiguous(x, "x"), group_of(group)
    sizes = shard_sizes(x, 0, sizes, members)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    result = result_in(out, x, (sum(sizes), *x.shape[1:]))
    comm = begin("all_gather_async", members, x, uneven=0, sizes=sizes)
    row = row_of(x, 0)
    blocks = Blocks(result.view(-1), [size * row for size in sizes])
    mine = blocks[comm.rank]
    if not same_memory(mine, x):
        mine.copy_(x.view(-1))
    return AsyncCollective(direct_all_gather(blocks, comm), result)


def _reduce_scatter_steps(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> Iterator[None]:
    yield from direct_reduce_scatter(blocks, out, op, comm)
    op.finish(out, comm.size)


def contiguous(x: Tensor, name: str) -> Tensor:
    """Return x without its graph, if a message can be sent from its memory as it is.

    Raises ValueError if that would need a copy.
    """
    values = tensor_of(x)
    if x.dim() == 0 or not x.is_contiguous() or not same_memory(values, x):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}: expected a contiguous "
            "tensor of one dim or more, not lazily conjugated or negated. Call "
            f"{name}.resolve_conj().resolve_neg().contiguous() or {name}.reshape(1)."
        )
    return values


def result_in(out: Tensor | None, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`, or a new tensor.

    Raises ValueError if `out` doesn't fit a result of this shape.
    """
    if out is None:
        return x.new_empty(shape)
    result = contiguous(out, "out")
    if out.shape != torch.Size(shape) or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}: expected "
            f"{x.dtype} of shape {tuple(shape)} on {x.device}"
        )
    return result
