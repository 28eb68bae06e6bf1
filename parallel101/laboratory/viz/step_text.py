"""Puts one step of an algorithm into words: who sends to whom, and what the messages contain.

    every rank sends to the rank on its right, a sum of two ranks' data
        ──▶  "each rank sends a partial sum to its right neighbour"

captions.py puts these words into sentences.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.units import chunk_letters, ranks_text


class StepWords(NamedTuple):
    """Who sends to whom in a step, in words and as facts about the sentence."""

    senders: str
    send: str  # the verb: "sends" or "send"
    receivers: str
    ring: bool  # every rank sends along the ring
    exchange: bool  # ranks exchange in pairs
    many_senders: bool  # `senders` is a plural
    many_receivers: bool  # `receivers` is a plural


def route_of(replay: Replay, indices: list[int]) -> StepWords:
    messages = [replay.messages[i] for i in indices]
    senders, receivers = sorted({m.src for m in messages}), sorted({m.dst for m in messages})
    pairs = {(m.src, m.dst) for m in messages}
    everyone = senders == replay.ranks
    ring = everyone and replay.topology.kind == "ring"
    exchange = not ring and len(pairs) > 1 and all((dst, src) in pairs for src, dst in pairs)
    who = "each rank" if everyone else ranks_text(senders)
    many = exchange or (not everyone and len(senders) > 1)
    if ring:
        to = (
            _neighbour(replay, pairs)
            if len(pairs) == len(senders)
            else "each of its two neighbours"
        )
        return StepWords(who, "sends", to, True, False, False, False)
    if everyone and len(receivers) > 1:
        return StepWords(who, "sends", "another rank", False, exchange, many, False)
    to = ranks_text(receivers) if len(receivers) <= 4 else f"{len(receivers)} others"
    return StepWords(
        who, "send" if many else "sends", to, False, exchange, many, len(receivers) > 1
    )


def _neighbour(replay: Replay, pairs: set[tuple[int, int]]) -> str:
    """The rank to which each rank of a ring sends.

    The right neighbour of a rank is the one with the next higher number.
    """
    n = len(replay.ranks)
    place = {rank: i for i, rank in enumerate(replay.ranks)}
    shifts = {(place[dst] - place[src]) % n for src, dst in pairs}
    if shifts == {1}:
        return "its right neighbour"
    return "its left neighbour" if shifts == {n - 1} else "the next rank"


def contents_of(replay: Replay, indices: list[int], route: StepWords) -> tuple[str, bool]:
    """What the messages contain, in words, and whether that is a plural."""
    landings = [landing for i in indices for landing in replay.landings[i]]
    if not landings and any(replay.unwritten[i] for i in indices):
        return "memory that was never written", False
    if not landings:
        return (
            ("messages without data", True)
            if route.many_senders
            else ("a message without data", False)
        )
    whole = len(replay.chunks) == 1
    if len(indices) == 1 and not whole:
        names = [replay.chunks[landing.chunk].label for landing in landings]
        return f"chunk{'s' if len(names) > 1 else ''} {chunk_letters(names)}", len(names) > 1
    plural = route.many_senders or max(len(replay.landings[i]) for i in indices) > 1
    their = "their" if route.many_senders else "its"
    own = all(
        sum(x.carried) == 1 == x.carried[replay.messages[i].src]
        for i in indices
        for x in replay.landings[i]
    )
    if not replay.sums:
        fresh = own and all(
            replay.chunks[x.chunk].stripes == (replay.messages[i].src,)
            for i in indices
            for x in replay.landings[i]
        )
        if whole:
            return "the data", False
        if fresh and len(indices) > 1:
            return f"{their} own chunk{'s' if plural else ''}", plural
        counts = {len(replay.landings[i]) for i in indices}
        several = (
            f"{counts.pop()} chunks" if len(counts) == 1 and not route.many_senders else "chunks"
        )
        return (several if plural else "a chunk"), plural
    if any(landing.added for landing in landings):
        if not own:
            return ("partial sums" if plural else "a partial sum"), plural
        return (
            (f"{their} data", False)
            if whole
            else (f"{their} chunks" if plural else "a chunk", plural)
        )
    finished = all(
        landing.carried[r] == 1
        for landing in landings
        for r in replay.chunks[landing.chunk].stripes
    )
    kind = "finished " if finished else ""
    if whole:
        return f"the {kind}sum", False
    return (f"{kind}chunks" if plural else f"a {kind}chunk"), plural
