"""A checked run's referee: it hears every call as it is posted and says where two that belong together do not agree."""

from __future__ import annotations

from collections import Counter, defaultdict

from parallel101.errors import MisuseError
from parallel101.trace.calls import Call, disagreement


class Referee:
    """Pairs up sends with receives and the ranks' parts of a collective, by their numbers.

    `suspects` are the calls that showed the first disagreement; `verdict()` makes an error of them.
    """

    def __init__(self) -> None:
        self.messages: dict[tuple, Call] = {}
        self.from_anyone: set[tuple[int, int, str]] = set()  #  rank, tag, group that received from anyone: who knows whose message?
        self.collectives: dict[tuple[str, int], list[Call]] = defaultdict(list)
        self.suspects: list[Call] = []

    def hear(self, call: Call) -> bool:
        """Take note of a call. True when it shows the first disagreement."""
        if self.suspects:  #  one more rank of the same collective may tell which is the odd one out
            if call.kind not in ("send", "recv") and self.suspects is self.collectives.get((call.group, call.seq)):
                self.suspects.append(call)
            return False
        if call.kind in ("send", "recv"):
            if len(call.peers) != 1:
                self.from_anyone.add((call.rank, call.tag, call.group))
                return False
            src, dst = (call.rank, call.peers[0]) if call.kind == "send" else (call.peers[0], call.rank)
            if (dst, call.tag, call.group) in self.from_anyone:
                return False  #  nor, from then on, which message another receive got
            other = self.messages.pop((src, dst, call.tag, call.group, call.seq), None)
            if other is None or other.kind == call.kind:
                self.messages[src, dst, call.tag, call.group, call.seq] = call
            elif disagreement(other, call):
                self.suspects = [other, call]
        else:
            parts = self.collectives[call.group, call.seq]
            parts.append(call)
            if any(disagreement(part, call) for part in (parts[:-1] if call.given else parts[:1])):
                self.suspects = parts  #  kept as it is: more ranks may still add theirs
            elif len(parts) == len(call.peers) + 1:
                del self.collectives[call.group, call.seq]
        return bool(self.suspects)

    def verdict(self) -> MisuseError | None:
        """What was found, or None. It names the rank that differs from most (of a message, the receiver; of two ranks, the higher)."""
        if not self.suspects:
            return None
        parts = sorted(self.suspects, key=lambda c: (c.kind == "recv", c.rank))
        if {"send", "recv"} & {part.kind for part in parts}:
            send, recv = parts
            return MisuseError(f"{disagreement(send, recv)}", recv.rank)
        alike = Counter(c.terms for c in parts)
        usual = max(parts, key=lambda c: (alike[c.terms], -c.rank))
        if not any(disagreement(usual, c) for c in parts):  #  of an all-to-all, two others
            usual = next(a for a in parts if any(disagreement(a, b) for b in parts))
        odd = max((c for c in parts if disagreement(usual, c)), key=lambda c: (-alike[c.terms], c.rank))
        return MisuseError(f"{disagreement(usual, odd)}", odd.rank)
