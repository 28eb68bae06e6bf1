"""Seconds of one kernel on a GPU (thin: helper TIME writes it)."""

from __future__ import annotations

from parallel101.cost.hardware import Chip

LAUNCH = 4e-6


def product_seconds(
    chip: Chip, m: int, n: int, k: int, *, batch: int = 1, itemsize: int = 2
) -> float:
    nbytes = batch * itemsize * (m * n + m * k + n * k)
    return LAUNCH + max(2 * batch * m * n * k / (0.7 * chip.flops), nbytes / chip.hbm_bandwidth)


def attention_seconds(chip: Chip, flops: int, nbytes: int, *, backward: bool = False) -> float:
    return LAUNCH + max(flops / (0.5 * chip.flops), nbytes / chip.hbm_bandwidth)


def memory_seconds(chip: Chip, nbytes: int) -> float:
    return LAUNCH + nbytes / (0.85 * chip.hbm_bandwidth)
