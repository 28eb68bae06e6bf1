"""Attention of some queries to some keys, and its gradients: plain products, one after the other.

    S = Q Kᵀ      lse = log Σ exp(S)      P = exp(S − lse)      O = P V
    ∂V = Pᵀ ∂O      ∂S = P ∘ (∂O Vᵀ − rowsum(∂O ∘ O))      ∂Q = ∂S K      ∂K = ∂Sᵀ Q

Q is scaled before. With the lse and O of all keys, the second line is right for any block of keys:
so ring attention can compute gradients block by block. Sources: Dao et al., "FlashAttention" (arXiv
2205.14135), algorithms 1 and 4; Dao, "FlashAttention-2" (2307.08691), which keeps the lse, not a
maximum and a sum. Unlike those, this keeps a block's S and P whole.
"""

from __future__ import annotations

from torch import Tensor, einsum, inf


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """View (batch, heads, …) as (batch, kv heads, heads of each, …), in the same memory."""
    return x.unflatten(1, (kv_heads, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention to these keys only, and its lse.

    Args:
        q: (batch, kv heads, heads of each, queries, d), scaled.
        k, v: (batch, kv heads, keys, d).
        causal: whether query i sees the keys 0 to i only.
    """
    s = scores(q, k, causal)
    lse = s.logsumexp(-1)
    p = s.sub_(lse[..., None]).exp_()
    return einsum("bgrqk,bgkd->bgrqd", p, v), lse


def attend_backward(
    k: Tensor, v: Tensor, q: Tensor, do: Tensor, delta: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' contribution to ∂Q, and these queries' contributions to ∂K and ∂V.

    Args:
        q, k, v, causal: as in `attend`.
        do: the gradient of these queries' output.
        delta: rowsum(∂O ∘ O) of the attention to all keys, (…, queries, 1).
        lse: of all keys, too, and of the same shape.
    """
    p = scores(q, k, causal).sub_(lse).exp_()
    dv = einsum("bgrqk,bgrqd->bgkd", p, do)
    ds = einsum("bgrqd,bgkd->bgrqk", do, v).sub_(delta).mul_(p)
    dq = einsum("bgrqk,bgkd->bgrqd", ds, k)
    dk = einsum("bgrqk,bgrqd->bgkd", ds, q)
    return dq, dk, dv


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return S, (batch, kv heads, heads of each, queries, keys), with −∞ for later keys."""
    s = einsum("bgrqd,bgkd->bgrqk", q, k)
    later = s.new_ones(s.shape[-2:]).triu(1).bool() if causal else None
    return s if later is None else s.masked_fill_(later, -inf)
