"""How much two results may differ because they are summed in another order.

A result in precision u is rounded once in each of the d modules, there and back, and sums up to k
numbers. Such errors add up like a random walk, so two orders of summing differ by about √(d·k)·u.
In half precision, or in autocast, sums are in float32, and only their results are rounded to the
coarser v: √d·v more. The bound is 4 times that, relative to the largest gradient in the same
module; and v, relative to the largest of all, for a gradient that is zero but for rounding, such as
that of a bias before a softmax. An optimizer makes the same of the same gradient, element by
element, so a weight after its update may differ by 2u.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

SAFETY = 4
SINGLE = torch.finfo(torch.float32).eps


def most_rounding(
    model: nn.Module,
    shapes: Sequence[Sequence[int]],
    dtypes: Iterable[torch.dtype],
    batch: Sequence[Tensor],
) -> float:
    """Relative to the largest number.

    Args:
        shapes: of the parameters. dtypes: of the parameters, and autocast's.
        batch: its tensors.
    """
    depth = sum(1 for module in model.modules() if module._parameters)
    terms = max(*(max(shape, default=1) for shape in shapes), *(t.numel() for t in batch))
    results = eps_of(dtypes)
    sums = min(results, SINGLE)
    return SAFETY * (
        sums * math.sqrt(depth * terms) + (results * math.sqrt(depth) if results > sums else 0)
    )


def eps_of(dtypes: Iterable[torch.dtype]) -> float:
    """Of the coarsest."""
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def scales(
    outcomes: Sequence[Mapping[str, Tensor | None]], bound: float, eps: float
) -> dict[str, float]:
    """Name → the largest difference that rounding explains, from the largest numbers in its
    module and in all.
    """
    of_module: dict[str, float] = {}
    for outcome in outcomes:
        for name, t in outcome.items():
            module = name.rpartition(".")[0]
            of_module[module] = max(of_module.get(module, 0.0), 0.0 if t is None else largest(t))
    of_all = max(of_module.values(), default=0.0)
    return {name: bound * of_module[name.rpartition(".")[0]] + eps * of_all for name in outcomes[0]}


def apart(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference.

    The same infinity in both, or NaN in both, counts as equal: half precision overflows.
    """
    found = largest(a - b)
    if math.isfinite(found):
        return found
    return largest((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0))


def largest(t: Tensor) -> float:
    """The largest absolute value; infinity for what is not a number."""
    if not t.numel():
        return 0.0
    found = float(t.detach().abs().max())
    return math.inf if math.isnan(found) else found
