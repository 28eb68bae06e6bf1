"""The cost of a collective in closed form: steps, bytes sent, bytes on the critical path.

    time = steps · α + path · β     α: latency of a message, in seconds
                                    β: seconds per byte, 1 / bandwidth

The bytes sent are those of the busiest rank. The makespan of a run on a `Network` with latency 1
and infinite bandwidth is exactly the steps, with latency 0 and bandwidth 1 the path; tests compare
them. The textbooks give the forms with lg p for powers of two; any other p takes two more steps
(power_of_two.py).

    switch          every rank has a link of its own into the switch, and one out of it
    ring            ⇄ 0 ⇄ 1 ⇄ 2 ⇄ 3 ⇄        a message to a rank d places away takes the shorter
                                              way, and occupies min(d, p − d) links
    one_way_ring    → 0 → 1 → 2 → 3 →        d or p − d of them

A message that meets no other is as fast over many links as over one (see the torus in
sim/network.py). So algorithms that send to neighbours, and trees, whose messages don't meet, cost
the same on a ring as on a switch. The others pay for the links: if all ranks send d places to the
right, every link carries d messages. The bytes that a rank sends are the same on every network.

Not here: the axes of a mesh (mesh_forms.py), and the time of the additions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from parallel101.collectives.auto import present_name
from parallel101.collectives.segments import check_segment_bytes, segment_size


class Cost(NamedTuple):
    """The cost of a collective: multiply it by a network's latency and bandwidth with `seconds`."""

    steps: int  # messages on the critical path, if a rank sends and receives one message at a time
    sent: int  # bytes sent by the rank that sends most
    path: int  # bytes on the critical path

    def seconds(self, latency: float, bandwidth: float) -> float:
        """Return steps · α + path · β, on links of this latency (s) and bandwidth (bytes/s)."""
        return self.steps * latency + self.path / bandwidth


def alike(steps: int, nbytes: int) -> Cost:
    """Return the cost of steps that each send `nbytes` bytes, all on the critical path."""
    return Cost(steps, steps * nbytes, steps * nbytes)


def one_by_one(p: int, n: int, b: int) -> Cost:
    """Return the cost of a block to or from each other rank, in as many steps."""
    return alike(p - 1, b)


def by_doubling(p: int, n: int, b: int) -> Cost:
    """Return the cost of 1, 2, 4, … blocks in ⌈lg p⌉ steps."""
    return Cost(lg_up(p), (p - 1) * b, (p - 1) * b)


