"""Who waits for whom, as the ranks themselves report it: enough to tell a deadlock for certain.

A rank's counts of what it has posted only grow, and a blocked rank posts nothing. So the newest reports of all ranks, though taken at
different moments, describe one moment: that of the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel101.errors import DeadlockError
from parallel101.trace.calls import Call, stuck

SURE = 0.15  #  seconds a deadlock must stand before it is believed: more than a watcher's tick
LIKELY = 0.8  #  the same, where a message was thrown away: whether it had gone out before, nobody can tell

Key = tuple[str, "int | None", int, str]  #  kind, peer, tag, group


@dataclass
class Standing:
    """What is known of one rank: what it is blocked in, if anything, and what it had posted by then."""

    blocked: Call | None = None
    returned: bool = False
    posted: Mapping[Key, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)  #  group -> how many
    dropped: Mapping[tuple[Key, int], str] = field(default_factory=dict)  #  messages whose work was thrown away, and where


class Board:
    """The standings of all ranks, and how long they have looked like a deadlock."""

    def __init__(self, world_size: int):
        self.ranks = [Standing() for _ in range(world_size)]
        self.suspected: DeadlockError | None = None
        self.due = 0.0

    def deadlock(self, now: float) -> DeadlockError | None:
        """The deadlock among the ranks, once it has stood long enough; `due` is when to ask again if one is suspected."""
        found, patience = self.look(), SURE
        if found is None:
            found, patience = self.look(without_dropped=True), LIKELY
        if found is None:
            self.suspected = None
        elif self.suspected is None or self.suspected.waiting != found.waiting:
            self.suspected, self.due = found, now + patience
        return self.suspected if self.suspected is not None and now >= self.due else None

    def look(self, without_dropped: bool = False) -> DeadlockError | None:
        """The deadlock as the standings are, or None while somebody may still go on."""
        waits = {rank: standing.blocked for rank, standing in enumerate(self.ranks) if standing.blocked is not None}
        if not waits:
            return None
        found = stuck(
            waits, lambda call: self.missing(call, without_dropped), [r for r, standing in enumerate(self.ranks) if standing.returned]
        )
        if found is not None and without_dropped:
            return DeadlockError(found.waiting, found.cycle, found.returned, self._thrown_away())
        return found

    def missing(self, call: Call, without_dropped: bool = False) -> list[int]:
        """Who has not posted their part of a call yet, as far as the reports tell. (A rank that runs may always still post.)"""

        def count(rank: int, kind: str, peer: int | None) -> int:
            key = (kind, peer, call.tag, call.group)
            lost = sum(dropped == key for dropped, _ in self.ranks[rank].dropped) if without_dropped else 0
            return self.ranks[rank].posted.get(key, 0) - lost

        if call.kind == "send":
            return [peer for peer in call.peers if count(peer, "recv", call.rank) + count(peer, "recv", None) < call.seq]
        if call.kind == "recv" and len(call.peers) == 1:
            return [peer for peer in call.peers if count(peer, "send", call.rank) < call.seq]
        if call.kind == "recv":
            came = sum(count(peer, "send", call.rank) for peer in call.peers)
            wanted = count(call.rank, "recv", None) + sum(count(call.rank, "recv", peer) for peer in call.peers)
            return [] if came >= wanted else list(call.peers)
        if call.kind == "new_group":
            return [peer for peer in call.peers if count(peer, "new_group", None) < call.seq]
        return [peer for peer in call.peers if self.ranks[peer].collectives.get(call.group, 0) < call.seq]

    def _thrown_away(self) -> list[str]:
        return [
            f"rank {rank} posted a {kind} {'to' if kind == 'send' else 'from'} rank {peer} and threw its work away unwaited, at {where}"
            for rank, standing in enumerate(self.ranks)
            for ((kind, peer, _, _), _), where in standing.dropped.items()
        ]
