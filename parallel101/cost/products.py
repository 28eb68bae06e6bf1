"""Seconds of a matrix product on one chip, and the arithmetic that hides communication behind it.

    A[m, k] · B[k, n] → C[m, n]     2mkn flops / (flop/s)
                           against  (mk + kn + mn) elements / (HBM bandwidth)

The larger of the two counts, because a chip computes while it loads.

Source: Austin et al., "How to Scale Your Model" (2025), part 1, "Rooflines".
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel101.cost.hardware import Chip, chip_of
from parallel101.cost.times import decimal


@dataclass(frozen=True)
class ProductTime:
    """The seconds of a local matrix product, and whether arithmetic or memory decides them."""

    flops: int
    nbytes: int  # read and written
    flop_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.flop_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        return "flops" if self.flop_seconds >= self.memory_seconds else "memory"

    def __repr__(self) -> str:
        bounds = (
            f"flops {decimal(self.flop_seconds, 's')}, memory {decimal(self.memory_seconds, 's')}"
        )
        return (
            f"product of {decimal(self.flops, 'flop')}: {decimal(self.seconds, 's')}, "
            f"{self.bound}-bound ({bounds})"
        )


def matmul(m: int, k: int, n: int, chip: str | Chip, *, element_bytes: int = 2) -> ProductTime:
    """Return the time of an (m, k) times a (k, n) matrix on one chip, by default in bf16.

    Raises ValueError for an unknown chip, and for sizes that aren't ints of 0 or more.

    Example:
        >>> p101.cost.matmul(4096, 4096, 4096, "H100")
        product of 137 Gflop: 139 µs, flops-bound (flops 139 µs, memory 30 µs)
    """
    chip = chip_of(chip)
    if not all(type(size) is int and size >= 0 for size in (m, k, n, element_bytes)):
        raise ValueError(
            f"matmul({m!r}, {k!r}, {n!r}), element_bytes={element_bytes!r}: expected ints, 0 "
            "or more"
        )
    flops, nbytes = 2 * m * k * n, (m * k + k * n + m * n) * element_bytes
    return ProductTime(flops, nbytes, flops / chip.flops, nbytes / chip.hbm_bandwidth)
