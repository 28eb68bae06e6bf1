"""Bytes of attention over a time axis that is cut: ring attention and Ulysses.

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

from typing import NamedTuple


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
