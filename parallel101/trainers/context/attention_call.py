"""A call of context-parallel attention: its arguments on all ranks, and its spans.

    span "attention"            block="K₂ V₂": with keys and values of position 2 of the group
    span "attention backward"   pairs=512: unmasked (query, key) pairs, in all heads and texts

An all-gather of lengths and the waits are spans, too. The messages belong to "ring_attention".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.collectives.checks import begin
from parallel101.collectives.comm import Comm
from parallel101.collectives.meta_device import numbers_device
from parallel101.mesh import Group
from parallel101.spans import compute, span
from parallel101.trainers.context.time_layout import Seen, visible

SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
BACKWARD = 2.5  # times the forward's seconds: five matrix products a block, and two in the forward


class AttentionCall(NamedTuple):
    """The arguments of a call besides q, k and v."""

    group: Group
    sizes: list[int]  # the time that each position has
    causal: bool
    layout: str
    scale: float
    seconds_per_pair: float  # on a virtual rank's clock

    @property
    def takes_part(self) -> bool:
        return self.group.position is not None

    def visible(self, source: int) -> Seen | None:
        """Return the part of position `source`'s keys that this rank's queries see."""
        assert self.group.position is not None
        return visible(self.group.position, source, self.sizes, self.layout, self.causal)


def begin_ring(x: Tensor, k: Tensor, call: AttentionCall, forward: bool, **alike: Any) -> Comm:
    """Return the Comm for a forward or backward. A checked run compares the ranks' calls."""
    return begin(
        "ring_attention",
        call.group,
        x,
        uneven=2,
        sizes=call.sizes,
        kv_heads=k.shape[1],
        causal=call.causal,
        layout=call.layout,
        scale=call.scale,
        direction="forward" if forward else "backward",
        **alike,
    )


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
