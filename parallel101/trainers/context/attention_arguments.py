"""The checks of a call of ring_attention or ulysses_attention, before its first message.

    rank 0   time here 5     ┐ 8 bytes a rank: all know that the whole time is 9
    rank 1   time here 4     ┘

With `sizes=` nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel101.collectives import all_gather
from parallel101.collectives.checks import sizes_of, tensor_of
from parallel101.collectives.meta_device import numbers_device
from parallel101.mesh import GroupLike, group_of
from parallel101.spans import wait_span
from parallel101.trainers.context.attention_call import AttentionCall
from parallel101.trainers.context.time_layout import check_layout, time_sizes


def checked(
    tensors: Sequence[Tensor],
    group: GroupLike,
    causal: bool,
    layout: str,
    sizes: Sequence[int] | None,
    scale: float | None,
    seconds_per_pair: float,
) -> tuple[Sequence[Tensor], AttentionCall]:
    """Return q, k and v in one dtype, and the rest of the call.

    Without `sizes` the ranks tell each other their time. Raises TypeError or ValueError.
    """
    members, tensors = group_of(group), in_one_dtype(tensors)
    check_tensors(*tensors)
    if not isinstance(causal, bool):
        raise TypeError(f"causal={causal!r}: expected True or False. Other masks aren't supported")
    q = tensors[0]
    if members.position is not None:
        if sizes is None:
            time = torch.tensor([q.shape[2]], device=numbers_device(q.device))
            with wait_span("lengths"):
                sizes = all_gather(time, group=members).tolist()
        sizes = sizes_of(sizes, members)
        check_sizes(sizes, layout, q, members.position)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return tensors, AttentionCall(
        members, list(sizes or ()), causal, layout, scale, seconds_per_pair
    )


def in_one_dtype(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return q, k and v, under autocast in its dtype, as scaled_dot_product_attention has them."""
    for name, x in zip("qkv", tensors):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a tensor")
        tensor_of(x)
    device = numbers_device(tensors[0].device).type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
    return tensors


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError unless q, k and v fit each other."""
    given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in zip("qkv", (q, k, v)))
    shapes = (
        f"{given}: expected q (batch, heads, time, d), and k and v (batch, kv heads, time, d), of "
        "this rank's part of the time in all three"
    )
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if not alike or not q.is_floating_point():
        raise TypeError(
            f"{given}: expected one floating-point dtype, and one device, for all three"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(shapes)
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or k.shape != v.shape:
        raise ValueError(shapes)
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{given}: {q.shape[1]} heads of q aren't a multiple of the {k.shape[1]} heads of k: "
            "expected the same number of heads of q for each head of k and v"
        )


def check_sizes(sizes: list[int], layout: str, q: Tensor, position: int) -> None:
    """Raise ValueError unless each rank has its part of the time: any part, if contiguous."""
    check_layout(layout, sum(sizes), len(sizes))
    if sizes[position] != q.shape[2]:
        raise ValueError(
            f"sizes={sizes} gives position {position} a time of {sizes[position]}, but its q has "
            f"shape {tuple(q.shape)}"
        )
    if not min(sizes):
        raise ValueError(f"the ranks have {sizes} positions: expected at least one on each rank")
    expected = time_sizes(sum(sizes), len(sizes), layout)
    if layout == "zigzag" and sizes != expected:
        raise ValueError(
            f"the ranks have {sizes} of {sum(sizes)} positions: expected {expected} in the "
            f'"{layout}" layout. p101.context_positions({sum(sizes)}, layout="{layout}") gives the '
            "positions of each rank"
        )
