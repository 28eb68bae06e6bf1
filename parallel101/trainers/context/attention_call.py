"""A call of ring_attention or ulysses_attention: its arguments on all ranks, checked before the
first message, and its spans.

    rank 0   time here 5     ┐ 8 bytes a rank: all know that the whole time is 9
    rank 1   time here 4     ┘ with `sizes=` nothing is sent

    span "attention"            block="K₂ V₂": with keys and values of position 2 of the group
    span "attention backward"   pairs=512: unmasked (query, key) pairs, in all heads and texts

An all-gather of lengths and the waits are spans, too. The messages belong to "ring_attention".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, einsum, inf

from parallel101.collectives import all_gather
from parallel101.collectives.checks import begin, sizes_of, tensor_of
from parallel101.collectives.comm import Comm
from parallel101.collectives.meta_device import numbers_device
from parallel101.mesh import Group
from parallel101.spans import compute, span, wait_span
from parallel101.trainers.context.time_layout import Seen, time_sizes, visible
from parallel101.trainers.expect import expect

SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
BACKWARD = 2.5  # times the forward's seconds: five matrix products a block, and two in the forward


class AttentionCall(NamedTuple):
    """The arguments of a call besides q, k and v, as they were given or as `checked` returns them.

    Attributes: sizes: the time that each position has. seconds_per_pair: on a virtual rank's clock.
    """

    group: Group
    causal: bool
    layout: str
    sizes: Any
    scale: Any
    seconds_per_pair: float

    def visible(self, source: int) -> Seen | None:
        """Return the part of position `source`'s keys that this rank's queries see."""
        assert self.group.position is not None
        return visible(self.group.position, source, self.sizes, self.layout, self.causal)


def begin_ring(x: Tensor, k: Tensor, call: AttentionCall, forward: bool, **alike: Any) -> Comm:
    """Return the Comm for a forward or backward. A checked run compares the ranks' calls."""
    same = {name: getattr(call, name) for name in ("sizes", "causal", "layout", "scale")}
    same |= {"kv_heads": k.shape[1], "direction": "forward" if forward else "backward", **alike}
    return begin("ring_attention", call.group, x, uneven=2, **same)


@contextlib.contextmanager
def computing(
    pairs: int, source: int | None, q: Tensor, call: AttentionCall, *, backward: bool = False
) -> Iterator[None]:
    """Record the block as attention, and let it take its time on a virtual rank's clock.

    Args:
        pairs: unmasked pairs of a query and a key, of one head.
        source: the position whose keys and values these are; None: of all.
        q: gives the batch and the heads.
    """
    pairs *= q.shape[0] * q.shape[1]
    number = "" if source is None else str(source).translate(SUBSCRIPTS)
    labels = {"block": f"K{number} V{number}", "pairs": pairs}  # the first one is in the picture
    with span("attention backward" if backward else "attention", **labels):
        compute(call.seconds_per_pair * pairs * (BACKWARD if backward else 1))
        yield


def without_autocast(method: Callable[..., Any]) -> Any:
    """Let a Function's forward or backward compute in the dtypes that it chooses itself."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        device = next(numbers_device(x.device) for x in args if isinstance(x, Tensor))
        with torch.autocast(device.type, enabled=False):
            return method(*args)

    return run


# ── checks ──


def checked(
    tensors: Sequence[Tensor], call: AttentionCall
) -> tuple[Sequence[Tensor], AttentionCall]:
    """Return q, k and v in one dtype, under autocast in its dtype (as scaled_dot_product_attention
    has them), and the rest of the call.

    Without `sizes` the ranks tell each other their time. Raises TypeError or ValueError.
    """
    for x in tensors:
        tensor_of(x)  # or it raises
    (members, causal, layout, sizes, scale, _), of_ranks = call, list[int]()
    device = numbers_device(tensors[0].device)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        tensors = [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    q, k, v = tensors
    given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in zip("qkv", (q, k, v)))
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if not alike or not q.is_floating_point():
        raise TypeError(
            f"{given}: expected one floating-point dtype, and one device, for all three"
        )
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape and k.shape[1] > 0
    fits = fits and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{given}: expected q (batch, heads, time, d), and k and v (batch, kv heads, time, d), "
            "of this rank's part of the time in all three, and heads that are a multiple of the kv "
            "heads"
        )
    known = isinstance(causal, bool)
    expect("causal", causal, known, "True or False. Other masks aren't supported", TypeError)
    if (position := members.position) is not None:
        if sizes is None:
            with wait_span("lengths"):
                time = torch.tensor([q.shape[2]], device=device)
                sizes = all_gather(time, group=members).tolist()
        of_ranks = sizes_of(sizes, members)
        right, time_here = time_sizes(sum(of_ranks), members.size, layout), q.shape[2]
        if layout == "contiguous":  # any part of the time
            right = of_ranks
        if of_ranks != right or not min(of_ranks) or of_ranks[position] != time_here:
            raise ValueError(
                f"the ranks have {of_ranks} of {sum(of_ranks)} positions, and q of position "
                f"{position} has the shape {tuple(q.shape)}: expected at least one position on "
                f'each rank, in the layout "{layout}" {right}, as p101.context_positions gives them'
            )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return (q, k, v), call._replace(sizes=of_ranks, scale=scale)


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