def pipelined_chain(p: int, n: int, b: int, segment_bytes: int | None = None) -> Cost:
    """Return the cost of a chain: the last rank waits for p − 2 segments, then m arrive."""
    segment = segment_size(p, n, segment_bytes)
    return Cost(p - 2 + -(-n // segment), n, n + (p - 2) * min(n, segment))


def twice(form: Callable[..., Any], p: int, n: int, b: int) -> Any:
    found = form(p, n, b)
    return found and tuple(2 * number for number in found)


Form = Callable[..., tuple[int, int, int]]  # steps, bytes sent, bytes on the critical path
# By operation and algorithm, for p ≥ 2 ranks and an array of n = p · b bytes: the result of a
# gather or all-gather, the input of one rank in an all-to-all, the input of the others. Sources:
# Thakur, Rabenseifner, Gropp (2005), section 4, and Chan et al. (2007), tables 1 to 3. The forms
# with ⌈⌉ are counted from the code.
RING_FORMS = dict.fromkeys(("direct", "ring", "bidirectional_ring"), one_by_one)
FORMS: dict[str, dict[str, Form]] = {
    "broadcast": {
        "flat": lambda p, n, b: alike(p - 1, n),
        "binomial": lambda p, n, b: alike(lg_up(p), n),
        "pipelined_chain": pipelined_chain,
        "scatter_all_gather": lambda p, n, b: (lg_up(p) + p - 1, 2 * (p - 1) * b, 2 * (p - 1) * b),
    },
    "scatter": {"flat": one_by_one, "binomial": by_doubling},
    "gather": {
        "flat": lambda p, n, b: (p - 1, b, (p - 1) * b),
        "binomial": lambda p, n, b: (lg_up(p), p // 2 * b, (p - 1) * b),
    },
    "reduce": {
        "flat": lambda p, n, b: (p - 1, n, (p - 1) * n),
        "binomial": lambda p, n, b: (lg_up(p), n, lg_up(p) * n),
        "pipelined_chain": pipelined_chain,
        "reduce_scatter_gather": lambda p, n, b: (
            *(p - 1 + lg_up(p), (p - 1 + p // 2) * b),
            2 * (p - 1) * b,
        ),
    },
    # half of a bidirectional ring's bytes are on links that carry both directions
    "all_gather": {**RING_FORMS, "recursive_doubling": by_doubling, "bruck": by_doubling},
    "reduce_scatter": {**RING_FORMS, "recursive_halving": by_doubling},
    "all_reduce": {
        "reduce_broadcast": lambda p, n, b: (2 * lg_up(p), lg_up(p) * n, 2 * lg_up(p) * n),
        **dict.fromkeys(RING_FORMS, partial(twice, one_by_one)),
        "recursive_doubling": lambda p, n, b: alike(lg_up(p), n),
        "rabenseifner": partial(twice, by_doubling),
    },
    "all_to_all": {
        **dict.fromkeys(("direct", "pairwise"), one_by_one),
        "bruck": lambda p, n, b: (lg_up(p), ones(p) * b, ones(p) * b),
    },
    "barrier": {"dissemination": lambda p, n, b: alike(lg_up(p), 1)},
}
# where they differ if p isn't a power of two; s: the blocks that rank 0 sends
FOLDED: dict[tuple[str, str], Callable[[int, int, int, int], tuple[int, int, int]]] = {
    ("all_gather", "recursive_doubling"): lambda s, lg, n, b: (lg + 2, s * b + n, b + s * b + n),
    ("reduce_scatter", "recursive_halving"): lambda s, lg, n, b: (lg + 2, n, n + s * b + b),
    ("all_reduce", "recursive_doubling"): lambda s, lg, n, b: (lg + 2, (lg + 1) * n, (lg + 2) * n),
    ("all_reduce", "rabenseifner"): lambda s, lg, n, b: (
        *(2 * lg + 2, n - 2 * b + s * b + n),
        n + 2 * s * b + n,
    ),
}


# On rings: steps, …, path by operation and algorithm, where they differ from those on a switch.
# None: there is no simple form, because the cost depends on the order in which messages of several
# rounds reach a link. Counted from the code, like the forms with ⌈⌉ above.
OnRing = Callable[..., tuple[int, ...] | None] | None
DIRECT = [("all_gather", "direct"), ("all_to_all", "direct")]
PAIRWISE = [*DIRECT, ("all_to_all", "pairwise")]
MIXED = [("all_gather", "recursive_doubling"), ("all_reduce", "recursive_doubling")]
MIXED += [("all_to_all", "bruck"), ("barrier", "dissemination")]
RINGS: dict[str, dict[tuple[str, str], OnRing]] = {
    "ring": {
        # the root's two links work at once
        ("broadcast", "flat"): lambda p, n, b: alike(p // 2, n),
        **dict.fromkeys(
            [("scatter", "flat"), ("gather", "flat"), ("all_gather", "bidirectional_ring")],
            lambda p, n, b: alike(p // 2, b),
        ),
        **dict.fromkeys(DIRECT, lambda p, n, b: alike(all_pairs(p), b)),
        ("all_to_all", "pairwise"): lambda p, n, b: alike(sum(load(d, p) for d in range(1, p)), b),
        ("all_gather", "bruck"): lambda p, n, b: bruck(p, b, load) if power_of_two(p) else None,
        **dict.fromkeys(MIXED, None),
    },
    "one_way_ring": {  # to a rank d places to the left it is p − d to the right
        ("gather", "binomial"): lambda p, n, b: (p - 1, ones(p) * b),
        ("reduce", "binomial"): lambda p, n, b: alike(p - 1, n),
        ("reduce", "pipelined_chain"): lambda p, n, b, segment_bytes=None: (
            (p - 1) * -(-n // segment_size(p, n, segment_bytes)),
            (p - 1) * n,
        ),
        ("reduce", "reduce_scatter_gather"): lambda p, n, b: (2 * (p - 1), (p - 1 + ones(p)) * b),
        **dict.fromkeys(PAIRWISE, lambda p, n, b: alike(p * (p - 1) // 2, b)),
        ("all_gather", "bidirectional_ring"): lambda p, n, b: alike(
            p // 2 + (p - 1) // 2 * (p - 1), b
        ),
        ("all_gather", "recursive_doubling"): lambda p, n, b: (
            (p * lg_up(p) // 2, p * (p - 1) // 2 * b) if power_of_two(p) else None
        ),
        ("all_gather", "bruck"): lambda p, n, b: bruck(p, b, lambda d, p: p - d),
        ("all_reduce", "reduce_broadcast"): lambda p, n, b: alike(p - 1 + lg_up(p), n),
        ("all_reduce", "recursive_doubling"): lambda p, n, b: (
            alike(p * lg_up(p) // 2, n) if power_of_two(p) else None
        ),
        ("all_to_all", "bruck"): lambda p, n, b: ((1 << lg_up(p)) - 1, p * (p - 1) // 2 * b),
        ("barrier", "dissemination"): lambda p, n, b: alike((1 << lg_up(p)) - 1, 1),
    },
}
# a reduce-scatter is an all-gather backwards, and an all-reduce both
for _forms in RINGS.values():
    for _gather, _scatter, _both in (
        ("direct", "direct", "direct"),
        ("bidirectional_ring", "bidirectional_ring", "bidirectional_ring"),
        ("recursive_doubling", "recursive_halving", "rabenseifner"),
    ):
        _form = _forms["reduce_scatter", _scatter] = _forms["all_gather", _gather]
        _forms["all_reduce", _both] = _form and partial(twice, _form)


def closed_form(
    operation: str,
    algorithm: str,
    p: int,
    nbytes: int,
    links: str = "switch",
    segment_bytes: int | None = None,
) -> Cost:
    """Return the cost of `algorithm` on p ranks for an array of `nbytes` bytes, a multiple of p.

    Args:
        operation, algorithm: their names, such as "all_reduce" and "ring".
        p: the number of ranks.
        nbytes: the result of a gather or all-gather, the input of one rank in an all-to-all, the
            input of the others.
        links: "switch", `Network()`; "ring", `Network.ring()`; "one_way_ring",
            `Network.ring(bidirectional=False)`. On rings the root is at position 0; for another
            root, run it on backend="sim".
        segment_bytes: as in `broadcast` and `reduce`, for "pipelined_chain" only.

    Raises ValueError for an unknown operation, algorithm or kind of links, for p < 1, if p does not
    divide `nbytes`, for segments where there are none, and where these links have no simple form.

    Example:
        >>> p101.cost.closed_form("all_reduce", "ring", 8, 1_000_000)
        Cost(steps=14, sent=1750000, path=1750000)
    """
    algorithm = present_name(algorithm, FORMS.get(operation, {}))
    if algorithm not in FORMS.get(operation, {}):
        raise ValueError(
            f"no closed form for {operation!r} by {algorithm!r}: expected one of "
            f"{', '.join(FORMS.get(operation, FORMS))}"
        )
    if links != "switch" and links not in RINGS:
        raise ValueError(
            f"links={links!r}: expected 'switch', {', '.join(map(repr, RINGS))}. Others: "
            "torus_form and two_level_form"
        )
    if type(p) is not int or type(nbytes) is not int or p < 1 or nbytes < 0 or nbytes % p:
        raise ValueError(
            f"p={p}, nbytes={nbytes}: expected an array that splits into p equal blocks. Pad "
            "it to a multiple of p"
        )
    check_segment_bytes(segment_bytes, algorithm, element=1)
    if p == 1 or (nbytes == 0 and operation != "barrier"):  # no message for an empty array
        return Cost(0, 0, 0)
    options = {"segment_bytes": segment_bytes} if algorithm == "pipelined_chain" else {}
    cost = Cost(*FORMS[operation][algorithm](p, nbytes, nbytes // p, **options))
    if (operation, algorithm) in FOLDED and not power_of_two(p):
        fold = FOLDED[operation, algorithm]
        cost = Cost(*fold(sent_by_rank_0(p), lg_down(p), nbytes, nbytes // p))
    if links == "switch" or (operation, algorithm) not in RINGS[links]:
        return cost
    form = RINGS[links][operation, algorithm]
    on_ring = form and form(p, nbytes, nbytes // p, **options)
    if on_ring is None:
        raise ValueError(
            f"{operation} by {algorithm} has no simple closed form on links={links!r} for "
            f"p={p}: run it on backend='sim' and read "
            "run.trace.makespan. Each rank sends as many bytes as on a switch"
        )
    return cost._replace(steps=on_ring[0], path=on_ring[-1])


def ring_cost(operation: str, p: int, nbytes: float) -> Cost:
    """Return the cost of a collective by rings, of p ranks and any number of bytes.

    NCCL's, torch's own on the simulator, and the planner's: of all-gather, reduce-scatter and
    all-reduce "ring"; of gather, scatter and all-to-all as many steps and bytes as an all-gather;
    of broadcast and reduce a chain in very small pieces; of a barrier the all-reduce of nothing.
    """
    passes = 2 if operation in ("all_reduce", "barrier") else 1
    path: Any = passes * (p - 1) * (nbytes / p)
    if operation in ("broadcast", "reduce", "barrier"):
        path = nbytes if operation != "barrier" else 0
    return Cost(passes * (p - 1), path, path) if p > 1 else Cost(0, 0, 0)


def lg_up(p: int) -> int:
    """Return ⌈lg p⌉."""
    return (p - 1).bit_length()


def lg_down(p: int) -> int:
    """Return ⌊lg p⌋."""
    return p.bit_length() - 1


def power_of_two(p: int) -> bool:
    return p & (p - 1) == 0


def sent_by_rank_0(p: int) -> int:
    """Return the blocks that rank 0 sends in recursive doubling if p isn't a power of two.

    It works for two ranks, as do the others in a pair.
    """
    pairs = p - (1 << lg_down(p))
    return sum(width + min(width, pairs) for width in (1 << k for k in range(lg_down(p))))


def ones(p: int) -> int:
    """Return the number of bits set in 0 … p − 1; for a power of two, p lg p / 2.

    In Bruck's all-to-all a rank sends as many blocks.
    """
    return sum(j.bit_count() for j in range(p))


def load(d: int, p: int) -> int:
    """Return the messages on the busiest link of a ring if every rank sends d places to the right.

    To the opposite rank, half of them go left.
    """
    return -(-p // 4) if 2 * d == p else min(d, p - d)


def all_pairs(p: int) -> int:
    """Return the messages on the busiest link of a ring if all ranks send to all: p² / 8."""
    return -(-(p * p - 1) // 8)


def bruck(p: int, n: int, hops: Callable[[int, int], int]) -> tuple[int, int]:
    """Return the cost if every rank sends 1, 2, 4, … blocks of n bytes as many places to the left.

    The last message has only the blocks that are missing.

    Args: hops: of the messages over the busiest link, if all ranks send d places to the left.
    """
    widths = [1 << k for k in range(lg_up(p))]
    return sum(hops(w, p) for w in widths), sum(hops(w, p) * min(w, p - w) for w in widths) * n
