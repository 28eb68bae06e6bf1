"""Bytes of the model states on each rank: weights, gradients and optimizer state, with ZeRO.

Activations are not among them.

    Ψ parameters, 2 bytes each in the forward pass, Adam         N = 64 ranks, 7.5 · 10⁹ parameters
    data parallel   2Ψ   + 2Ψ   + 12Ψ                            120 GB
    ZeRO-1          2Ψ   + 2Ψ   + 12Ψ/N                          31.4 GB
    ZeRO-2          2Ψ   + 2Ψ/N + 12Ψ/N                          16.6 GB
    ZeRO-3          2Ψ/N + 2Ψ/N + 12Ψ/N                          1.88 GB

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5 and Table 1.
"""

from __future__ import annotations

from typing import NamedTuple


class ModelStates(NamedTuple):
    """Bytes on each rank, or of one weight."""

    weights: float
    gradients: float
    optimizer_state: float  # with the fp32 copy of the weights, if there is one

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer_state


# of one weight; Adam keeps two averages of each gradient
PRECISIONS = {
    # weights and gradients in bf16 or fp16; Adam keeps an fp32 copy of the weights
    "mixed": ModelStates(2, 2, 12),
    "mixed, fp32 gradients": ModelStates(2, 4, 12),  # they are added up in fp32
    "fp32": ModelStates(4, 4, 8),
    "bf16": ModelStates(2, 2, 4),  # Adam's averages, too; there is no fp32 copy
}


def model_states(
    parameters: int, ranks: int = 1, *, zero_stage: int = 0, precision: str = "mixed"
) -> ModelStates:
    """Return the bytes that each of the data-parallel ranks holds while it trains with Adam.

    Args:
        parameters: their number.
        ranks: the number of data-parallel ranks.
        zero_stage: 0, nothing is sharded; 1, the optimizer state is; 2, gradients too; 3, weights
            too.
        precision: one of PRECISIONS.

    Raises ValueError for other values, or if there is no parameter or no rank.

    Example:
        >>> p101.cost.model_states(7_000_000_000, 8, zero_stage=3)
        ModelStates(weights=1750000000.0, gradients=1750000000.0, optimizer_state=10500000000.0)
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r}: expected one of {', '.join(map(repr, PRECISIONS))}"
        )
    if type(zero_stage) is not int or not 0 <= zero_stage <= 3:
        raise ValueError(f"zero_stage={zero_stage!r}: expected 0, 1, 2 or 3")
    if type(parameters) is not int or type(ranks) is not int or parameters < 1 or ranks < 1:
        raise ValueError(
            f"parameters={parameters!r}, ranks={ranks!r}: expected whole numbers, 1 or more"
        )
    # the stage that shards weights, gradients, optimizer state
    shares = [ranks if zero_stage >= first else 1 for first in (3, 2, 1)]
    of_one = PRECISIONS[precision]
    return ModelStates(*(parameters * nbytes / share for nbytes, share in zip(of_one, shares)))
