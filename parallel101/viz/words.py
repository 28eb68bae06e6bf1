"""The sentences of a picture, derived from the record: its title, what happens in each step, and the facts at the right.

ring, every rank sends, what arrives is added ──▶ "Each rank sends a partial sum to the next rank, which adds it to its own."
"""

from __future__ import annotations

from functools import cached_property

from parallel101.viz.history import START, History, Landing
from parallel101.viz.units import human_bytes, labels, ranks, sentence
from parallel101.viz.verdict import Outcome, chunk_name, ranks_are

NO_ORIGIN = ("These values carry no origin:", "p101.watch(fn) shows what is inside a message.")


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
            return f"Messages on {shapes.get(layout.kind, f'{n} ranks')}" if n > 2 else "Messages between two ranks"
        if n == 2:
            return f"{self.op.capitalize()} on two ranks"
        prefixes = {"ring": "Bidirectional ring" if layout.both_ways else "Ring", "chain": "Chain", "star": "Flat", "tree": "Tree"}
        prefix = prefixes.get(layout.kind, self._algorithm)
        return f"{prefix} {self.op}" if prefix else self.op.capitalize()

    @cached_property
    def intro(self) -> str:
        """What is so before the first step."""
        history = self.history
        if not history.messages:
            return (
                "One rank has nobody to send to." if len(history.ranks) == 1 else "No message from one rank to another is in this record."
            )
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
        return head + (f" · {size}" if width else "") + (f" in {k} chunks" if k > 1 else "")

    def sent(self, step: int) -> str:
        """The line below it: what was sent up to and with a step."""
        sent = self.history.sent_bytes(step)
        most = max(sent.values(), default=0)
        if most == 0:
            return "nothing sent yet" if self.history.messages else ""
        if len(set(sent.values())) == 1:
            return f"{human_bytes(most)} sent by each rank so far"
        busiest = [rank for rank, nbytes in sent.items() if nbytes == most]
        who = f"rank {busiest[0]}" if len(busiest) == 1 else f"each of {len(busiest)} ranks"
        return f"{human_bytes(most)} sent by {who} so far, {human_bytes(sum(sent.values()))} in all"

    def step(self, step: int) -> str:
        """What happens in a step."""
        history = self.history
        indices = history.in_step(step)
        messages = [history.messages[i] for i in indices]
        senders, receivers = sorted({m.src for m in messages}), sorted({m.dst for m in messages})
        pairs = {(m.src, m.dst) for m in messages}
        everyone = senders == history.ranks
        onward = everyone and history.layout.kind == "ring" and len(history.ranks) > 2
        both_ways = onward and len(pairs) > len(senders)
        who, send = ("each rank", "sends") if everyone else (ranks(senders), "sends" if len(senders) == 1 else "send")
        to = "another rank" if everyone and len(receivers) > 1 else ranks(receivers) if len(receivers) <= 4 else f"{len(receivers)} others"
        to = "both neighbours" if both_ways else "the next rank" if onward else to
        if not history.known:
            most = max(m.nbytes for m in messages)
            size = human_bytes(most) if all(m.nbytes == most for m in messages) else f"up to {human_bytes(most)}"
            return sentence(f"{who} {send} {size} to {to}")
        if not onward and len(pairs) > 1 and all((dst, src) in pairs for src, dst in pairs):
            what, added = self._cargo(indices, plural=True)
            do = {True: "add what they get to their own", False: "keep what they get", None: "add it or keep it"}[added]
            return sentence(f"{'two by two, the' if len(history.ranks) > 2 else 'the two'} ranks exchange {what} and {do}")
        what, added = self._cargo(indices, plural=not everyone and len(senders) > 1)
        one = both_ways is False and (onward or len(receivers) == 1 or to == "another rank")
        if added:
            them = "them" if what.endswith("s") and what != "the data" else "it"
            return sentence(f"{who} {send} {what} to {to}, which {f'adds {them} to its' if one else f'add {them} to their'} own")
        if added is None:
            return sentence(f"{who} {send} {what} to {to}, added there or put in place of what was")
        if onward:
            return sentence(f"{who} passes {what} on; {to} {'copies' if one else 'copy'} it")
        return sentence(f"{who} {send} {what} to {to}")

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
        return f"On rank {rank}, {ranks_are(origins)} in {chunk_name(self.history, column)} more than once now."

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
        if len(links) == n * (n - 1) and len(history.messages) % len(links) == 0:
            return "Direct"
        if n & (n - 1) or not all((a ^ b) & ((a ^ b) - 1) == 0 for a, b in links):
            return ""
        sizes = [max(history.messages[i].nbytes for i in history.in_step(step)) for step in range(history.steps)]
        grows = any(b > a for a, b in zip(sizes, sizes[1:], strict=False))
        shrinks = any(b < a for a, b in zip(sizes, sizes[1:], strict=False))
        return "Halving and doubling" if grows and shrinks else "Recursive-halving" if shrinks else "Recursive-doubling"

    def _cargo(self, indices: list[int], plural: bool) -> tuple[str, bool | None]:
        """What the messages of a step carry, in words; and whether it is added on arrival (None: some of it is)."""
        history = self.history
        landings = [landing for i in indices for landing in history.landings[i]]
        if not landings:
            return ("messages without data" if plural else "a message without data"), False
        modes = {landing.added for landing in landings}
        added = modes.pop() if len(modes) == 1 else None
        whole = len(history.columns) == 1
        several = max(len(history.landings[i]) for i in indices) > 1
        own = all(_is_own(landing, history.messages[i].src) for i in indices for landing in history.landings[i])
        finished = all(landing.carried[r] == 1 for landing in landings for r in history.columns[landing.column].stripes)
        if len(indices) == 1 and not whole:
            names = [history.columns[landing.column].label for landing in landings]
            return f"chunk{'s' if len(names) > 1 else ''} {labels(names)}", added
        many = plural or several
        if history.sums:
            if added is not False and own:
                return (
                    f"{'their' if plural else 'its'} own data"
                    if whole
                    else f"{'chunks' if many else 'a chunk'} of {'their' if plural else 'its'} own"
                ), added
            if added is not False:
                return ("partial sums" if many else "a partial sum"), added
            if whole:
                return "the finished sum" if finished else "the sum", added
            return f"{'' if many else 'a '}{'finished ' if finished else ''}chunk{'s' if many else ''}", added
        if whole:
            return "the data", added
        if (
            own
            and len(history.columns[landings[0].column].stripes) == 1
            and len({landing.column for landing in landings}) > 1
            and self.op != "broadcast"
        ):
            return f"{'their' if plural else 'its'} own chunk{'s' if many else ''}", added
        return ("chunks" if many else "a chunk"), added


def _is_own(landing: Landing, src: int) -> bool:
    return sum(landing.carried) == 1 == landing.carried[src]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
