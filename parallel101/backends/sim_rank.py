"""A virtual rank as the sim's clock knows it: whose turn it waits for, what time it has, what it is blocked in."""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from parallel101.trace.calls import Call, agreement
from parallel101.trace.where import caller

if TYPE_CHECKING:
    from parallel101.backends.sim_clock import World


class Unwound(BaseException):
    """Ends the other ranks of a run that has failed. No Exception, so that `except Exception` in a rank's code lets it pass."""


class Waitable(Protocol):
    """What a rank can be blocked in."""

    done: bool

    def call(self) -> Call: ...
    def missing(self) -> set[int]: ...


class Rank:
    """A virtual rank: its thread's turn, its own clock (ahead of the world's while it computes), what it waits for."""

    __slots__ = (
        *("agreed", "asked_at", "clock", "finished", "futures", "lock", "number", "order", "promised", "queued", "sending", "spans"),
        *("thread", "waiting", "world"),
    )

    def __init__(self, number: int, world: World):
        self.number = number
        self.world = world
        self.clock = 0.0
        self.lock: LockType = allocate_lock()
        self.lock.acquire()
        self.thread = 0
        self.queued = False  #  will run at this time
        self.finished = False
        self.waiting: Waitable | None = None
        self.sending = 0  #  messages posted and not yet delivered; order counts them, from 0 whenever there are none
        self.order = 0
        self.spans = 0
        self.agreed: dict[str, int] = {}
        self.asked_at = -1.0  #  when it last asked in vain whether a work is done
        self.promised: list[Any] = []  #  works with a torch future that have not ended
        self.futures: list[Any] = []  #  works with a torch future that have ended, to be told so in the rank's own thread

    def happen(self) -> None:
        self.world.wake(self)

    # what trace.spans wants of a recorder
    def now(self) -> float:
        return max(self.clock, self.world.now)

    def compute(self, seconds: float) -> None:
        self.clock = self.now() + seconds

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        call = agreement(self.number, kind, ranks, within, alike, self.agreed)
        self.world.judge(call)
        return call.seq

    def add_span(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self.world.events.append((self.number, "span", None, 0, 0, start, end, caller(), start, "", self.spans, (), "", None, name, args))
        self.spans += 1
