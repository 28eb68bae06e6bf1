"""How large a difference may be rounding.

Two orders of summing differ by about √k·u, for k numbers in a precision u. The bound is 1,000 u,
relative to the largest number in the same module. If a difference exceeds it, rounding is measured:
one process computes the same steps with every weight and input changed by its rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.batches import map_tensors
from parallel101.trainers.verify.report import Row

TERMS, SAFETY = 1000, 4
NOISE = 16  # how much larger a difference may be than rounding that is measured
# How much more of the scaled step may be rounding. It is for what clamps large gradients, which
# differs grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Key = tuple[str, str, int]  # what (loss, norm, gradient, …), of which tensor, in which step
Numbers = Mapping[Key, Tensor | None]


def judge(
    differences: Mapping[Key, float],
    expected: Iterable[Numbers],
    start: Mapping[str, Tensor],
    eps: float,
    scaled_step: int,
    noise: Mapping[Key, float],
) -> list[Row]:
    """Return each difference beside its bound.

    Args:
        expected: the numbers of one process.
        start: its weights at the start.
        eps: the coarsest rounding.
        noise: differences by rounding that are measured, or empty.
    """
    rows, before = list[Row](), dict(start)
    fine = TERMS * min(eps, torch.finfo(torch.float32).eps)
    coarse = max(fine, SAFETY * eps) if noise else fine
    for numbers in expected:
        sizes = of_modules({key: largest(t) for key, t in numbers.items()})
        rounding = of_modules({key: noise.get(key, 0.0) for key in numbers})
        # zero but for rounding, such as the gradient of a bias before a softmax
        zero = eps * max((n for key, n in sizes.items() if key[0] == "gradient"), default=0.0)
        for key, t in numbers.items():
            what, name, step = key
            loose = LOOSE if step == scaled_step else 1
            most = max(loose * coarse * sizes[key], NOISE * rounding[key])
            if what == "gradient":
                most += zero
            elif what == "update" and t is not None:
                rounded = 2 * step * torch.finfo(t.dtype).eps * largest(t)
                most = fine * largest(t - before[name]) + rounded
                before[name] = t
            elif what == "buffer" and t is not None and not t.is_floating_point():
                most = 0.0
            far = differences.get(key, 0.0)
            rows.append(Row(*key, far, far / most if most else math.inf if far else 0.0))
    return rows


def of_modules(sizes: Mapping[Key, float]) -> dict[Key, float]:
    """Return for each number the largest of its kind in the same module."""
    most: dict[tuple[str, str], float] = defaultdict(float)
    modules = {key: (key[0], key[1].rpartition(".")[0]) for key in sizes}
    for key, size in sizes.items():
        most[modules[key]] = max(size, most[modules[key]])
    return {key: most[modules[key]] for key in sizes}


def largest(t: Tensor | None) -> float:
    """Return the largest absolute value; infinity if one is not a number."""
    if t is None or not t.numel():
        return 0.0
    return float(t.detach().abs().max().nan_to_num(math.inf, math.inf))


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
