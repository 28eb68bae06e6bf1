"""Seconds of a collective on real hardware, in closed form, as the scaling book derives them.

V bytes on a ring of n chips, links of w bytes per second each way (W = 2w both ways), t seconds per
hop. The larger of the two times counts:

                     bandwidth                                               latency
    all-gather       n/2 hops of V/n bytes each way: V/W for any n           ⌊n/2⌋ · t
    several axes     all links work at once: V / (W · axes)                  Σ ⌊nᵢ/2⌋ · t
    no wraparound    the ring is a line of n − 1 hops: V(n−1)/n / w          (n − 1) · t
    reduce-scatter   as an all-gather, backwards
    all-reduce       both: twice
    all-to-all       a quarter on a ring

V is always the whole array: the result of an all-gather, the input of a reduce-scatter or
all-reduce, all ranks' inputs of an all-to-all.

The book takes the larger of the two times. The bidirectional ring on the simulator has exactly
these two, but it waits for each hop, so it takes their sum. On several axes the book leaves out
that a chip has its own shard already: "torus" takes (N−1)/N of the time on N chips, if the axes are
equally long. But it takes Σ (nᵢ − 1) hops, where the book counts Σ ⌊nᵢ/2⌋. All-to-all over several
axes: "torus" reaches the book's time. "direct" takes longer (on 4 × 4 chips 11 blocks instead of
8), because messages that turn a corner wait for each other. Across GPU nodes the book's levels
overlap; in "two_level" their times add up. The book counts all rails of a node (see `Level`), which
work only if all of its GPUs take part. Not here: switches that add (SHARP), and ragged all-to-alls.

Source: Austin et al., "How to Scale Your Model" (2025), parts 3 (TPUs) and 12 (GPUs).

Communication can hide behind arithmetic. The seconds of a matrix product on one chip are:

    A[m, k] · B[k, n] → C[m, n]     2mkn flops / (flop/s)
                           against  (mk + kn + mn) elements / (HBM bandwidth)

The larger of the two counts, because a chip computes while it loads.

Source: Austin et al., "How to Scale Your Model" (2025), part 1, "Rooflines".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.cost.closed_forms import ring_cost
from parallel101.cost.hardware import Chip, Level, Torus, chip_of


class Time(NamedTuple):
    """The seconds of a collective, or of a local product, on a chip: the largest of its bounds.

    Attributes:
        what: in words.
        bounds: seconds by what sets them: "bandwidth" and "latency" of a collective, "flops" and
            "memory" of a product.
    """

    what: str
    bounds: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.bounds.values())

    @property
    def bound(self) -> str:
        """What decides the seconds."""
        return max(self.bounds, key=self.bounds.__getitem__)

    def __repr__(self) -> str:
        each = ", ".join(f"{name} {decimal(seconds, 's')}" for name, seconds in self.bounds.items())
        return f"{self.what}: {decimal(self.seconds, 's')}, {self.bound}-bound ({each})"


def decimal(value: float, unit: str) -> str:
    """Return the value in three digits: 33_554_432, "B" -> "33.6 MB"; 2e-6, "s" -> "2 µs"."""
    for power, prefix in zip(range(12, -9, -3), ("T", "G", "M", "k", "", "m", "µ")):
        scale = 10.0**power
        if value >= scale and not (unit == "s" and scale > 1):
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}" if value else f"0 {unit}"


def all_gather(nbytes: float, axes: int | Sequence[int], chip: str | Chip) -> Time:
    """Return the time of gathering an array of `nbytes` bytes over mesh axes of these lengths.

    Args:
        nbytes: of the whole array, V. If other mesh axes cut the array too, of the part that the
            ranks of one line have together.
        axes: the lengths of the axes, or of the one axis. TPU: each is an axis of the torus. GPU:
            the last is inside the node, the one before it counts nodes, the one before that groups
            of nodes: (8,) is one node of eight, (32, 8) is 32 of them.
        chip: a name in `CHIPS`, or a `Chip`. Which axes of a TPU are rings follows from its links,
            such as "a multiple of 16" on TPU v5e; a copy of the chip may have others.

    Raises ValueError for an unknown chip, sizes below 1, negative bytes, and more axes than the
    chip has.
    """
    return _time("all-gather", nbytes, axes, chip)


def reduce_scatter(nbytes: float, axes: int | Sequence[int], chip: str | Chip) -> Time:
    """Return the time of a reduce-scatter, an all-gather backwards.

    Arguments are those of `all_gather`.
    """
    return _time("reduce-scatter", nbytes, axes, chip)


def all_reduce(nbytes: float, axes: int | Sequence[int], chip: str | Chip) -> Time:
    """Return the time of an all-reduce: reduce-scatter, then all-gather.

    Arguments are those of `all_gather`.

    Example:
        >>> p101.cost.all_reduce(1e9, 8, "H100")
        all-reduce of 1 GB on 8 H100: 3.89 ms, bandwidth-bound (bandwidth 3.89 ms, latency 3.6 µs)
    """
    return _time("all-reduce", nbytes, axes, chip)


def all_to_all(nbytes: float, axes: int | Sequence[int], chip: str | Chip) -> Time:
    """Return the time of an all-to-all, which moves the cut of an array to another dim.

    Arguments are those of `all_gather`. On a ring, half of the blocks cross any cut, and each needs
    n/4 hops on average: V / (4W), for an even n.
    """
    return _time("all-to-all", nbytes, axes, chip)


# ── each returns (bandwidth seconds, latency seconds) of one pass

Bounds = tuple[float, float]


def _on_torus(exchange: bool, V: float, axes: list[int], links: Torus) -> Bounds:
    """Return the bounds on a torus. All axes work at the same time.

    In an exchange, n² / 4 of the n² pairs of ranks on an axis cross each cut in each direction, on
    a ring over two links. The longest axis has most to carry: V · max(nᵢ) / (4 · N · W).
    """
    rings = [n % links.ring_multiple == 0 for n in axes]
    hops = [n // 2 if ring else n - 1 for n, ring in zip(axes, rings)]
    widths = [links.both_ways if ring else links.bandwidth for ring in rings]
    if exchange:
        N = math.prod(axes)
        bandwidth = max(V * (n * n // 4) / n / N / width for n, width in zip(axes, widths))
    elif len(axes) == 1:
        bandwidth = hops[0] * V / axes[0] / links.bandwidth
    else:
        bandwidth = V / sum(widths)
    return bandwidth, sum(hops) * links.latency


def _on_switches(exchange: bool, V: float, sizes: list[int], levels: Sequence[Level]) -> Bounds:
    """Return the bounds of a ring at each level of the tree, all levels at the same time.

    Latency assumes doubling instead of a ring: ⌈lg D⌉ hops. In an exchange at a level of U units,
    each sends V/U² bytes to each other one, over its only link.
    """
    hops = [(D - 1).bit_length() * level.latency for D, level in zip(sizes, levels)]
    shares = [(D, V) for D in sizes]
    if exchange:
        units = [math.prod(sizes[i:]) for i in range(len(sizes))]
        shares = [(U, V / U) for U in units]
        hops = [max(level.latency * (D > 1) for D, level in zip(sizes, levels))]
    paths = [ring_cost("all_gather", ranks, nbytes).path for ranks, nbytes in shares]
    return max(path / level.bandwidth for path, level in zip(paths, levels)), sum(hops)


def _time(operation: str, nbytes: float, axes: int | Sequence[int], chip: str | Chip) -> Time:
    chip, shape = chip_of(chip), (axes,) if isinstance(axes, int) else tuple(axes)
    if not shape or not all(type(n) is int and n >= 1 for n in shape):
        raise ValueError(
            f"axes={axes!r}: expected the length of a mesh axis, or a list of lengths, each an "
            "int of 1 or more"
        )
    if not nbytes >= 0:
        raise ValueError(f"nbytes={nbytes!r}: expected the bytes of the whole array, 0 or more")
    exchange, links = operation == "all-to-all", chip.links
    most = links.axes if isinstance(links, Torus) else len(links)
    if len(shape) > most:
        words = "axes" if isinstance(links, Torus) else "levels of switches"
        raise ValueError(f"axes={list(shape)}: {chip.name} has {most} {words}")
    if isinstance(links, Torus):
        moving = [n for n in shape if n > 1]
        bounds = _on_torus(exchange, nbytes, moving, links) if moving else (0.0, 0.0)
    else:
        for n, level in zip(reversed(shape), links):
            if n > level.size:
                more = "Above it no links are known"
                if level is not links[-1]:
                    more = f"For more, add an axis in front, as in {[n // level.size, level.size]}"
                raise ValueError(
                    f"axes={list(shape)}: a {level.name} of {chip.name} joins at most "
                    f"{level.size}. {more}"
                )
        bounds = _on_switches(exchange, nbytes, list(reversed(shape)), links)
    passes = (2 if operation == "all-reduce" else 1) if nbytes else 0
    what = f"{operation} of {decimal(nbytes, 'B')} on {' × '.join(map(str, shape))} {chip.name}"
    return Time(what, {"bandwidth": passes * bounds[0], "latency": passes * bounds[1]})


# ── a local product ──


def matmul(
    m: int, k: int, n: int, chip: str | Chip, *, element_bytes: int = 2, batch: int = 1
) -> Time:
    """Return the time of an (m, k) times a (k, n) matrix on one chip, by default in bf16.

    Args: batch: how many such products.

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
    flops, nbytes = batch * 2 * m * k * n, batch * (m * k + k * n + m * n) * element_bytes
    bounds = {"flops": flops / chip.flops, "memory": nbytes / chip.hbm_bandwidth}
    return Time(f"product of {decimal(flops, 'flop')}", bounds)
