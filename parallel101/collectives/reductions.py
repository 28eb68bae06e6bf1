"""How values meet: sum, mean, product, max and min, each one function of two tensors and, for the mean, one division at the end.

    op(a, b, out=c)        c = a + b, element by element, rounded to the tensor's own dtype at each step (as torch's backends do)
    op.finish(c, p)        the mean divides once, when all p values are in it

The dtype decides what has a meaning: bool has max (any) and min (all); integers have no mean; complex numbers have no max and min.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reduction(NamedTuple):
    name: str
    combine: Callable[..., Any]

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """a and b combined, in `out`, which may be one of them."""
        return self.combine(a, b, out=out)

    def finish(self, total: Tensor, count: int) -> Tensor:
        """What the combined values of `count` ranks still need, in place; each element of a result is finished once."""
        return total.div_(count) if self.name == "mean" else total


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("sum", torch.add),
        Reduction("mean", torch.add),
        Reduction("product", torch.mul),
        Reduction("max", torch.maximum),
        Reduction("min", torch.minimum),
    )
}


def reduction_of(op: str, x: Tensor) -> Reduction:
    """The reduction called `op`. Raises ValueError for an unknown one, TypeError where it has no meaning for x's dtype."""
    reduction = REDUCTIONS.get(op) if isinstance(op, str) else None
    if reduction is None:
        raise ValueError(f"op={op!r} is unknown: expected one of {', '.join(map(repr, REDUCTIONS))}")
    if x.dtype == torch.bool and op not in ("max", "min"):
        raise TypeError(f"op={op!r} has no meaning for bool: use 'max' for any, 'min' for all, or x.int() to count")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"op='mean' of {x.dtype} would not be a {x.dtype}: use x.float(), or op='sum' and divide as you want it rounded")
    try:  # torch itself knows best which dtypes it can combine; asked now, before any message, and not by one rank in the middle
        nothing = x.detach().new_empty(0)
        reduction.finish(reduction(nothing, nothing, out=nothing), 2)
    except RuntimeError as error:
        raise TypeError(f"op={op!r} has no meaning for {x.dtype}: {error}") from error
    return reduction
