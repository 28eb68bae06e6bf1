"""Collectives that are begun now and finished later, so that a rank computes while its bytes are on their way.

    total = all_reduce_async(gradient)      posts: each block to its owner                 ┐ meanwhile: compute
    total.advance()                   waits, adds, posts: each sum to everyone       ┘ meanwhile: compute
    total = total.wait()              waits for the rest

Each is a generator over isend and irecv that stops (`yield`) wherever messages have been posted and nothing is left but to wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel101.collectives.blocks import Blocks, even_blocks, row_of
from parallel101.collectives.checks import cut_sizes, nothing, shard_sizes, tensor_of
from parallel101.collectives.comm import Comm, comm_of, wait_all
from parallel101.collectives.reductions import Reduction, reduction_of
from parallel101.mesh import GroupLike, group_of, split_sizes

Parts = Iterator[None]


def reduce_scatter_parts(blocks: Blocks, out: Tensor, op: Reduction, comm: Comm) -> Parts:
    """Everyone sends each block straight to its owner, who adds them up. `out` may be the rank's own block."""
    p, rank, arriving, sent = comm.size, comm.rank, [], []
    for step in range(1, p):
        source, to = (rank - step) % p, (rank + step) % p
        inbox = torch.empty_like(out)
        arriving.append((comm.irecv(inbox, source), inbox))
        sent.append(comm.isend(blocks[to], to))
    yield from under_way(comm)
    total = blocks[rank] if p > 1 else out.copy_(blocks[rank])
    for received, inbox in arriving:  # in this order, whichever is here first: the same bits in every run
        received.wait()
        total = op(total, inbox, out=out)
    op.finish(out, p)
    wait_all(sent)


def all_gather_parts(blocks: Blocks, comm: Comm) -> Parts:
    """Everyone sends its block to everyone."""
    p, rank, works = comm.size, comm.rank, []
    for step in range(1, p):
        source, to = (rank - step) % p, (rank + step) % p
        works += [comm.irecv(blocks[source], source), comm.isend(blocks[rank], to)]
    yield from under_way(comm)
    wait_all(works)


def all_reduce_parts(blocks: Blocks, result: Blocks, op: Reduction, comm: Comm) -> Parts:
    """Each rank adds up one block, then tells everyone: 2n(p−1)/p bytes. `result` may be `blocks` itself."""
    yield from reduce_scatter_parts(blocks, result[comm.rank], op, comm)
    yield from all_gather_parts(result, comm)


def under_way(comm: Comm) -> Parts:
    """Here a rank may go and compute. Messages that leave in batches (see comm.py) leave now, and not at the first wait."""
    comm.flush()
    yield


class AsyncCollective:
    """A collective that has begun.

    All ranks must begin and advance theirs in the same order: between two ranks the first send meets the first receive.
    """

    def __init__(self, parts: Parts, result: Tensor):
        self._parts, self._result, self.done = parts, result, False
        self.advance()

    def advance(self) -> bool:
        """Wait for what was posted last, and post what comes next; True when there is nothing more to come."""
        self.done = self.done or next(self._parts, "done") == "done"
        return self.done

    def wait(self) -> Tensor:
        """Do all that is left, and give the result. Until then neither it nor what was sent may be read or changed."""
        while not self.advance():
            pass
        return self._result


def all_reduce_async(x: Tensor, op: str = "sum", *, group: GroupLike = None, out: Tensor | None = None) -> AsyncCollective:
    """Begin what `parallel101.collectives.all_reduce` does: two parts, 2n(p−1)/p bytes of n sent by each rank.

    Args:
        x: this rank's array, contiguous; leave it alone until the result is there.
        op, group: as there. An idle rank gets a zero-volume tensor and sends nothing.
        out: where the result goes, contiguous and like x; x itself for in place. None: a new tensor.

    Raises ValueError or TypeError, before any message, for what does not fit.
    """
    x, reduction, members = packed(x), reduction_of(op, x), group_of(group)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    comm = comm_of(members, x.device, "all_reduce_async")
    result = room(out, x, x.shape)
    return AsyncCollective(
        all_reduce_parts(even_blocks(x.view(-1), comm.size), even_blocks(result.view(-1), comm.size), reduction, comm), result
    )


