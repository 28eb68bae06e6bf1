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

Algorithms that follow the axes of a mesh, on the networks made for them:

    torus        all axes and both directions at once: Σ (pᵢ − 1) steps, and n(p−1)/p bytes over 2k
                 links on k axes of one length
                 all-to-all: every axis takes as long as the longest, m: about nm/8 bytes, which is
                 the scaling book's V · m / (4 · N · W)
    two_level    inside the nodes and across them, two times that add up

See collectives/torus.py and all_reduce.py for these algorithms.

Attention over a time axis that is cut, by ring attention and by Ulysses, sends these bytes:

    n ranks, h heads of width d, of which g with keys and values, a time of T over all ranks

    forward    ring      2g · T/n · d · (n−1)        keys and values, to the next rank
               Ulysses   2(h+g) · T/n · d · (n−1)/n  q, k, v and the result, each an all-to-all
    backward   ring      2g · T/n · d · (n−1 + n)    keys and values again, and their gradients
               Ulysses   as forward

Forward, ring attention sends less if n < 1 + h/g. With as many heads of keys as of queries, h = g,
both send the same at n = 2, and beyond that Ulysses sends less. Grouped queries often reverse it:
Ulysses needs n to divide g, so the 64 heads and 8 kv heads of Llama 3 70B allow n ≤ 8, and ring
attention sends less there (forward alone). Tests compare these bytes with those of a run.

Not here: the time of the additions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
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


Blocks = tuple[int, ...]  # steps, blocks sent, blocks on the critical path
Form = Callable[..., Any]  # returns Blocks; None where there is no simple form


def alike(steps: int, blocks: int = 1) -> Blocks:
    """Return the cost of steps that each send some blocks, all on the critical path."""
    return steps, steps * blocks, steps * blocks


def one_by_one(p: int) -> Blocks:
    """Return the cost of a block to or from each other rank, in as many steps."""
    return alike(p - 1)


def by_doubling(p: int) -> Blocks:
    """Return the cost of 1, 2, 4, … blocks in ⌈lg p⌉ steps."""
    return lg_up(p), p - 1, p - 1


