"""Ring attention: each rank has a part of the time. Queries stay, keys and values go round.

    ┌──▶ Q₀ O₀ ── K₀ V₀ ──▶ Q₁ O₁ ── K₁ V₁ ──▶ Q₂ O₂ ── K₂ V₂ ──▶ Q₃ O₃ ──┐
    └──────────────────────────────────────────────────────────── K₃ V₃ ──┘

The blocks that a rank computes, step after step; the number says whose keys. A causal mask leaves a
triangle (◣) of a rank's own block, and in the contiguous layout nothing (.) of later ranks' blocks.
In zigzag each rank has an early and a late chunk of the time, and half (½) of every other block is
left.

    contiguous   rank 0   ◣0  .   .   .          zigzag   rank 0   ◣0  ½3  ½2  ½1
                 rank 1   ◣1  ■0  .   .                   rank 1   ◣1  ½0  ½3  ½2
                 rank 2   ◣2  ■1  ■0  .                   rank 2   ◣2  ½1  ½0  ½3
                 rank 3   ◣3  ■2  ■1  ■0                  rank 3   ◣3  ½2  ½1  ½0

Sources: Liu et al., "Ring Attention" (arXiv 2310.01889). Brandon et al., "Striped Attention"
(2311.09431), balance it by dealing out positions one by one. Zigzag's chunks are those of Llama 3
(2407.21783, section 3.3.2), which gathers all keys and values instead of passing them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel101.collectives.comm import Comm, wait_all
from parallel101.mesh import GroupLike, group_of
from parallel101.spans import wait_span
from parallel101.trainers.context.attention_call import (
    AttentionCall,
    attend,
    attend_backward,
    begin_ring,
    by_kv_head,
    checked,
    computing,
)
from parallel101.trainers.context.attention_call import without_autocast as exact


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike = None,
    causal: bool = True,
    layout: str = "contiguous",
    sizes: Sequence[int] | None = None,
    scale: float | None = None,
    seconds_per_pair: float = 0.0,
) -> Tensor:
    """Return softmax(scale · Q Kᵀ) V over the whole time, for this rank's queries.

    Every rank of n calls it, and its backward: it passes on n − 1 blocks, and 2n − 1 in backward.

    Args:
        q: (batch, heads, this rank's part of the time, d).
        k, v: (batch, kv heads, the same time, d). Their heads divide those of q.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.
        causal: whether each position sees only itself and those before it, else all.
        layout: "contiguous" or "zigzag": which positions are here. See `p101.context_positions`.
        sizes: the time of each rank. None: the ranks tell each other, 8 bytes each.
        scale: of the scores, by default 1/√d.
        seconds_per_pair: of a query and a key in one head, on a virtual rank's clock.

    Returns a tensor like q, differentiable once. Raises TypeError or ValueError for wrong calls.
    """
    given = AttentionCall(group_of(group), causal, layout, sizes, scale, seconds_per_pair)
    (q, k, v), call = checked((q, k, v), given)
    return q.new_empty(0) if call.group.position is None else RingAttention.apply(q, k, v, call)


class RingAttention(Function):
    @staticmethod
    @exact
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        comm = begin_ring(q, k, call, forward=True, requires_grad=any(ctx.needs_input_grad))
        wide = torch.promote_types(q.dtype, torch.float32)  # in which sums are kept
        y = torch.zeros_like(q, dtype=wide)
        queries, out = (by_kv_head(x, k.shape[1]) for x in (q.to(wide) * call.scale, y))
        lse = out.new_full(out.shape[:-1], -torch.inf)  # log Σ exp(scores), of no keys yet
        for source, kv in go_round(torch.stack((k, v)), call, comm):
            if seen := call.visible(source):
                rows, columns, diagonal, pairs = seen
                with computing(pairs, source, q, call):
                    keys, values = kv[..., columns, :].to(wide)
                    block = attend(queries[..., rows, :], keys, values, causal=diagonal)
                    merge(out[..., rows, :], lse[..., rows], *block)
        ctx.call, y = call, y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    @exact
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, y, lse), call = ctx.saved_tensors, ctx.call
        comm = begin_ring(dy, k, call, forward=False)
        queries, do, out = (by_kv_head(x.to(lse.dtype), k.shape[1]) for x in (q, dy, y))
        dq, delta, lse = torch.zeros_like(queries), (do * out).sum(-1, True), lse[..., None]
        queries = queries * call.scale
        returning: Callable[[str], Tensor] | None = None
        for source, kv in go_round(torch.stack((k, v)), call, comm):
            dkv = torch.zeros_like(kv, dtype=lse.dtype)  # what this rank's queries add to it
            if seen := call.visible(source):
                rows, columns, diagonal, pairs = seen
                with computing(pairs, source, q, call, backward=True):
                    keys, values = kv[..., columns, :].to(lse.dtype)
                    of_rows = [x[..., rows, :] for x in (queries, do, delta, lse)]
                    block = attend_backward(keys, values, *of_rows, causal=diagonal)
                    dq[..., rows, :] += block[0]
                    dkv[..., columns, :] = torch.stack(block[1:])
            if returning:  # what the ranks before have found for the same keys
                dkv += returning("wait for gradients")
            returning = pass_on(dkv, source, call.sizes, comm)
        assert returning is not None
        dk, dv = returning("wait for gradients").to(q.dtype)  # back after n steps
        return (dq * call.scale).flatten(1, 2).to(q.dtype), dk, dv, None


def go_round(kv: Tensor, call: AttentionCall, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's keys and values, and whose they are, this rank's own first."""
    for step in range(comm.size):
        source, last = (comm.rank - step) % comm.size, step == comm.size - 1
        if not last:
            arriving = pass_on(kv, source, call.sizes, comm)  # the next ones are in flight …
        yield source, kv  # … while the caller computes with these
        if not last:
            kv = arriving("wait for keys and values")


def pass_on(block: Tensor, source: int, sizes: list[int], comm: Comm) -> Callable[[str], Tensor]:
    """Begin to pass on a block about the time of `source`. That of the rank before it arrives.

    Returns a function that waits for it, recorded under a name. The block must not be changed
    before.
    """
    if comm.size == 1:
        return lambda why: block
    arriving = block.new_empty(*block.shape[:-2], sizes[source - 1], block.shape[-1])
    received = comm.irecv(arriving, source=(comm.rank - 1) % comm.size)
    sent = comm.isend(block, to=(comm.rank + 1) % comm.size)
    comm.flush()  # under NCCL's rules the two start together, now

    def wait(why: str) -> Tensor:
        with wait_span(why):
            wait_all([received, sent])
        return arriving

    return wait


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add the attention to more keys to `out` and `lse`, each weighed by its sum of exp."""
    total = torch.logaddexp(lse, block_lse)
    old, new = ((x - total).exp()[..., None] for x in (lse, block_lse))
    out.mul_(old).add_(new * block_out)
    lse.copy_(total)