def reduce_scatter_async(
    x: Tensor, op: str = "sum", *, group: GroupLike = None, sizes: Sequence[int] | None = None, out: Tensor | None = None
) -> AsyncCollective:
    """Begin what `parallel101.collectives.reduce_scatter` does along dim 0: one part, n(p−1)/p bytes sent by each rank.

    Args:
        x: this rank's array, contiguous; leave it alone until the result is there.
        op, group, sizes: as there.
        out: where this rank's block of the result goes, contiguous; it may be that block of x. None: a new tensor.

    Raises ValueError or TypeError, before any message, for what does not fit.
    """
    x, reduction, members = packed(x), reduction_of(op, x), group_of(group)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    comm = comm_of(members, x.device, "reduce_scatter_async")
    sizes = cut_sizes(x, 0, split_sizes(x.shape[0], comm.size) if sizes is None else sizes, members)
    result = room(out, x, (sizes[comm.rank], *x.shape[1:]))
    blocks = Blocks(x.view(-1), [size * row_of(x, 0) for size in sizes])
    return AsyncCollective(reduce_scatter_parts(blocks, result.view(-1), reduction, comm), result)


def all_gather_async(
    x: Tensor, *, group: GroupLike = None, sizes: Sequence[int] | None = None, out: Tensor | None = None
) -> AsyncCollective:
    """Begin what `parallel101.collectives.all_gather` does along dim 0: one part, n(p−1)/p bytes of the result sent by each rank.

    Args:
        x: this rank's shard, contiguous; it is copied into the result at once, unless it lies there already.
        group, sizes: as there.
        out: where the result goes, contiguous; x may be this rank's block of it. None: a new tensor.

    Raises ValueError or TypeError, before any message, for what does not fit.
    """
    x, members = packed(x), group_of(group)
    sizes = shard_sizes(x, 0, sizes, members)
    if members.position is None:
        return AsyncCollective(iter(()), nothing(x))
    comm = comm_of(members, x.device, "all_gather_async")
    result = room(out, x, (sum(sizes), *x.shape[1:]))
    blocks = Blocks(result.view(-1), [size * row_of(x, 0) for size in sizes])
    mine = blocks[comm.rank]
    if mine.data_ptr() != x.data_ptr():
        mine.copy_(x.view(-1))
    return AsyncCollective(all_gather_parts(blocks, comm), result)


def packed(x: Tensor) -> Tensor:
    """x without its graph, if it can be sent as it lies. Raises ValueError otherwise: a copy would hide what x becomes meanwhile."""
    x = as_it_lies(x, "x")
    if x.dim() == 0 or not x.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}: expected a contiguous tensor of one dim or more")
    return x


def as_it_lies(x: Tensor, name: str) -> Tensor:
    """x without its graph. Raises ValueError where that is a copy, because its memory holds the conjugate or the negative of its values."""
    values = tensor_of(x)
    if values.data_ptr() != x.data_ptr():
        raise ValueError(f"{name} is lazily conjugated or negated: expected what {name}.resolve_conj().resolve_neg() gives")
    return values


def room(out: Tensor | None, x: Tensor, shape: Sequence[int]) -> Tensor:
    """`out` if a result of this shape fits into it, or fresh memory."""
    if out is None:
        return x.new_empty(shape)
    out = as_it_lies(out, "out")
    if out.shape != torch.Size(shape) or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)}, strides {out.stride()}, on {out.device}: "
            f"expected contiguous {x.dtype} of shape {tuple(shape)} on {x.device}"
        )
    return out
