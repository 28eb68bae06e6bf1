"""The cost of a collective in closed form: steps, bytes sent by the busiest rank, bytes on the critical path.

    time = steps · α + path · β        α: latency of a message, in seconds        β: seconds per byte, 1 / bandwidth

The makespan of a run on `Network(latency=1, bandwidth=inf)` is exactly the steps, and on `Network(latency=0, bandwidth=1)` the path. Tests
compare them. The textbooks give the forms with lg p for powers of two; any other p takes two more steps (power_of_two.py).
Not here: links that several messages share, and the time of the additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel101.collectives.broadcast import SEGMENT_BYTES


class Cost(NamedTuple):
    steps: int  # messages on the critical path, if a rank sends and receives one message at a time
    sent: int  # bytes sent by the rank that sends most
    path: int  # bytes on the critical path

    def seconds(self, latency: float, bandwidth: float) -> float:
        """steps · α + path · β: on links of this latency (s) and bandwidth (bytes/s), such as a sim `Network`'s."""
        return self.steps * latency + self.path / bandwidth


# By operation and algorithm, for p ≥ 2 ranks and an array of n = p · b bytes: the result of a gather or all-gather, the input of one rank
# in an all-to-all, the input of the others.
# Sources: Thakur, Rabenseifner, Gropp (2005), section 4, and Chan et al. (2007), tables 1 to 3. The forms with ⌈⌉, and those for a p that
# is no power of two, are counted from the code.
FORMS: dict[str, dict[str, Callable[[int, int, int], Cost]]] = {
    "broadcast": {
        "flat": lambda p, n, b: Cost(p - 1, (p - 1) * n, (p - 1) * n),
        "binomial": lambda p, n, b: Cost(lg_up(p), lg_up(p) * n, lg_up(p) * n),
        "chain": lambda p, n, b: Cost(p - 2 + segments(n), n, n + (p - 2) * min(n, SEGMENT_BYTES)),
        "scatter_all_gather": lambda p, n, b: Cost(lg_up(p) + p - 1, 2 * (p - 1) * b, 2 * (p - 1) * b),
    },
    "scatter": {
        "flat": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "binomial": lambda p, n, b: Cost(lg_up(p), (p - 1) * b, (p - 1) * b),
    },
    "gather": {
        "flat": lambda p, n, b: Cost(p - 1, b, (p - 1) * b),
        "binomial": lambda p, n, b: Cost(lg_up(p), p // 2 * b, (p - 1) * b),
    },
    "reduce": {
        "flat": lambda p, n, b: Cost(p - 1, n, (p - 1) * n),
        "binomial": lambda p, n, b: Cost(lg_up(p), n, lg_up(p) * n),
        "reduce_scatter_gather": lambda p, n, b: Cost(p - 1 + lg_up(p), (p - 1 + p // 2) * b, 2 * (p - 1) * b),
    },
    "all_gather": {
        "direct": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "ring": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "bidirectional_ring": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),  # half of it on links that carry both directions
        "recursive_doubling": lambda p, n, b: (
            Cost(lg_up(p), (p - 1) * b, (p - 1) * b)
            if power_of_two(p)
            else Cost(lg_down(p) + 2, sent_by_rank_0(p) * b + n, b + sent_by_rank_0(p) * b + n)
        ),
        "bruck": lambda p, n, b: Cost(lg_up(p), (p - 1) * b, (p - 1) * b),
    },
    "reduce_scatter": {
        "direct": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "ring": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "bidirectional_ring": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "recursive_halving": lambda p, n, b: (
            Cost(lg_up(p), (p - 1) * b, (p - 1) * b) if power_of_two(p) else Cost(lg_down(p) + 2, n, n + sent_by_rank_0(p) * b + b)
        ),
    },
    "all_reduce": {
        "reduce_broadcast": lambda p, n, b: Cost(2 * lg_up(p), lg_up(p) * n, 2 * lg_up(p) * n),
        "direct": lambda p, n, b: Cost(2 * (p - 1), 2 * (p - 1) * b, 2 * (p - 1) * b),
        "ring": lambda p, n, b: Cost(2 * (p - 1), 2 * (p - 1) * b, 2 * (p - 1) * b),
        "bidirectional_ring": lambda p, n, b: Cost(2 * (p - 1), 2 * (p - 1) * b, 2 * (p - 1) * b),
        "recursive_doubling": lambda p, n, b: (
            Cost(lg_up(p), lg_up(p) * n, lg_up(p) * n)
            if power_of_two(p)
            else Cost(lg_down(p) + 2, (lg_down(p) + 1) * n, (lg_down(p) + 2) * n)
        ),
        "rabenseifner": lambda p, n, b: (
            Cost(2 * lg_up(p), 2 * (p - 1) * b, 2 * (p - 1) * b)
            if power_of_two(p)
            else Cost(2 * lg_down(p) + 2, n - 2 * b + sent_by_rank_0(p) * b + n, n + 2 * sent_by_rank_0(p) * b + n)
        ),
    },
    "all_to_all": {
        "direct": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "pairwise": lambda p, n, b: Cost(p - 1, (p - 1) * b, (p - 1) * b),
        "bruck": lambda p, n, b: Cost(lg_up(p), ones(p) * b, ones(p) * b),
    },
    "barrier": {
        "dissemination": lambda p, n, b: Cost(lg_up(p), lg_up(p), lg_up(p)),  # of one byte each
    },
}


def closed_form(operation: str, algorithm: str, p: int, nbytes: int) -> Cost:
    """The cost of `algorithm` on p ranks for an array of `nbytes` bytes, which p must divide.

    Raises ValueError for an unknown operation or algorithm, for p < 1, and if p does not divide `nbytes`.
    """
    if algorithm not in FORMS.get(operation, {}):
        known = ", ".join(f"{op} by {name}" for op, forms in FORMS.items() for name in forms)
        raise ValueError(f"no closed form for {operation!r} by {algorithm!r}: there are {known}")
    if type(p) is not int or type(nbytes) is not int or p < 1 or nbytes < 0 or nbytes % p:
        raise ValueError(f"p={p}, nbytes={nbytes}: expected an array that splits into p equal blocks")
    if p == 1 or (nbytes == 0 and operation != "barrier"):  # no message for an empty array
        return Cost(0, 0, 0)
    return FORMS[operation][algorithm](p, nbytes, nbytes // p)


def torus_all_reduce(shape: Sequence[int], nbytes: int) -> Cost:
    """The cost of all-reduce by "torus", or by "two_level" on a mesh of two axes: 2 Σ (pᵢ − 1) steps, 2n(p−1)/p bytes."""
    p = math.prod(shape)
    if p < 1 or nbytes < 0 or nbytes % p:
        raise ValueError(f"shape={tuple(shape)}, nbytes={nbytes}: expected an array that splits into {p} equal blocks")
    moved = 2 * nbytes // p * (p - 1)
    return Cost(2 * sum(extent - 1 for extent in shape) if nbytes else 0, moved, moved)


def lg_up(p: int) -> int:
    """⌈lg p⌉"""
    return (p - 1).bit_length()


def lg_down(p: int) -> int:
    """⌊lg p⌋"""
    return p.bit_length() - 1


def power_of_two(p: int) -> bool:
    return p & (p - 1) == 0


def segments(nbytes: int) -> int:
    """The number of segments into which the chain broadcast splits `nbytes`."""
    return -(-nbytes // SEGMENT_BYTES)


def sent_by_rank_0(p: int) -> int:
    """Blocks that rank 0 sends in recursive doubling if p is no power of two: it works for two ranks, as do the others in a pair."""
    pairs = p - (1 << lg_down(p))
    return sum(width + min(width, pairs) for width in (1 << k for k in range(lg_down(p))))


def ones(p: int) -> int:
    """The number of bits set in 0 … p − 1: the blocks that a rank sends in Bruck's all-to-all. p lg p / 2 for a power of two."""
    return sum(j.bit_count() for j in range(p))
