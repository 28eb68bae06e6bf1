"""Ulysses: attention over the whole time, for a part of the heads. Two changes of who has what.

    (batch, heads, time here, d)  ──all_to_all──▶  (batch, heads here, time, d)
                                                      │ attention of one process, torch's own
    (batch, heads, time here, d)  ◀──all_to_all──  (batch, heads here, time, d)

Each all-to-all is the other's adjoint, so backward needs no code of its own. Every rank computes as
many pairs as the others, even under a causal mask. The number of ranks must divide the heads of k
and v. cost/closed_forms.py says when ring attention sends less. Source: Jacobs et al.,
"DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel101.autograd import all_to_all
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.context.attention_call import AttentionCall, checked, computing
from parallel101.trainers.context.time_layout import local_positions

HEADS, TIME = 1, 2


def ulysses_attention(
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
    """Return this rank's part of softmax(scale · Q Kᵀ) V over the whole time.

    Every rank calls it, and its backward. Four all-to-alls send q, k, v and the result, and in
    backward their gradients. The arguments, result and errors are those of `ring_attention`. It
    also raises ValueError if the ranks don't divide the heads of q evenly, or those of k and v.
    """
    given = AttentionCall(group_of(group), causal, layout, sizes, scale, seconds_per_pair)
    (q, k, v), call = checked((q, k, v), given)
    if call.group.position is None:
        return q.new_empty(0)
    n, heads, kv_heads = call.group.size, q.shape[HEADS], k.shape[HEADS]
    if heads % n or kv_heads % n:
        raise ValueError(
            f"ulysses_attention: {heads} heads of q and {kv_heads} of k and v over {n} ranks: "
            "expected a number of ranks that divides both. Use fewer ranks, or ring_attention"
        )
    q, k, v = (
        in_order(all_to_all(x, HEADS, TIME, group=call.group, concat_sizes=call.sizes), call)
        for x in (q, k, v)
    )
    time = q.shape[TIME]
    pairs = time * (time + 1) // 2 if call.causal else time * time
    with computing(pairs, None, q, call):
        y = scaled_dot_product_attention(
            q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=heads != kv_heads
        )

    def pass_time(_: Tensor) -> None:
        """Record the backward, before torch computes it."""
        with computing(pairs, None, q, call, backward=True):
            pass

    if y.requires_grad:
        y.register_hook(pass_time)
    if call.layout != "contiguous":
        y = y[:, :, by_rank(call, y.device)]
    return all_to_all(y, TIME, HEADS, group=call.group, split_sizes=call.sizes)


def in_order(x: Tensor, call: AttentionCall) -> Tensor:
    """Sort along time: zigzag's chunks arrive rank by rank."""
    return x if call.layout == "contiguous" else x[:, :, by_rank(call, x.device).argsort()]


def by_rank(call: AttentionCall, device: torch.device) -> Tensor:
    """Return the positions of rank 0, then those of rank 1, and so on."""
    time, n = sum(call.sizes), call.group.size
    return torch.cat([local_positions(time, n, rank, call.layout, device) for rank in range(n)])
