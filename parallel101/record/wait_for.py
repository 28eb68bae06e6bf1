"""Who waits for whom, as the ranks themselves report it: enough to tell a deadlock for certain.

A rank's counts of what it has posted only grow, and a blocked rank posts nothing. So the newest reports of all ranks, though taken at
different moments, describe one moment: that of the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel101.record.calls import Call, Key, stuck, tag_named
from parallel101.record.errors import DeadlockError, ranks_in_words
from parallel101.record.where import shown

SURE = 0.15  #  seconds a deadlock must stand before it is believed: more than a watcher's tick
LIKELY = 0.8  #  the same, where a message was thrown away: whether it had gone out before, nobody can tell


@dataclass
class Standing:
    """What is known of one rank: what it is blocked in, if anything, and what it had posted by then."""

    blocked: Call | None = None
    returned: bool = False
    posted: Mapping[Key, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)  #  group -> how many
    dropped: Mapping[tuple[Key, int], str] = field(default_factory=dict)  #  messages whose work was thrown away, and where they were posted
    recent: Mapping[str, Sequence[str]] = field(default_factory=dict)  #  group -> its last collectives (see Call.part), the newest last
    places: Mapping[Key, str] = field(default_factory=dict)  #  where the newest of each was posted

    def part(self, group: str, seq: int) -> str | None:
        """What this rank called as the seq-th collective of a group: None if it has not come to that, "" if that is long ago."""
        back = self.collectives.get(group, 0) - seq
        recent = self.recent.get(group, ())
        return None if back < 0 else recent[-1 - back] if back < len(recent) else ""


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
        if found is None:
            return None
        stuck_ranks = [rank for rank in range(len(self.ranks)) if rank in found.waiting or self.ranks[rank].returned]
        notes = found.notes + self._different(found.waiting) + ([] if found.notes else self._alone(stuck_ranks))
        return DeadlockError(found.waiting, found.cycle, found.returned, self._thrown_away() if without_dropped else (), notes)

    def standstill(self, checked: bool) -> DeadlockError:
        """The error for ranks of which none is missing, and which yet do not go on."""
        waiting = {}
        for rank, standing in enumerate(self.ranks):
            if (call := standing.blocked) is not None:
                waiting[rank] = (call.kind, call.peers[0] if len(call.peers) == 1 else call.peers or None, call.where)
        advice = "" if checked else " Run it again with trace=True: a checked run names the calls that do not fit."
        note = "everything they wait for has been posted, and yet nothing moves: the sizes do not fit, most likely." + advice
        notes = self._different(range(len(self.ranks))) or [(note, "")]
        return DeadlockError(waiting, returned=[rank for rank, standing in enumerate(self.ranks) if standing.returned], notes=notes)

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
        return [peer for peer in call.peers if self.ranks[peer].part(call.group, call.seq) not in (call.part, "")]

    def _different(self, ranks: Iterable[int]) -> list[tuple[str, str]]:
        """Collectives in which the ranks of a group call different things, in words."""
        notes = []
        calls = [call for rank in ranks if (call := self.ranks[rank].blocked) is not None and call.kind not in ("send", "recv")]
        made = max((standing.collectives.get("new_group", 0) for standing in self.ranks), default=0)
        groups = {("new_group", seq) for seq in range(1, made + 1)}  # what is wrong with a group may show in its use only
        for group, seq in sorted({(call.group, call.seq) for call in calls} | groups):
            parts: dict[str, list[int]] = {}
            for rank, standing in enumerate(self.ranks):
                if part := standing.part(group, seq):
                    parts.setdefault(part, []).append(rank)
            if len(parts) > 1:
                said = ", ".join(f"{part} on {ranks_in_words(who)}" for part, who in parts.items())
                rule = "All must make the same calls in the same order."
                notes.append((f"in the same place the ranks call different collectives: {said}. {rule}", ""))
        return notes

    def _alone(self, ranks: Sequence[int]) -> list[tuple[str, str]]:
        """Messages that one side posted and the other never will, in words; less those that a rank waits for, which are known."""
        notes = []
        for rank in ranks:
            standing = self.ranks[rank]
            for (kind, peer, tag, group), count in standing.posted.items():
                if kind not in ("send", "recv") or peer is None or peer not in ranks:
                    continue
                theirs = self.ranks[peer].posted
                other = "recv" if kind == "send" else "send"
                if theirs.get(("recv", None, tag, group)) or standing.posted.get(("recv", None, tag, group)):
                    continue  #  whose message a receive from anyone takes is not known
                blocked = standing.blocked
                waited = blocked is not None and (blocked.kind, blocked.tag, blocked.group) == (kind, tag, group) and peer in blocked.peers
                lost = sum(key == (kind, peer, tag, group) for key, _ in standing.dropped)
                if (count := count - theirs.get((other, rank, tag, group), 0) - waited - lost) > 0:
                    what, to, lacking = ("send", "to", "receive") if kind == "send" else ("receive", "from", "send")
                    posted = f"{count} {what}s" if count > 1 else f"a {what}"
                    with_tag = f" with {tag_named(tag)}" if tag else ""
                    note = f"rank {rank} posted {posted} {to} rank {peer}{with_tag}, for which rank {peer} has no {lacking}"
                    notes.append((note, standing.places.get((kind, peer, tag, group), "")))
        return notes

    def _thrown_away(self) -> list[str]:
        return [
            f"rank {rank} posted a {kind} {'to' if kind == 'send' else 'from'} rank {peer} "
            f"and threw its work away unwaited, at {shown(where)}"
            for rank, standing in enumerate(self.ranks)
            for ((kind, peer, _, _), _), where in standing.dropped.items()
        ]
