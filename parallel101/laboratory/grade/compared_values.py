"""Comparison of what a rank returned with what was expected, and how the two differ.

same([…], [4., 6.])         the same structure, shapes, dtypes and values
difference(…)               "a tensor of shape (2,); expected (4,)"
factor(…)                   2.0: the right values, times two
weights(…), origins(…)      which ranks' tensors a sum has, and which places hold whose values
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallel101.laboratory.grade.exercise import ANYTHING

# relative to the largest value
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10}


def same(found: Any, expected: Any) -> bool:
    """Return whether a result is as expected: the same structure, shapes, dtypes and values.

    Floating-point values may differ by the order of a sum.
    """
    return difference(found, expected) is None


def difference(found: Any, expected: Any) -> str | None:
    """Return what differs, to follow "rank 2 returned" in a sentence, or None if nothing does."""
    if expected is ANYTHING:
        return None
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{kind(found)}; expected a tensor of shape {tuple(expected.shape)}"
        if found.shape != expected.shape:
            return f"a tensor of shape {tuple(found.shape)}; expected {tuple(expected.shape)}"
        if found.dtype != expected.dtype:
            return f"a tensor of {found.dtype}; expected {expected.dtype}"
        return None if close(found, expected) else _values(found, expected)
    if isinstance(expected, dict) and isinstance(found, dict) and set(found) == set(expected):
        parts = [(f"at {key!r}", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        parts = [(f"in place {i}", *pair) for i, pair in enumerate(zip(found, expected))]
    elif isinstance(expected, float) and isinstance(found, int | float):
        near = abs(found - expected) <= 1e-5 * max(1.0, abs(expected))
        return None if near else f"{found}; expected {expected}"
    else:
        compared = type(found) is type(expected) and not isinstance(expected, dict)
        if compared and found == expected:
            return None
        return f"{kind(found)}; expected {kind(expected)}"
    if len(found) != len(expected):
        return f"{kind(found)}; expected {kind(expected)}"
    differences = ((where, difference(mine, theirs)) for where, mine, theirs in parts)
    return next((f"{where}: {what}" for where, what in differences if what is not None), None)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> bool:
    """Return whether two tensors of one shape hold the same numbers, up to a tolerance.

    The tolerance is relative to the largest finite number that is expected. Equal numbers may be
    infinite.
    """
    return found.shape == expected.shape and not _differs(found, expected, tolerance).any()


def _differs(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None
) -> torch.Tensor:
    """Return where two tensors of one shape are not close, as `close` says. NaN never is."""
    near = found == expected
    if expected.dtype.is_floating_point and expected.numel():
        relative = TOLERANCE.get(expected.dtype, 1e-5) if tolerance is None else tolerance
        largest = expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        apart = (found.double() - expected.double()).abs()
        near = near | (apart <= relative * max(largest, 1e-30))
    return ~near


def factor(found: Any, expected: Any) -> float | None:
    """Return k if `found` is k times `expected`, element by element, and k is neither 0 nor 1.

    None if there is no such factor.
    """
    solved = _combination(found, [expected])
    return None if solved is None or abs(solved[0] - 1) <= 1e-6 else solved[0]


def weights(found: Any, parts: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the c_r for which `found` is Σ c_r·parts[r], or None if there are none.

    For example, [1, 2, 1] is a sum in which rank 1 was counted twice. There must be more elements
    than parts: with fewer, everything is such a sum.
    """
    solved = _combination(found, parts)
    enough = solved is not None and found.numel() > len(parts)
    return [round(c, 6) for c in solved or ()] if enough else None


def _combination(found: Any, parts: Sequence[Any]) -> list[float] | None:
    """Return the c_r for which `found`, which isn't zero, is Σ c_r·parts[r], or None."""
    tensors = all(isinstance(one, torch.Tensor) for one in (found, *parts))
    if not tensors or any(found.shape != part.shape for part in parts):
        return None
    mine, *columns = (one.detach().double().flatten() for one in (found, *parts))
    matrix = torch.stack(columns, 1)
    if not bool(mine.any()) or not bool(torch.isfinite(torch.cat([matrix.flatten(), mine])).all()):
        return None
    solved = torch.linalg.lstsq(matrix, mine[:, None]).solution.flatten()
    return solved.tolist() if close(mine, matrix @ solved, 1e-4) else None


def origins(found: Any, parts: Sequence[torch.Tensor]) -> list[int | None] | None:
    """Return the index in `parts` of each block of `found`, or None for a block that isn't one.

    `found` is cut along dim 0 into as many blocks as there are parts, all of one shape. None if
    `found` does not consist of that many blocks of that shape.
    """
    shape = parts[0].shape
    if not isinstance(found, torch.Tensor) or found.shape != (len(parts) * shape[0], *shape[1:]):
        return None
    blocks = found.split(shape[0]) if shape[0] else []
    return [next((r for r, p in enumerate(parts) if same(block, p)), None) for block in blocks]


def kind(value: Any) -> str:
    """Return a value in a few words, such as "a tensor of shape (2,)"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"[:200]
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}…"
    return f"{type(value).__name__} {value!r}"[:80]


def _values(found: torch.Tensor, expected: torch.Tensor) -> str:
    if expected.numel() == 1:
        return told_apart(found.item(), expected.item(), "; ")
    if found.numel() and not bool(found.any()):
        return f"zeros only; expected values up to {expected.abs().max().item():.4g}"
    if (k := factor(found, expected)) is not None:
        return f"{k:.4g} times the right values"
    if found.dtype.is_floating_point and (missing := int(found.isnan().sum())):
        return (
            f"NaN in {missing} of {found.numel()} values; memory that was never written is NaN here"
        )
    wrong = _differs(found, expected).nonzero().tolist()
    place = wrong[0]
    numbers = told_apart(found[tuple(place)].item(), expected[tuple(place)].item())
    return (
        f"{len(wrong)} wrong of {expected.numel()} values; the first is element "
        f"{place if len(place) > 1 else place[0]}: {numbers}"
    )


def told_apart(found: Any, expected: Any, separator: str = ", ") -> str:
    """Return two numbers as "1.5, expected 2".

    If they look the same, their difference is added.
    """
    mine, theirs = f"{found:.6g}", f"{expected:.6g}"
    same_looks = f" (a difference of {abs(found - expected):.1g})" if mine == theirs else ""
    return f"{mine}{separator}expected {theirs}{same_looks}"
