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
from collections.abc import Callable
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
        self.of_group: dict[tuple[str, int], float] = {}  # seconds, by group and rank
        self.waits: list[TimedWait] = []  # a heap
        self.views: dict[str, list[Any]] = defaultdict(list)  # every member's view of a group
        self.left: dict[str, set[int]] = defaultdict(set)  # by group
        self.count = 0

    def set_limit(self, group: Any, timeout: timedelta | None) -> None:
        """Give this rank's later calls of the group this time limit."""
        key, seconds = (group.label, group.member.number), own_limit(timeout)
        self.of_group.pop(key, None)
        if seconds is not None:
            self.of_group[key] = seconds
            self.in_use = True

    def begin(self, rank: Any, work: Waitable, seconds: float | None) -> None:
        """Begin a rank's wait, for up to `seconds`.

        None: as long as the call or its group allows.
        """
        call = work.call()
        self.check(call.group, rank.number, _needs(work, call))
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
        """Give the ranks whose limit time has reached their error; they leave their group."""
        late: list[tuple[TimedWait, Call]] = []
        while self.next() == self.world.now:
            wait = heappop(self.waits)
            late.append((wait, wait.work.call()))
        for wait, call in late:
            wait.rank.interrupted = _timed_out(wait, call)
            self.world.wake(wait.rank)
        for wait, call in late:
            if wait.leaves:
                self._leave(call.group, wait.rank.number)

    def _leave(self, label: str, rank: int) -> None:
        """Take a rank that has timed out from its group.

        Ranks that wait for it there, or try to communicate with it, get an error.
        """
        first = not self.left[label]
        self.left[label].add(rank)
        for view in self.views[label]:
            view.forget_messages_with(rank)
            if first:
                self._guard(view)
            other = view.member
            if (
                other.waiting is not None
                and other.interrupted is None
                and other.waiting.call().group == label
            ):
                try:
                    self.check(label, other.number, _needs(other.waiting, other.waiting.call()))
                except RuntimeError as error:
                    other.interrupted = error
                    self.world.wake(other)

    def check(self, label: str, rank: int, peers: set[int]) -> None:
        """Raise what gloo raises if `rank`, or a peer that it needs, has left the group."""
        left = self.left.get(label, set())
        if rank in left:
            raise RuntimeError("Application timeout caused pair closure")
        if absent := left & peers:
            raise RuntimeError(
                f"Connection closed by peer: {ranks_text(absent)} timed out before, in this group"
            )

    def _guard(self, view: Any) -> None:
        """Check each later call of this rank's view of a group first."""
        label, rank, everyone = view.label, view.member.number, set(view.ranks)

        def guarded(post: Callable[..., Any], to_one: bool) -> Callable[..., Any]:
            def checked(first: Any, *rest: Any) -> Any:
                self.check(label, rank, {view.ranks[rest[0]]} if to_one else everyone)
                return post(first, *rest)

            return checked

        for name in ("send", "recv", "recv_anysource", "_collective"):
            setattr(view, name, guarded(getattr(view, name), to_one=name in ("send", "recv")))


def _needs(work: Waitable, call: Call) -> set[int]:
    """Return the ranks that must not leave the group before a work ends."""
    return set(call.peers) if work.missing() else set()


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