def pipelined_chain(p: int, n: int, segment: int) -> Blocks:
    """Return the cost of a chain, in bytes: its last rank waits for p − 2 segments first."""
    return p - 2 + -(-n // segment), n, n + (p - 2) * min(n, segment)


def twice(form: Form) -> Form:
    return lambda p: (once := form(p)) and tuple(2 * number for number in once)


def for_powers(form: Form) -> Form:
    """Return the form for powers of two, and None for any other p."""
    return lambda p: form(p) if power_of_two(p) else None


# By operation and algorithm, for p ≥ 2 ranks and an array of p blocks: the result of a gather or
# all-gather, the input of one rank in an all-to-all, the input of the others; a barrier's is a
# byte. Sources: Thakur, Rabenseifner, Gropp (2005), section 4, and Chan et al. (2007), tables 1 to
# 3. The forms with ⌈⌉ are counted from the code. Those of a chain get its bytes and its segment's.
RING_FORMS = dict.fromkeys(("direct", "ring", "bidirectional_ring"), one_by_one)
FORMS: dict[str, dict[str, Form]] = {
    "broadcast": {
        "flat": lambda p: alike(p - 1, p),
        "binomial": lambda p: alike(lg_up(p), p),
        "pipelined_chain": pipelined_chain,
        "scatter_all_gather": lambda p: (lg_up(p) + p - 1, 2 * (p - 1), 2 * (p - 1)),
    },
    "scatter": {"flat": one_by_one, "binomial": by_doubling},
    "gather": {
        "flat": lambda p: (p - 1, 1, p - 1),
        "binomial": lambda p: (lg_up(p), p // 2, p - 1),
    },
    "reduce": {
        "flat": lambda p: (p - 1, p, (p - 1) * p),
        "binomial": lambda p: (lg_up(p), p, lg_up(p) * p),
        "pipelined_chain": pipelined_chain,
        "reduce_scatter_gather": lambda p: (p - 1 + lg_up(p), p - 1 + p // 2, 2 * (p - 1)),
    },
    # half of a bidirectional ring's bytes are on links that carry both directions
    "all_gather": {**RING_FORMS, "recursive_doubling": by_doubling, "bruck": by_doubling},
    "reduce_scatter": {**RING_FORMS, "recursive_halving": by_doubling},
    "all_reduce": {
        "reduce_broadcast": lambda p: (2 * lg_up(p), lg_up(p) * p, 2 * lg_up(p) * p),
        **dict.fromkeys(RING_FORMS, twice(one_by_one)),
        "recursive_doubling": lambda p: alike(lg_up(p), p),
        "rabenseifner": twice(by_doubling),
    },
    "all_to_all": {
        **dict.fromkeys(("direct", "pairwise"), one_by_one),
        "bruck": lambda p: (lg_up(p), ones(p), ones(p)),
    },
    "barrier": {"dissemination": lambda p: alike(lg_up(p))},
}
# where they differ if p isn't a power of two; s: the blocks that rank 0 sends, lg: ⌊lg p⌋
FOLDED: dict[tuple[str, str], Callable[[int, int, int], Blocks]] = {
    ("all_gather", "recursive_doubling"): lambda p, s, lg: (lg + 2, s + p, 1 + s + p),
    ("reduce_scatter", "recursive_halving"): lambda p, s, lg: (lg + 2, p, p + s + 1),
    ("all_reduce", "recursive_doubling"): lambda p, s, lg: (lg + 2, (lg + 1) * p, (lg + 2) * p),
    ("all_reduce", "rabenseifner"): lambda p, s, lg: (2 * lg + 2, 2 * p - 2 + s, 2 * p + 2 * s),
}


# On rings: steps, …, blocks on the path by operation and algorithm, where they differ from those on
# a switch. None: there is no simple form, because the cost depends on the order in which messages
# of several rounds reach a link. Counted from the code, like the forms with ⌈⌉ above.
DIRECT = [("all_gather", "direct"), ("all_to_all", "direct")]
PAIRWISE = [*DIRECT, ("all_to_all", "pairwise")]
TO_HALF = [("scatter", "flat"), ("gather", "flat"), ("all_gather", "bidirectional_ring")]
MIXED = [("all_gather", "recursive_doubling"), ("all_reduce", "recursive_doubling")]
MIXED += [("all_to_all", "bruck"), ("barrier", "dissemination")]
RINGS: dict[str, dict[tuple[str, str], Form]] = {
    "ring": {
        ("broadcast", "flat"): lambda p: alike(p // 2, p),  # the root's two links work at once
        **dict.fromkeys(TO_HALF, lambda p: alike(p // 2)),
        **dict.fromkeys(DIRECT, lambda p: alike(all_pairs(p))),
        ("all_to_all", "pairwise"): lambda p: alike(sum(load(d, p) for d in range(1, p))),
        ("all_gather", "bruck"): for_powers(lambda p: bruck(p, load)),
        **dict.fromkeys(MIXED, lambda p: None),
    },
    "one_way_ring": {  # to a rank d places to the left it is p − d to the right
        ("gather", "binomial"): lambda p: (p - 1, ones(p)),
        ("reduce", "binomial"): lambda p: alike(p - 1, p),
        ("reduce", "pipelined_chain"): lambda p, n, size: ((p - 1) * -(-n // size), (p - 1) * n),
        ("reduce", "reduce_scatter_gather"): lambda p: (2 * (p - 1), p - 1 + ones(p)),
        **dict.fromkeys(PAIRWISE, lambda p: alike(p * (p - 1) // 2)),
        ("all_gather", "bidirectional_ring"): lambda p: alike(p // 2 + (p - 1) // 2 * (p - 1)),
        ("all_gather", "recursive_doubling"): for_powers(lambda p: (ones(p), p * (p - 1) // 2)),
        ("all_gather", "bruck"): lambda p: bruck(p, lambda d, p: p - d),
        ("all_reduce", "reduce_broadcast"): lambda p: alike(p - 1 + lg_up(p), p),
        ("all_reduce", "recursive_doubling"): for_powers(lambda p: alike(ones(p), p)),
        ("all_to_all", "bruck"): lambda p: ((1 << lg_up(p)) - 1, p * (p - 1) // 2),
        ("barrier", "dissemination"): lambda p: alike((1 << lg_up(p)) - 1),
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
        _forms["all_reduce", _both] = twice(_form)


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
        expected = f"expected 'switch', {', '.join(map(repr, RINGS))}"
        raise ValueError(f"links={links!r}: {expected}. Others: torus_form and two_level_form")
    if type(p) is not int or type(nbytes) is not int or p < 1 or nbytes < 0 or nbytes % p:
        raise ValueError(
            f"p={p}, nbytes={nbytes}: expected an array that splits into p equal blocks. Pad "
            "it to a multiple of p"
        )
    check_segment_bytes(segment_bytes, algorithm, element=1)
    if p == 1 or (nbytes == 0 and operation != "barrier"):  # no message for an empty array
        return Cost(0, 0, 0)
    arguments, nbytes_of_block = [p], nbytes // p if operation != "barrier" else 1
    if algorithm == "pipelined_chain":
        arguments, nbytes_of_block = [p, nbytes, segment_size(p, nbytes, segment_bytes)], 1
    key = operation, algorithm
    on_links = on_switch = FORMS[operation][algorithm](*arguments)
    if key in FOLDED and not power_of_two(p):
        on_links = on_switch = FOLDED[key](p, sent_by_rank_0(p), lg_down(p))
    if links != "switch" and key in RINGS[links]:
        on_links = RINGS[links][key](*arguments)
    if on_links is None:
        raise ValueError(
            f"{operation} by {algorithm} has no simple closed form on links={links!r} for "
            f"p={p}: run it on backend='sim' and read "
            "run.trace.makespan. Each rank sends as many bytes as on a switch"
        )
    steps, sent, path = on_links[0], on_switch[1], on_links[-1]
    return Cost(steps, sent * nbytes_of_block, path * nbytes_of_block)


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


def bruck(p: int, hops: Callable[[int, int], int]) -> Blocks:
    """Return the cost if every rank sends 1, 2, 4, … blocks as many places to the left.

    The last message has only the blocks that are missing.

    Args: hops: of the messages over the busiest link, if all ranks send d places to the left.
    """
    widths = [1 << k for k in range(lg_up(p))]
    return sum(hops(w, p) for w in widths), sum(hops(w, p) * min(w, p - w) for w in widths)


# ── along the axes of a mesh ──

ON_A_TORUS = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"


def torus_form(operation: str, shape: Sequence[int], nbytes: int) -> Cost:
    """Return the cost of "torus" on a mesh of this shape, on `Network.torus(shape)`.

    All axes and directions work at once, each with a part of every block. On k axes of the same
    length above 2 that takes Σ (pᵢ − 1) steps, with n(p−1)/p / 2k bytes on the critical path, and
    all-reduce twice that. If lengths differ, parts meet on the longer axes, so what each step takes
    is added up here. On an axis of length 2 both directions are one link. The scaling book counts Σ
    pᵢ/2 hops: there each part is gathered to both sides at once, here it goes round in one
    direction.

    Args:
        operation: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        shape: of the mesh.
        nbytes: the result of an all-gather, the input of one rank in an all-to-all, the input of
            the others.

    Raises ValueError for other values, and if the p blocks can't be cut into 2k equal parts each (k
    parts in an all-to-all).
    """
    lengths = [length for length in shape if length > 1]
    p, parts = math.prod(shape), len(lengths) * (1 if operation == "all_to_all" else 2)
    if operation not in ON_A_TORUS:
        raise ValueError(
            f"{operation!r}: expected {', '.join(ON_A_TORUS)}. For flat algorithms call closed_form"
        )
    if not shape or p < 1 or nbytes < 0 or nbytes % (p * max(parts, 1)):
        raise ValueError(
            f"shape={tuple(shape)}, nbytes={nbytes}: expected {p} blocks, each of {parts} "
            "equal parts"
        )
    if p == 1 or nbytes == 0:
        return Cost(0, 0, 0)
    if operation == "all_to_all":
        sent = sum(nbytes // length * (length - 1) for length in lengths)
        # in each of the k rounds, every axis carries another part
        path = max(all_pairs(length) * (nbytes // length) for length in lengths)
        return Cost(parts * max(map(all_pairs, lengths)), sent, path)
    steps = path = 0
    for messages in zip_longest(*(steps_of(first, lengths) for first in range(len(lengths)))):
        count, pieces = Counter[int](), Counter[int]()  # by axis
        for axis, width in filter(None, messages):
            both = 2 if lengths[axis] == 2 else 1  # the parts in both directions go over one link
            count[axis] += both
            pieces[axis] += both * width
        steps += max(count.values())
        path += max(pieces.values())
    passes, block = 2 if operation == "all_reduce" else 1, nbytes // p
    return Cost(passes * steps, passes * (p - 1) * block, passes * path * block // parts)


def steps_of(first: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the steps of the part that begins with axis `first`.

    Each is the axis, and how many pieces of blocks the message has.
    """
    width, steps = 1, []
    for axis in (*range(first, len(lengths)), *range(first)):
        steps += [(axis, width)] * (lengths[axis] - 1)
        width *= lengths[axis]
    return steps


class TwoLevelCost(NamedTuple):
    """The cost inside a node and across nodes, which add up.

    inside.seconds(…) + across.seconds(…), each with its own latency and bandwidth.
    """

    inside: Cost  # a node
    across: Cost  # the link of a node, or one of its rails, which some of its ranks share


def two_level_form(shape: Sequence[int], nbytes: int, rails: int = 1) -> TwoLevelCost:
    """Return the cost of all-reduce by "two_level" for a mesh of (nodes, ranks per node).

    The network is `Network.two_level(ranks per node, rails=rails)`. A rail has bandwidth / rails,
    so the time across nodes is `across.seconds(latency, bandwidth / rails)`. The scaling book takes
    the longer of the two times, because it overlaps the levels; "two_level" does one after the
    other. A flat "ring" over all ranks has the steps and bytes there that it has on a switch, at
    the latency and bandwidth of one rail, since one rank of each node sends to the next.
    Raises ValueError for other shapes or numbers of rails, and if the array can't be cut into equal
    blocks.
    """
    if len(shape) != 2 or min(shape) < 1 or nbytes < 0 or nbytes % math.prod(shape):
        raise ValueError(
            f"shape={tuple(shape)}, nbytes={nbytes}: expected (nodes, ranks per node), and as "
            "many equal blocks"
        )
    nodes, ranks = shape
    if not 1 <= rails <= ranks:
        raise ValueError(f"rails={rails}: expected 1 to {ranks}, the ranks of a node")
    inside = closed_form("all_reduce", "ring", ranks, nbytes)
    steps, sent, path = closed_form("all_reduce", "ring", nodes, nbytes // ranks)
    on_a_rail = -(-ranks // rails)
    return TwoLevelCost(inside, Cost(steps * on_a_rail, sent, path * on_a_rail))


# ── attention over a time axis that is cut ──


class AttentionBytes(NamedTuple):
    """The bytes that each rank sends."""

    forward: int
    backward: int


class AttentionShape(NamedTuple):
    """An attention layer, and how its time is cut.

    Attributes:
        ranks: n, which divides the time.
        time: of the whole sequence.
        heads: of the queries.
        kv_heads: of keys and values; they divide the heads.
        width: of a head.
        batch: sequences.
        itemsize: bytes of a number.
    """

    ranks: int
    time: int
    heads: int
    kv_heads: int
    width: int
    batch: int = 1
    itemsize: int = 2


def ring_attention_bytes(of: AttentionShape) -> AttentionBytes:
    """Return the bytes that each rank sends in ring attention.

    The gradients of keys and values travel in 32 bit at least. Raises ValueError for sizes that
    don't fit each other.
    """
    block = 2 * of.kv_heads * rows(of) * of.width
    gradients = of.ranks * block * max(4, of.itemsize) if of.ranks > 1 else 0
    forward = (of.ranks - 1) * block * of.itemsize
    return AttentionBytes(forward, forward + gradients)


def ulysses_bytes(of: AttentionShape) -> AttentionBytes:
    """Return the bytes that each rank sends in Ulysses.

    Raises ValueError for sizes that don't fit each other.
    """
    if of.heads % of.ranks or of.kv_heads % of.ranks:
        raise ValueError(
            f"{of.heads} heads of q and {of.kv_heads} of k and v over {of.ranks} ranks: expected a "
            "number of ranks that divides both"
        )
    block = 2 * (of.heads + of.kv_heads) * rows(of) * of.width * of.itemsize
    sent = block // of.ranks * (of.ranks - 1)
    return AttentionBytes(sent, sent)


def rows(of: AttentionShape) -> int:
    """Return the number of rows on a rank: batch · time / ranks."""
    if min(of) < 1 or of.time % of.ranks or of.heads % of.kv_heads:
        raise ValueError(
            f"{of}: expected numbers of 1 or more, a time that the ranks divide evenly, and heads "
            "that are a multiple of kv_heads"
        )
    return of.batch * of.time // of.ranks
