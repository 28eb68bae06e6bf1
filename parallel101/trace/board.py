"""Who waits for whom, as the ranks themselves report it: enough to tell a deadlock for certain.

A rank's counts of what it has posted only grow, and a blocked rank posts nothing. So the newest reports of all ranks, though taken at
different moments, describe one moment: that of the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel101.errors import DeadlockError
from parallel101.trace.calls import Call, stuck


@dataclass
class Standing:
    """What is known of one rank: what it is blocked in, if anything, and what it had posted by then."""

    blocked: Call | None = None
    returned: bool = False
    posted: Mapping[tuple, int] = field(default_factory=dict)  #  (kind, peer, tag, group) -> how many
    collectives: Mapping[str, int] = field(default_factory=dict)  #  group -> how many


class Board:
    """The standings of all ranks."""

    def __init__(self, world_size: int):
        self.ranks = [Standing() for _ in range(world_size)]

    def deadlock(self) -> DeadlockError | None:
        """The deadlock among the ranks, or None while somebody may still go on."""
        waits = {rank: standing.blocked for rank, standing in enumerate(self.ranks) if standing.blocked is not None}
        return stuck(waits, self.missing, [rank for rank, standing in enumerate(self.ranks) if standing.returned]) if waits else None

    def missing(self, call: Call) -> list[int]:
        """Who has not posted their part of a call yet, as far as the reports tell. (A rank that runs may always still post.)"""

        def count(rank: int, kind: str, peer: int | None) -> int:
            return self.ranks[rank].posted.get((kind, peer, call.tag, call.group), 0)

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
