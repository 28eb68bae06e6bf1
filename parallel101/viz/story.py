"""The sentence of a step: who sends what to whom, and what becomes of it.

ring, every rank sends, what arrives is added ──▶ "Each rank sends a partial sum to the next rank, which adds it to its own."
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.viz.history import History
from parallel101.viz.units import human_bytes, labels, ranks, sentence


class Cast(NamedTuple):
    """Who takes part in a step, in words."""

    who: str
    send: str  #  the verb: "sends" or "send"
    to: str
    onward: bool  #  round a ring, every rank to its neighbours
    swap: bool  #  ranks that exchange with each other
    many: bool  #  more than one sender is meant by `who`
    hearers: bool  #  more than one receiver is meant by `to`


def step_sentence(history: History, step: int) -> str:
    """What happens in a step."""
    indices = history.in_step(step)
    cast = _cast(history, indices)
    if not history.known:
        sizes = [history.messages[i].nbytes for i in indices]
        size = human_bytes(max(sizes)) if min(sizes) == max(sizes) else f"up to {human_bytes(max(sizes))}"
        return sentence(f"{cast.who} {cast.send} {size} to {cast.to}")
    what, plural = _cargo(history, indices, cast)
    modes = {landing.added for i in indices for landing in history.landings[i]}
    added = modes == {True}
    if cast.swap:
        who = "two by two, the ranks" if len(history.ranks) > 2 else "the two ranks"
        then = "add what they get to their own" if added else "keep what they get" if modes <= {False} else "add it or keep it"
        return sentence(f"{who} exchange {what} and {then}")
    if added:
        them = "them" if plural else "it"
        tail = f"add {them} to their own" if cast.hearers else f"adds {them} to its own"
        return sentence(f"{cast.who} {cast.send} {what} to {cast.to}, which {tail}")
    if len(modes) > 1:
        return sentence(f"{cast.who} {cast.send} {what} to {cast.to}, added there or put in place of what was")
    if cast.onward:
        return sentence(f"{cast.who} passes {what} on; {cast.to} {'copy' if cast.hearers else 'copies'} {'them' if plural else 'it'}")
    return sentence(f"{cast.who} {cast.send} {what} to {cast.to}")


def _cast(history: History, indices: list[int]) -> Cast:
    messages = [history.messages[i] for i in indices]
    senders, receivers = sorted({m.src for m in messages}), sorted({m.dst for m in messages})
    pairs = {(m.src, m.dst) for m in messages}
    everyone = senders == history.ranks
    onward = everyone and history.layout.kind == "ring"
    both_ways = onward and len(pairs) > len(senders)
    swap = not onward and len(pairs) > 1 and all((dst, src) in pairs for src, dst in pairs)
    who = "each rank" if everyone else ranks(senders)
    many = swap or (not everyone and len(senders) > 1)
    if onward:
        return Cast(who, "sends", "both neighbours" if both_ways else "the next rank", True, False, False, both_ways)
    if everyone and len(receivers) > 1:
        return Cast(who, "sends", "another rank", False, swap, many, False)
    to = ranks(receivers) if len(receivers) <= 4 else f"{len(receivers)} others"
    return Cast(who, "send" if many else "sends", to, False, swap, many, len(receivers) > 1)


def _cargo(history: History, indices: list[int], cast: Cast) -> tuple[str, bool]:
    """What the messages carry, in words, and whether that is a plural."""
    landings = [landing for i in indices for landing in history.landings[i]]
    if not landings:
        return ("messages without data", True) if cast.many else ("a message without data", False)
    whole = len(history.columns) == 1
    if len(indices) == 1 and not whole:
        names = [history.columns[landing.column].label for landing in landings]
        return f"chunk{'s' if len(names) > 1 else ''} {labels(names)}", len(names) > 1
    plural = cast.many or max(len(history.landings[i]) for i in indices) > 1
    their = "their" if cast.many else "its"
    own = all(sum(x.carried) == 1 == x.carried[history.messages[i].src] for i in indices for x in history.landings[i])
    if not history.sums:
        fresh = own and all(history.columns[x.column].stripes == (history.messages[i].src,) for i in indices for x in history.landings[i])
        if whole:
            return "the data", False
        if fresh and len(indices) > 1:
            return f"{their} own chunk{'s' if plural else ''}", plural
        return ("chunks" if plural else "a chunk"), plural
    if any(landing.added for landing in landings):
        if not own:
            return ("partial sums" if plural else "a partial sum"), plural
        return (f"{their} own data", False) if whole else (f"{'chunks' if plural else 'a chunk'} of {their} own", plural)
    finished = all(landing.carried[r] == 1 for landing in landings for r in history.columns[landing.column].stripes)
    kind = "finished " if finished else ""
    if whole:
        return f"the {kind}sum", False
    return (f"{kind}chunks" if plural else f"a {kind}chunk"), plural
