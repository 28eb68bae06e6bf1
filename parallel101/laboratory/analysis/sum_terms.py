"""Finds which terms of a sum a block holds, from its values.

    C = C₀ + C₁ + C₂, each term as large as the whole

    a block equal to C₁'s upper half:      counts (0, 1, 0)   the sum is unfinished
    a block equal to C₀ + 2·C₁ + C₂:       counts (1, 2, 1)   a term was added twice

held_blocks.py uses it for each block. The origin of values in messages is in provenance.py, which
chooses the values itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same(given: Tensor, expected: Tensor) -> bool:
    """Return whether two blocks differ by rounding only."""
    if given.shape != expected.shape:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(given.to(expected.dtype), expected)
    largest = max(expected.abs().max().item(), 1e-300) if expected.numel() else 1.0
    return torch.allclose(
        given.double(), expected.double(), rtol=0, atol=tolerance(expected) * largest
    )


def tolerance(x: Tensor) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(x.dtype, 3e-2)


def term_counts(
    block: Tensor, terms: Sequence[Tensor], expected: Sequence[int]
) -> tuple[int, ...] | None:
    """Return how often each term is in the block; None if it isn't a sum of them.

    Args:
        block: on one rank.
        terms: the same part of each term of the sum.
        expected: the counts to try first. For values that don't distinguish the terms, such as
            ones, they are the answer if they fit.
    """
    if any(block.shape != term.shape for term in terms):
        return None
    stacked = torch.stack([term.detach().double().flatten() for term in terms], 1)
    values = block.detach().double().flatten()

    def fits(counts: Sequence[int]) -> bool:
        return same(
            block.detach().double().flatten().to(terms[0].dtype),
            (stacked @ stacked.new_tensor(list(counts))).to(terms[0].dtype),
        )

    if fits(expected):
        return tuple(expected)
    counts = tuple(
        round(count)
        for count in torch.linalg.lstsq(stacked, values[:, None], driver="gelsd")
        .solution[:, 0]
        .tolist()
    )
    return counts if min(counts) >= 0 and fits(counts) else None
