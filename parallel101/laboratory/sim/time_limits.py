"""Time limits on the sim: a call that reaches its limit in virtual time ends with torch's error.

    g = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    dist.recv(x, 1, group=g)
        rank 1 never sends: at 2 s, RuntimeError("Timed out waiting 2000ms for recv …"), which rank
        0 may catch

A limit is the program's own if it gave one: to new_group, init_process_group, a group's own method
or work.wait(). A rank that has timed out has left the group, as on gloo: nobody can communicate
with it there any more.

A call that can never end is a deadlock, also if its group has a limit, unless the program handles
that limit's error itself: it gives the limit to the call, or asks for `keep_waiting`.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.events import P2P
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.signatures import own_limit
from parallel101.laboratory.record.units import ranks_text


class Waitable(Protocol):
    """A call in which a rank can be blocked: a message, a collective or a new_group."""

    done: bool

    def call(self) -> Call: ...
    def missing(self) -> set[int]: ...


class TimedWait(NamedTuple):
    """The wait of a rank for a work, up to a moment."""

    until: float
    number: int  # so that no two are equal
    seconds: float
    # whether the rank leaves the group if it times out: not after a collective's wait(timeout),
    # which the collective survives
    leaves: bool
    handled: bool  # whether the program handles the error, and goes on
    rank: Any  # a VirtualRank
    work: Waitable

    @property
    def over(self) -> bool:
        return self.work.done or self.rank.waiting is not self.work


class TimeLimits:
    """The time limits of a run's groups, and the waits that have one.

    It also knows the ranks that have left a group because of a limit.
    """

    def __init__(self, world: Any):  # a World; clock.py imports this file
        self.world = world
        self.keep_waiting = False  # whether the program handles the error of a group's limit
        self.in_use = False  # whether any group has a limit
        self.of_group: dict[tuple[str, int], float | None] = {}  # seconds, by group and rank
        self.waits: list[TimedWait] = []  # a heap
        self.left: dict[str, set[int]] = defaultdict(set)  # by group
        self.count = 0

    def set_limit(self, group: Any, timeout: timedelta | None) -> None:
        """Give this rank's later calls of the group this time limit."""
        seconds = own_limit(timeout)
        self.of_group[group.label, group.member.number] = seconds
        self.in_use |= seconds is not None

    def begin(self, rank: Any, work: Waitable, seconds: float | None) -> None:
        """Begin a rank's wait, for up to `seconds`.

        None: as long as the call or its group allows.
        """
        if (error := self.closed(rank, work)) is not None:
            raise error
        call = work.call()
        leaves = seconds is None or call.kind in P2P
        in_call = getattr(work, "seconds", None) if seconds is None else seconds
        seconds = in_call or self.of_group.get((call.group, rank.number))
        if seconds is not None:
            self.count += 1
            handled = in_call is not None or self.keep_waiting
            until = rank.now() + seconds
            heappush(self.waits, TimedWait(until, self.count, seconds, leaves, handled, rank, work))

    def next(self) -> float | None:
        """Return when the next wait reaches its limit; None if there is none."""
        while self.waits and self.waits[0].over:
            heappop(self.waits)
        return self.waits[0].until if self.waits else None

    def handled(self) -> set[int]:
        """Return the ranks that wait up to a limit whose error the program handles: they go on."""
        return {wait.rank.number for wait in self.waits if wait.handled and not wait.over}

    def expire(self) -> None:
        """Give the ranks whose limit time has reached their error; they leave their group.

        Ranks that wait for them there get an error, too.
        """
        while self.next() == self.world.now:
            wait = heappop(self.waits)
            call = wait.work.call()
            self._interrupt(wait.rank, _timed_out(wait, call))
            if wait.leaves:
                self.left[call.group].add(wait.rank.number)
        for rank in self.world.ranks:
            if rank.waiting is not None and rank.interrupted is None:
                self._interrupt(rank, self.closed(rank, rank.waiting))

    def _interrupt(self, rank: Any, error: RuntimeError | None) -> None:
        if error is not None:
            rank.interrupted = error
            self.world.wake(rank)

    def closed(self, rank: Any, work: Waitable) -> RuntimeError | None:
        """Return gloo's error if a rank, or one that it waits for, has left the group."""
        call = work.call()
        left = self.left.get(call.group, set())
        if rank.number in left:
            return RuntimeError("Application timeout caused pair closure")
        absent = left.intersection(call.peers)
        if not absent or not work.missing():
            return None
        return RuntimeError(
            f"Connection closed by peer: {ranks_text(absent)} timed out before, in this group"
        )


def _timed_out(wait: TimedWait, call: Call) -> RuntimeError:
    """Return gloo's error, with who waited for whom."""
    what = "Operation timed out!"
    if wait.leaves:
        what = (
            f"Timed out waiting {round(1000 * wait.seconds)}ms for "
            f"{'send' if call.kind == 'send' else 'recv'} operation to complete"
        )
    for_whom = f" for {ranks_text(missing)}" if (missing := wait.work.missing()) else ""
    return RuntimeError(
        f"{what}\n  rank {wait.rank.number} waited in {call.kind}{for_whom}, at {shown(call.where)}"
    )
