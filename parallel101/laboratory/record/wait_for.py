"""The wait-for graph of the ranks: who waits for whom, and whether that is a deadlock.

    rank 0 ──waits for──▶ rank 1 ──▶ rank 2 ──▶ rank 0      a cycle: a deadlock
    rank 3 ──waits for──▶ rank 0                            stuck: rank 0 is in a cycle
    rank 4 ──waits for──▶ rank 5, which has returned        stuck
    rank 6 ──waits for──▶ rank 7, which still runs          not stuck: rank 7 may still post its
                                                            side of the message

`find_deadlock` decides this for calls whose state is known exactly, as on sim. On real ranks,
`WaitForGraph` knows only what each rank last reported. That is enough to be certain: the counts of
what a rank has posted only grow, and a blocked rank posts nothing. So the newest reports of all
ranks, though taken at different times, describe one moment: the time of the last of them.

A rank whose program handles the error of its own time limit goes on after it. So it counts as one
that still runs. What it waits for is reported all the same, while the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel101.laboratory.record.calls import Call, CallKey, PostedMessage, tag_text
from parallel101.laboratory.record.errors import DeadlockError, Waiting
from parallel101.laboratory.record.events import P2P
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import ranks_text

# seconds for which a deadlock must last before it is reported: longer than the interval of the
# reports
CONFIRM_AFTER = 0.15
# the same if a work object was dropped: it is not known whether its message had been sent before
CONFIRM_DROPPED_AFTER = 0.8
# of a message: what a rank posts, the word before the other rank, and what that must post
SIDES = {"send": ("send", "to", "receive"), "recv": ("receive", "from", "send")}


def find_deadlock(
    waits: Mapping[int, Call],
    missing: Callable[[Call], Collection[int]],
    returned: Collection[int],
    notes: Sequence[tuple[str, str]] = (),
) -> DeadlockError | None:
    """Return the deadlock among the ranks, if there is one.

    Args:
        waits: for each rank that is blocked, the call in which it is blocked.
        missing: the ranks that a call needs and that have not posted their part of it. Empty: it is
            in flight, and will end.
        returned: ranks that have finished and will post nothing more.
        notes: other causes that are known already, for the error's notes.

    A rank can go on if its call is in flight, or if a rank that it misses is neither blocked nor
    finished. A receive from any rank needs one of its peers; every other call needs all of them.
    The ranks that are left when no more ranks can go on are stuck.
    """
    stuck, gone = dict(waits), set(returned)

    def can_go_on(call: Call) -> bool:
        lacking = missing(call)
        never = [peer for peer in lacking if peer in stuck or peer in gone]
        return len(never) < len(lacking) if call.from_anyone else not never

    while free := [rank for rank, call in stuck.items() if not missing(call) or can_go_on(call)]:
        for rank in free:
            del stuck[rank]
    if not stuck:
        return None
    needs = {rank: sorted(missing(call)) for rank, call in stuck.items()}
    waiting: dict[int, tuple[str, int | tuple[int, ...] | None, str]] = {}
    for rank, call in sorted(stuck.items()):
        peers = tuple(needs[rank])
        peer = None if call.from_anyone else peers if len(peers) > 1 else peers[0]
        waiting[rank] = (call.kind, peer, call.where)
    awaited = [r for r in gone if any(r in need for need in needs.values())]
    notes = [*notes, *_unmatched_waits(stuck)]
    return DeadlockError(waiting, cycle(needs), awaited, notes=notes)


def cycle(needs: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the first cycle in the wait-for graph, its smallest rank first, or []."""
    for start in sorted(needs):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next((peer for peer in needs[rank] if peer in needs), None)
        if rank is not None:
            circle = path[path.index(rank) :]
            smallest = circle.index(min(circle))
            return circle[smallest:] + circle[:smallest]
    return []


def _unmatched_waits(waits: Mapping[int, Call]) -> list[tuple[str, str]]:
    """Return notes on a send and a receive of the same ranks whose tags or groups differ."""
    notes = []
    for send in waits.values():
        receive = waits.get(send.peers[0]) if send.kind == "send" else None
        if receive is None or receive.kind != "recv" or receive.peers not in ((send.rank,), ()):
            continue
        if send.group != receive.group:
            here, there, same = "in one group", "in another", "group"
        elif send.tag != receive.tag:
            here, there, same = f"with {tag_text(send.tag)}", f"with {tag_text(receive.tag)}", "tag"
        else:
            continue
        note = (
            f"rank {send.rank} sends to rank {receive.rank} {here}, and rank {receive.rank} "
            f"receives {there}. Use the same {same} on both sides"
        )
        notes.append((note, ""))
    return notes


