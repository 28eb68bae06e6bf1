"""The closed forms of the algorithms that follow the axes of a mesh, on the networks made for them.

    torus        all axes and both directions at once: Σ (pᵢ − 1) steps, and n(p−1)/p bytes over 2k
                 links on k axes of one length
                 all-to-all: every axis takes as long as the longest, m: about nm/8 bytes, which is
                 the scaling book's V · m / (4 · N · W)
    two_level    inside the nodes and across them, two times that add up

See closed_forms.py for what is counted, and collectives/torus.py and all_reduce.py for the
algorithms.

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
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from parallel101.cost.closed_forms import Cost, all_pairs, closed_form

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
