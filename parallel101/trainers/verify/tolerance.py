"""How large a difference may be rounding.

Two orders of summing differ by about √k·u, for k numbers in a precision u. The bound is 1,000 u,
relative to the largest number in the same module. If a difference exceeds it, rounding is measured:
one process computes the same steps with every weight and input changed by its rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.batches import map_tensors

TERMS, SAFETY = 1000, 4
Key = tuple[str, str, int]  # what (loss, norm, gradient, …), of which tensor, in which step
Numbers = Mapping[Key, Tensor | None]


def bounds(eps: float) -> tuple[float, float]:
    """Return how large relative differences may be, in the gradients' sums and in one number."""
    fine = TERMS * min(eps, torch.finfo(torch.float32).eps)
    return fine, max(fine, SAFETY * eps)


def of_modules(sizes: Mapping[Key, float]) -> dict[Key, float]:
    """Return for each number the largest of its kind in the same module."""
    most: dict[tuple[str, str], float] = defaultdict(float)
    for (what, name, _), size in sizes.items():
        module = what, name.rpartition(".")[0]
        most[module] = max(size, most[module])
    return {key: most[key[0], key[1].rpartition(".")[0]] for key in sizes}


def largest(t: Tensor | None) -> float:
    """Return the largest absolute value; infinity if one is not a number."""
    if t is None or not t.numel():
        return 0.0
    size = float(t.detach().abs().max())
    return math.inf if math.isnan(size) else size


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest absolute difference; None is zero.

    The same infinity in both, or NaN in both, counts as equal: half precision overflows.
    """
    if a is None or b is None:
        return largest(a if b is None else b)
    a, b = (t.to(torch.promote_types(t.dtype, torch.float64)) for t in (a, b))
    far = largest(a - b)
    if math.isfinite(far):
        return far
    return largest((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0))


def without_zeros(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of these weights that have zeros, with about a tenth of an initial weight of
    this shape in their place.
    """
    generator, changed = torch.Generator().manual_seed(0), {}
    for name, t in values.items():
        if (zero := t == 0).any():
            small = 0.3 / max(1, *t.shape[-1:]) ** 0.5
            drawn = (small * torch.rand(t.shape, generator=generator)).to(t)
            changed[name] = torch.where(zero, drawn, t)
    return changed


def jittered(tree: Any, eps: float) -> Any:
    """Return these tensors, each number changed by about the rounding of a dtype."""
    generator = torch.Generator().manual_seed(1)

    def change(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return t * (1 + 4 * eps * (torch.rand(t.shape, generator=generator) - 0.5).sign().to(t))

    return map_tensors(change, tree)