@dataclass
class RankStatus:
    """The report of one rank.

    If it is blocked, it has the call in which it is, and what it had posted by then.
    """

    blocked: Call | None = None
    returned: bool = False
    # the newest messages with a key, the newest last
    posted: Mapping[CallKey, Sequence[PostedMessage]] = field(default_factory=dict)
    # by group: how many, and what all ranks must call in the last of them, with how many bytes
    collectives: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    # messages whose work object was dropped, and where it was posted
    dropped: Mapping[tuple[CallKey, int], str] = field(default_factory=dict)
    # seconds after which the blocked call ends with an error that the program handles (see
    # WatchedWork.caught_after)
    limit: float | None = None

    @property
    def stuck(self) -> bool:
        """Return whether the rank is blocked in a call that no time limit ends."""
        return self.blocked is not None and self.limit is None

    def count(self, key: CallKey, but_dropped: bool = False) -> int:
        """Return how many messages with a key were posted, or were and not dropped since."""
        newest = self.posted.get(key)
        lost = sum(dropped == key for dropped, _ in self.dropped) if but_dropped else 0
        return newest[-1][0] - lost if newest else 0

    def operation(self, group: str, seq: int) -> str | None:
        """Return the operation that this rank called as the seq-th collective of a group.

        None: nothing yet. "": too long ago to be known.
        """
        count, recent = self.collectives.get(group, (0, ()))
        back = count - seq
        return None if back < 0 else recent[-1 - back] if back < len(recent) else ""


class SuspectedDeadlock:
    """A deadlock that counts once it has lasted for a while. It does at the time `due`."""

    def __init__(self) -> None:
        self.deadlock: DeadlockError | None = None
        self.due = math.inf

    def confirmed(
        self, deadlock: DeadlockError | None, now: float, patience: float
    ) -> DeadlockError | None:
        """Return the present deadlock if there has been the same one for `patience` seconds."""
        if deadlock is None:
            self.deadlock, self.due = None, math.inf
        elif self.deadlock is None or self.deadlock.waiting != deadlock.waiting:
            self.deadlock, self.due = deadlock, now + patience
        return self.deadlock if now >= self.due else None


