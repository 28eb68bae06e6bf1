"""The reductions sum, mean, product, max and min.

Each is a function of two tensors and, for the mean, one division at the end.

    op(a, b, out=c)     c = a + b, element by element, rounded to the tensors' dtype, as in torch's
                        backends
    op.finish(c, p)     the mean divides by p, once all p values are added

Not every dtype has all of them: bool has only max (any) and min (all), integers have no mean,
complex numbers no max and min.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reduction(NamedTuple):
    """A reduction by its name, and the torch function that combines two tensors."""

    name: str
    combine: Callable[..., Any]

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Return a and b combined, written to `out`, which may be a or b."""
        return self.combine(a, b, out=out)

    def finish(self, total: Tensor, count: int) -> Tensor:
        """Finish the combined values of `count` ranks in place: a mean divides.

        Call it once for each element of the result.
        """
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
    """Return the reduction called `op`.

    Raises ValueError for an unknown one, TypeError if x's dtype does not have it.
    """
    reduction = REDUCTIONS.get(op) if isinstance(op, str) else None
    if reduction is None:
        raise ValueError(
            f"op={op!r} is unknown: expected one of {', '.join(map(repr, REDUCTIONS))}"
        )
    if x.dtype == torch.bool and op not in ("max", "min"):
        raise TypeError(
            f"op={op!r} has no meaning for bool: use 'max' for any, 'min' for all, or x.int() "
            "to count"
        )
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"op='mean' of {x.dtype} is not a whole number: use x.float(), or op='sum' and divide"
        )
    try:  # only torch knows which other dtypes can be combined: try it before any message
        nothing = x.detach().new_empty(0)
        reduction.finish(reduction(nothing, nothing, out=nothing), 2)
    except (RuntimeError, ValueError, TypeError) as error:  # the kind depends on torch's version
        raise TypeError(f"op={op!r} has no meaning for {x.dtype}: {error}") from error
    return reduction
