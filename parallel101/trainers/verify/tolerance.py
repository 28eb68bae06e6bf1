"""How large a difference may be rounding.

Two orders of summing differ by about √k·u, for k numbers in a precision u. The bound is 1,000 u,
relative to the largest number in the same module. If a difference exceeds it, rounding is measured:
one process computes the same steps with every weight and input changed by its rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.batches import map_tensors
from parallel101.trainers.verify.report import KINDS, Row

TERMS, SAFETY, NOISE = 1000, 4, 16
# How much more of the scaled step may be rounding. It is for what clamps large gradients, which
# differs grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Key = tuple[str, str, int]  # what (loss, norm, gradient, …), of which tensor, in which step
Numbers = Mapping[Key, Tensor | None]


def judge(
    expected: Sequence[Numbers],
    start: Mapping[str, Tensor],
    far: Mapping[Key, float],
    eps: float,
    noise: Mapping[Key, float] = {},
) -> list[Row]:
    """Return each difference beside its bound.

    Args:
        expected: of one process.
        start: weights before the first step, by name.
        far: the differences.
        eps: the coarsest rounding of the layout.
        noise: measured.
    """
    rows, before = list[Row](), dict(start)
    bound = fine_bound(eps)
    scaled = max(step for numbers in expected for what, _, step in numbers if what == "loss")
    for numbers in expected:
        sizes = of_modules({key: largest(t) for key, t in numbers.items()})
        rounding = of_modules({key: noise.get(key, 0.0) for key in numbers})
        # zero but for rounding, such as the gradient of a bias before a softmax
        zero = eps * max((size for key, size in sizes.items() if key[0] == "gradient"), default=0.0)
        for key, t in numbers.items():
            what, name, step = key
            relative = coarse_bound(eps) if noise else bound
            relative *= LOOSE if step == scaled else 1
            most = max(relative * sizes[key], NOISE * rounding[key]) + zero * (what == "gradient")
            if what == "update" and t is not None:
                rounded = 2 * step * torch.finfo(t.dtype).eps * largest(t)
                most = bound * largest(t - before[name]) + rounded
                before[name] = t
            elif what == "buffer" and t is not None and not t.is_floating_point():
                most = 0.0
            difference = far.get(key, 0.0)
            ratio = difference / most if most else math.inf if difference else 0.0
            rows.append(Row(*key, difference, ratio))
    return sorted(rows, key=lambda row: KINDS.index(row.what))


def fine_bound(eps: float) -> float:
    return TERMS * min(eps, torch.finfo(torch.float32).eps)


def coarse_bound(eps: float) -> float:
    return max(fine_bound(eps), SAFETY * eps)


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