class WaitForGraph:
    """The newest reports of all ranks, and the deadlock among them.

    Set `ranks[r]` to what rank r reports.
    """

    def __init__(self, world_size: int):
        self.ranks = [RankStatus() for _ in range(world_size)]
        self.suspected = SuspectedDeadlock()
        self.limited = SuspectedDeadlock()  # of waits that a time limit ends
        self.reported: list[Waiting] = []  # the waits that `report_of_limits` has reported

    def confirmed_deadlock(self, now: float) -> DeadlockError | None:
        """Return the deadlock among the ranks, once it has lasted long enough.

        If one is only suspected, ask again at `next_look`.
        """
        deadlock, patience = self.deadlock(), CONFIRM_AFTER
        if deadlock is None:
            deadlock, patience = self.deadlock(without_dropped=True), CONFIRM_DROPPED_AFTER
        return self.suspected.confirmed(deadlock, now, patience)

    def report_of_limits(self, now: float) -> str | None:
        """Return a report of ranks that wait for each other until the program's own time limit.

        It comes once for the same lines, when they have waited as long as for a deadlock. None: no
        news. The run goes on.
        """
        limits = any(status.limit is not None for status in self.ranks)
        deadlock = self.deadlock(with_limits=True) if limits else None
        if deadlock is not None and deadlock.waiting in self.reported:
            deadlock = None
        if (deadlock := self.limited.confirmed(deadlock, now, CONFIRM_AFTER)) is None:
            return None
        self.reported.append(deadlock.waiting)
        first = min(self.ranks[rank].limit or math.inf for rank in deadlock.waiting)
        ranks = [rank for rank in deadlock.waiting if self.ranks[rank].limit is not None]
        its = "its own time limit" if len(ranks) == 1 else "their own time limits"
        after = f"the first after {first:g} s" if len(ranks) > 1 else f"after {first:g} s"
        end = f"{ranks_text(ranks)} will go on by {its}, {after}: the run is not ended"
        return f"{deadlock}\n  {end}"

    @property
    def next_look(self) -> float:
        """Return when to ask again, if nothing changes before."""
        return min(self.suspected.due, self.limited.due)

    def deadlock(
        self, without_dropped: bool = False, with_limits: bool = False
    ) -> DeadlockError | None:
        """Return the deadlock by the present reports. None while a rank may still go on.

        Args:
            without_dropped: assume that messages whose work object was dropped are never sent.
            with_limits: assume that the program's own time limits never end a wait.
        """
        waits = {
            rank: status.blocked
            for rank, status in enumerate(self.ranks)
            if status.blocked is not None and (status.stuck or with_limits)
        }
        if not waits:
            return None
        returned = [rank for rank, status in enumerate(self.ranks) if status.returned]
        deadlock = find_deadlock(waits, lambda call: self.missing(call, without_dropped), returned)
        if deadlock is None:
            return None
        notes = deadlock.notes + self._different_collectives(deadlock.waiting)
        if not deadlock.notes:
            notes += self._unmatched_messages({*deadlock.waiting, *returned})
        dropped = self.dropped_works() if without_dropped else ()
        return DeadlockError(deadlock.waiting, deadlock.cycle, deadlock.returned, dropped, notes)

    def missing(self, call: Call, without_dropped: bool = False) -> list[int]:
        """Return the ranks that have not posted their part of a call, according to the reports.

        (A rank that runs may still post it.)
        """

        def count(rank: int, kind: str, peer: int | None) -> int:
            return self.ranks[rank].count((kind, peer, call.tag, call.group), without_dropped)

        if call.kind == "send":
            return [
                peer
                for peer in call.peers
                if count(peer, "recv", call.rank) + count(peer, "recv", None) < call.seq
            ]
        if call.kind == "recv" and len(call.peers) == 1:
            return [peer for peer in call.peers if count(peer, "send", call.rank) < call.seq]
        if call.kind == "recv":
            sent = sum(count(peer, "send", call.rank) for peer in call.peers)
            wanted = count(call.rank, "recv", None) + sum(
                count(call.rank, "recv", peer) for peer in call.peers
            )
            return [] if sent >= wanted else list(call.peers)
        ours = self.ranks[call.rank].operation(call.group, call.seq)
        alike = ("", ours)  # "" is too long ago to be known
        theirs = {peer: self.ranks[peer].operation(call.group, call.seq) for peer in call.peers}
        return [rank for rank, op in theirs.items() if op is None or (ours and op not in alike)]

    def _different_collectives(self, ranks: Iterable[int]) -> list[tuple[str, str]]:
        """Return notes on collectives in which the ranks of a group call different operations."""
        blocked = (self.ranks[rank].blocked for rank in ranks)
        calls = {(call.group, call.seq) for call in blocked if call and call.kind not in P2P}
        # groups made in a different order may block only when they are used
        made = max(status.collectives.get("new_group", (0,))[0] for status in self.ranks)
        calls |= {("new_group", seq) for seq in range(1, made + 1)}
        notes = []
        for group, seq in sorted(calls):
            operations: dict[str, list[int]] = {}
            for rank, status in enumerate(self.ranks):
                if operation := status.operation(group, seq):
                    operations.setdefault(operation, []).append(rank)
            if len(operations) > 1:
                called = ", ".join(
                    f"{operation} on {ranks_text(who)}" for operation, who in operations.items()
                )
                note = (
                    f"the ranks call different collectives: {called}. All must call the same ones "
                    "in the same order"
                )
                notes.append((note, ""))
        return notes

    def _unmatched_messages(self, ranks: set[int]) -> list[tuple[str, str]]:
        """Return notes on messages that one side posted and the other never will.

        Messages for which a rank is shown to wait are left out.
        """
        notes = []
        for rank in sorted(ranks):
            ours = self.ranks[rank]
            for key, newest in ours.posted.items():
                kind, peer, tag, group = key
                if peer not in ranks:
                    continue
                theirs, from_anyone = self.ranks[peer], ("recv", None, tag, group)
                if theirs.count(from_anyone) or ours.count(from_anyone):
                    continue  # it is not known which message a receive from any rank takes
                what, to, lacking = SIDES[kind]
                other = "recv" if kind == "send" else "send"
                waited = ours.blocked is not None and ours.blocked.key == key
                count = ours.count(key, but_dropped=True) - waited
                if (count := count - theirs.count((other, rank, tag, group))) > 0:
                    posted = f"{count} {what}s" if count > 1 else f"a {what}"
                    with_tag = f" with {tag_text(tag)}" if tag else ""
                    note = (
                        f"rank {rank} posted {posted} {to} rank {peer}{with_tag}, and "
                        f"rank {peer} posted no matching {lacking}"
                    )
                    notes.append((note, newest[-1][1]))
        return notes

    def longer_messages(self, rank: int) -> list[str]:
        """Return both sides of messages longer than their receives on `rank`, one for each peer.

        Only the newest messages are compared.
        """
        senders: dict[tuple[PostedMessage, PostedMessage], list[int]] = {}
        for (kind, peer, tag, group), receives in self.ranks[rank].posted.items():
            if kind != "recv" or peer is None:
                continue
            sends = self.ranks[peer].posted.get(("send", rank, tag, group), ())
            pairs = ((send, recv) for recv in receives for send in sends if send[0] == recv[0])
            if longer := next((pair for pair in pairs if pair[0][2] > pair[1][2]), None):
                senders.setdefault(longer, []).append(peer)
        return [
            line
            for ((_, there, sent), (_, where, expected)), peers in senders.items()
            for line in (
                f"{ranks_text(peers)} sent {sent} bytes to rank {rank}, at {shown(there)}",
                f"rank {rank} expected {expected} bytes, at {shown(where)}",
            )
        ]

    def dropped_works(self) -> list[str]:
        """Describe the messages whose work was dropped without a wait()."""
        return [
            f"rank {rank} posted a {kind} {'to' if kind == 'send' else 'from'} "
            f"{'any rank' if peer is None else f'rank {peer}'} and dropped its work object without "
            f"a wait(), at {shown(where)}"
            for rank, status in enumerate(self.ranks)
            for ((kind, peer, _, _), _), where in status.dropped.items()
        ]
