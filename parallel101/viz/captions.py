"""The sentence of a step: who sends what to whom, and what becomes of it.

ring, every rank sends, what arrives is added ──▶ "Each rank sends a partial sum to the next rank, which adds it to its own."
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from parallel101.analysis.replay import START, History
from parallel101.analysis.verdict import Outcome, chunk_name, data_of
from parallel101.record.trace import P2P
from parallel101.record.units import human_bytes, labels, listed, ranks, sentence

# ── What a picture says of a run as a whole: its title, its phases, the facts at the right, and what went wrong where.


NOT_KEPT = ("What was in the messages was not kept:", "p101.watch(fn) shows whose data it is.")
NO_ORIGIN = ("These values do not tell whose data is in them:", "p101.watch(fn) follows sums and copies, not means or products.")
TOO_MANY = ("More ranks or chunks than can be drawn one by one:", "fewer show what is inside a message.")


class Words:
    """All that a picture of a history says."""

    def __init__(self, history: History):
        self.history = history
        self.outcome = Outcome(history)
        self.op = self.outcome.operation
        self.phases = [self._phase(step) for step in range(history.steps)]

    @cached_property
    def title(self) -> str:
        """ "Ring all-reduce" where the values prove it, and otherwise what the messages look like."""
        n, layout = len(self.history.ranks), self.history.layout
        if n == 1:
            return "One rank"
        if self.op is None:
            shapes = {"ring": f"a ring of {n} ranks", "chain": f"a chain of {n} ranks", "star": f"rank {layout.root} and {n - 1} others",
                      "tree": f"a tree of {n} ranks", "grid": f"a grid of {n} ranks"}  # fmt: skip
            place = shapes.get(layout.kind, f"{n} ranks") if self.history.messages else f"{n} ranks"
            return f"Messages on {place}" if n > 2 else "Messages between two ranks"
        if not self.history.messages:
            return self.op.capitalize()
        if n == 2:
            return f"{self.op.capitalize()} on two ranks"
        prefixes = {"ring": "Bidirectional ring" if layout.both_ways else "Ring", "chain": "Chain", "star": "Flat", "tree": "Tree"}
        prefix = prefixes.get(layout.kind, self._algorithm)
        return f"{prefix} {self.op}" if prefix else self.op.capitalize()

    @cached_property
    def intro(self) -> str:
        """What is so before the first step."""
        history = self.history
        if len(history.ranks) == 1:
            return "One rank has nobody to send to."
        if not history.messages:
            torchs = sorted({e.kind for e in history.trace.events} - P2P - {"span"})
            by_torch = f"torch's own {listed(torchs)} moved the data: the record has the calls and not the messages inside."
            return by_torch[0].upper() + by_torch[1:] if torchs else "No message from one rank to another is in this record."
        if not history.known:
            return f"{_count(len(history.messages), 'message')} between {len(history.ranks)} ranks."
        holders = [r for r in history.ranks if any(any(history.cells[r, c][0][1]) for c in range(len(history.columns)))]
        return f"Rank {holders[0]} begins with all of the data." if len(holders) == 1 else "Each rank begins with data of its own."

    @cached_property
    def size(self) -> str:
        """The line at the top right: "4 ranks · gloo · 64 B in 4 chunks"."""
        history, trace = self.history, self.history.trace
        n = _count(trace.world_size, "rank")
        head = (f"{len(history.ranks)} of {n}" if len(history.ranks) != trace.world_size else n) + f" · {trace.backend}"
        if not history.known:
            return f"{head} · {_count(len(history.messages), 'message')}"
        width = next((m.nbytes // len(m.payload) for m in history.messages if m.payload), 0)
        size = human_bytes(width * sum(column.elements for column in history.columns))
        k = len(history.columns)
        parts = [size] * bool(width) + [f"{k} chunks"] * (k > 1)
        return head + (" · " + " in ".join(parts) if parts else "")

    def sent(self, step: int) -> str:
        """The line below it: what was sent up to and with a step."""
        sent = self.history.sent_bytes(step)
        most = max(sent.values(), default=0)
        if most == 0:
            return "" if not self.history.messages else "nothing sent yet" if step < 0 else "0 B sent so far"
        if len(set(sent.values())) == 1:
            return f"{human_bytes(most)} sent by each rank so far"
        busiest = [rank for rank, nbytes in sent.items() if nbytes == most]
        who = f"rank {busiest[0]}" if len(busiest) == 1 else f"each of {len(busiest)} ranks"
        return f"{human_bytes(most)} sent by {who} so far, {human_bytes(sum(sent.values()))} in all"

    def new_fault(self, step: int) -> str:
        """What went wrong in this step: data that some rank now has in a sum more than once, and none had before."""
        found: dict[tuple[int, int], list[int]] = {}
        for (rank, column), states in sorted(self.history.cells.items()):
            for (_, before), (moment, after) in zip(states, states[1:], strict=False):
                for origin, count in enumerate(after):
                    if step <= moment < step + 1 and count > max(1, before[origin], self._most_before(column, origin, step)):
                        found.setdefault((rank, column), []).append(origin)
        if not found:
            return ""
        (rank, column), origins = next(iter(found.items()))
        return f"On rank {rank}, {chunk_name(self.history, column)} now has {data_of(origins)} more than once."

    def _most_before(self, column: int, origin: int, step: int) -> int:
        states = [state for rank in self.history.ranks for state in self.history.cells[rank, column]]
        return max((counts[origin] for moment, counts in states if START < moment < step), default=0)

    def _phase(self, step: int) -> str:
        """What a step does, in a word for the step's ring."""
        history = self.history
        added = {landing.added for i in history.in_step(step) for landing in history.landings[i]} if history.known else set()
        if not added:
            return ""
        if self.op != "all-reduce":
            return self.op or ("add, copy" if len(added) > 1 else "add" if True in added else "copy")
        if all(landing.added for message in history.landings for landing in message):
            return "all-reduce"
        parts = len(history.columns) > 1
        if added == {True}:
            return "reduce-scatter" if parts else "reduce"
        return "all-gather" if parts else "broadcast"

    @cached_property
    def _algorithm(self) -> str:
        """What ranks on a circle or a grid do, where the record is unmistakable."""
        history = self.history
        n, links = len(history.ranks), history.layout.links
        if history.layout.bent:
            return "Torus"
        rounds = (1, 2) if self.op == "all-reduce" else (1,)  #  more of them pass on what others sent
        if len(links) == n * (n - 1) and len(history.messages) in [len(links) * k for k in rounds]:
            return "Direct"
        if n & (n - 1) or not all((a ^ b) & ((a ^ b) - 1) == 0 for a, b in links):
            return ""
        if any(len({history.messages[i].src for i in history.in_step(step)}) < n for step in range(history.steps)):
            return ""  #  in doubling and halving everyone sends in every step; up and down a tree they do not
        sizes = [max(history.messages[i].nbytes for i in history.in_step(step)) for step in range(history.steps)]
        grows = any(b > a for a, b in zip(sizes, sizes[1:], strict=False))
        shrinks = any(b < a for a, b in zip(sizes, sizes[1:], strict=False))
        return "Halving and doubling" if grows and shrinks else "Recursive-halving" if shrinks else "Recursive-doubling"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


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
