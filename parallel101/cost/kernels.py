"""Seconds of one kernel on a GPU: a matrix product, fused attention, or a memory-bound kernel.

The quick model (step_time.py) and the clock of virtual GPUs compute with the same rules.

    product     waves of tiles · seconds of a tile,   or its bytes / reached bandwidth if larger

                C is cut into tiles, and each SM computes one of them at a time. 108 SMs do 109
                tiles in two waves, and the second has one tile.
    memory      bytes read and written / reached bandwidth
    attention   operations / a part of the peak that is lower than a product's

All have a launch.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

from parallel101.cost.hardware import Chip, KernelFigures


def figures(chip: Chip) -> KernelFigures:
    """Return the chip's figures of kernels. Raises ValueError if it has none."""
    if chip.kernels is None:
        raise ValueError(
            f"{chip.name} has no figures of kernels: expected a GPU such as 'A100' or 'H100'"
        )
    return chip.kernels


def peak(chip: Chip, itemsize: int) -> float:
    """Return the tensor cores' operations per second: half as many in 32 bits (TF32) as in 16."""
    return chip.flops if itemsize <= 2 else chip.flops / 2


@lru_cache(maxsize=1 << 16)
def product_seconds(
    chip: Chip, m: int, n: int, k: int, *, batch: int = 1, itemsize: int = 2
) -> float:
    """Return the seconds of `batch` products (m, k) · (k, n)."""
    if min(m, n, k, batch) < 1:
        return 0.0
    has = figures(chip)
    of_an_sm = peak(chip, itemsize) * has.sustained / has.sms
    nbytes = gcd(m, n, k) * itemsize  # the sizes are multiples of it
    of_an_sm *= next((part for multiple, part in has.alignment if nbytes % multiple == 0), 0.3)
    times = []
    for rows, columns, reached in has.tiles:
        tiles = batch * min(ceil(m / rows) * ceil(n / columns), ceil(m / columns) * ceil(n / rows))
        tile = 2 * rows * columns * (k + has.tile_start) / (of_an_sm * reached)
        times.append(ceil(tiles / has.sms) * tile)
    moved = batch * (m * k + k * n + m * n) * itemsize
    return max(min(times), moved / (chip.hbm_bandwidth * has.hbm)) + has.launch


def memory_seconds(chip: Chip, nbytes: float) -> float:
    """Return the seconds of a kernel whose reads and writes add up to `nbytes`."""
    has = figures(chip)
    return nbytes / (chip.hbm_bandwidth * has.hbm) + has.launch if nbytes else 0.0


def attention_seconds(
    chip: Chip, flops: float, nbytes: float, *, backward: bool = False, itemsize: int = 2
) -> float:
    """Return the seconds of fused attention.

    Args:
        flops: of its products; of the causal half, if it is causal.
        nbytes: of queries, keys, values, and what it returns.
        backward: the pass that computes the gradients, which computes the scores again.
    """
    has = figures(chip)
    reached = has.attention_backward if backward else has.attention
    busy = flops / (peak(chip, itemsize) * reached)
    return max(busy, nbytes / (chip.hbm_bandwidth * has.hbm)) + has.launch
