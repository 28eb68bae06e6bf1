"""How large a difference may be rounding.

A result in precision u is rounded once in each of the d modules, there and back, and sums up to k
numbers. Such errors add up like a random walk, so two orders of summing differ by about √(d·k)·u.
The bound is 4 times that, relative to the largest number in the same module. If a difference
exceeds it, rounding is measured: one process computes the same steps with every weight and input
changed by its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.trainers.batches import map_tensors
from parallel101.trainers.verify.report import KINDS, Row

SAFETY, NOISE = 4, 16
# How much more of the scaled step may be rounding. It is for what clamps large gradients, which
# differs grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Numbers = Mapping[str, Tensor | None]  # "loss", "norm", "gradient NAME", "buffer NAME", …
Differences = dict[tuple[str, int], float]  # of which number, in which step: how far


class Tolerance(NamedTuple):
    """What is rounding.

    Attributes:
        start: weights before the first step, by name.
        expected: (step, numbers) of one process.
        scaled: the step whose loss is scaled.
        terms: d · k.
        eps: the coarsest rounding of the layout.
    """

    start: Mapping[str, Tensor]
    expected: Sequence[tuple[int, Numbers]]
    scaled: int
    terms: int
    eps: float

    @property
    def bound(self) -> float:
        """Relative to the largest number."""
        exact = min(self.eps, torch.finfo(torch.float32).eps)
        return SAFETY * exact * math.sqrt(self.terms)

    def judge(self, far: Differences, noise: Differences) -> list[Row]:
        """Return each difference beside its bound. `noise`: measured, or empty."""
        bound, bounds, rows = self.bound, Differences(), list[Row]()
        before, done = dict(self.start), 0
        for step, numbers in self.expected:
            relative = max(bound, SAFETY * self.eps) if noise else bound
            relative *= LOOSE if step == self.scaled else 1
            # zero but for rounding, such as the gradient of a bias before a softmax
            gradients = [t for key, t in numbers.items() if key.startswith("gradient ")]
            zero = self.eps * max(map(largest, gradients), default=0.0)
            rounding = of_modules({key: noise.get((key, step), 0.0) for key in numbers})
            sizes = of_modules({key: largest(t) for key, t in numbers.items()})
            for key, t in numbers.items():
                what, _, name = key.partition(" ")
                most = max(relative * sizes[key], NOISE * rounding[key])
                if what == "gradient":
                    most += zero
                elif what == "buffer" and t is not None and not t.is_floating_point():
                    most = 0.0
                elif what == "update" and t is not None:
                    of_each = 2 * (step - done) * torch.finfo(t.dtype).eps * largest(t)
                    most = bound * largest(t - before[name]) + of_each
                    before[name] = t
                bounds[key, step] = most
            done = step if any(key.startswith("update ") for key in numbers) else done
        for (key, step), difference in far.items():
            most, (what, _, name) = bounds[key, step], key.partition(" ")
            ratio = difference / most if most else math.inf if difference else 0.0
            rows.append(Row(what, name, step, difference, ratio))
        return sorted(rows, key=lambda row: KINDS.index(row.what))


def of_modules(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return for each number the largest of its kind in the same module."""
    most: dict[str, float] = {}
    for key, size in sizes.items():
        module = key.rpartition(".")[0] or key.partition(" ")[0]
        most[module] = max(size, most.get(module, 0.0))
    return {key: most[key.rpartition(".")[0] or key.partition(" ")[0]] for key in sizes}


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


# ── weights that are zero, or changed by their rounding ──


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
