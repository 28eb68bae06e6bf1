"""The sim's clock and baton: one thread a virtual rank, exactly one of which runs at a time, and one time for all of them.

    all ranks that can run at time T run, the lowest first, until each blocks    (running costs no virtual time)
    then the network hands out its links                                         (sim_links)
    then T moves to the next event, and whoever that frees can run again         (here)

So a run is the same to the last bit every time. When nobody can run and nothing is on its way, that is a deadlock, known at once.
"""

from __future__ import annotations

import sys
import threading
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

import torch

from parallel101.record.calls import Call, Referee, agreement, stuck
from parallel101.record.errors import reports_another
from parallel101.record.events import EventGroups, Row, span_event
from parallel101.record.spans import record_into
from parallel101.record.where import caller, where
from parallel101.sim.network import Happening, Links, Network

# ── A virtual rank as the sim's clock knows it: whose turn it waits for, what time it has, what it is blocked in.


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

    def add_span(self, name: str, start: float, end: float, args: dict[str, Any], waiting: bool = False) -> None:
        span = span_event(rank=self.number, name=name, start=start, end=end, seq=self.spans, where=caller(), labels=args, waiting=waiting)
        self.world.events.append(tuple(span))
        self.spans += 1


FRUITLESS = 1000  #  so often may every rank ask in vain whether a work is done, when nothing is on its way, before that is a deadlock


class World:
    """All virtual ranks of a run, and their common time.

    Args:
        size: how many ranks.
        network: what lies between them.
        switch: called as switch(rank, next_rank) whenever the baton goes from one rank to another.
    """

    def __init__(self, size: int, network: Network, switch: Callable[[int, int], None]):
        self.size = size
        self.network = network
        self.route = network.router(size)
        self.now = 0.0
        self.ranks = [Rank(number, self) for number in range(size)]
        self.links = Links(self.at)
        self.events: list[Row] = []
        self.event_groups = EventGroups()
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self.reported: tuple[BaseException, Rank] | None = None  #  the first error that says that another rank has failed
        self.referee = Referee()
        self.last_word: Callable[[], Exception | None] = lambda: None  #  a better reason than a deadlock for standing still
        self._switch = switch
        self._current = 0
        self._ready: list[int] = []  #  who runs at this time, the next one last
        self._woken: list[int] = []
        self._pollers: list[Rank] = []
        self._fruitless = 0
        self._agenda: dict[float, list[Happening]] = {}
        self._times: list[float] = []
        self._threads: set[threading.Thread] = set()
        self._main = allocate_lock()
        self._job: Callable[[], None] | None = None
        self._job_done = allocate_lock()

    def run(self, rank_main: Callable[[int], Any]) -> list[Any]:
        """Run `rank_main(rank)` on every rank, and return what they returned. A failure is left in `failure`."""
        results: list[Any] = [None] * self.size
        self._main.acquire()
        self._job_done.acquire()
        threads: list[threading.Thread] = []
        for rank in self.ranks:
            arguments = (rank, rank_main, results)
            threads.append(threading.Thread(target=self._live, args=arguments, name=f"rank {rank.number}", daemon=True))
        try:
            for thread in threads:
                thread.start()
            self._threads = set(threading.enumerate())
            for rank in self.ranks:
                self.wake(rank)
            self._ready, self._woken = self._woken[::-1], []
            self._pass_to(self._next())
            while True:
                self._main.acquire()
                if self._job is None:
                    break
                try:
                    self._job()
                except Exception as error:
                    self.fail(error)
                self._job = None
                self._job_done.release()
        except BaseException as error:
            self.fail(error)
            raise
        for thread in threads:
            thread.join()
        return results

    def at(self, time: float, item: Happening) -> None:
        """Let `item.happen()` be called at `time`."""
        items = self._agenda.get(time)
        if items is None:
            self._agenda[time] = [item]
            heappush(self._times, time)
        else:
            items.append(item)

    def under_way(self) -> list[Happening]:
        """What waits for links, or has a time at which it will end."""
        return [*self.links.waiting(), *(item for items in self._agenda.values() for item in items)]

    def wake(self, rank: Rank) -> None:
        """Let a rank run at the present time."""
        if not rank.queued and not rank.finished:
            rank.queued = True
            self._woken.append(rank.number)

    def fail(self, error: BaseException, rank: Rank | None = None) -> None:
        """End the run: every rank is unwound where it stands. The first failure is the one that counts."""
        if self.failure is None:
            self.failure = error
            self.failed_rank = None if rank is None else rank.number

    def judge(self, call: Call) -> None:
        """Hear a rank's word on a collective of parallel101's own; when all have spoken and do not agree, the run ends."""
        self.referee.hear(call)
        if len(self.referee.suspects) == len(call.peers) + 1:
            self.fail(self.referee.verdict() or AssertionError("suspects agree"))
            raise Unwound

    def enter(self, rank: Rank) -> None:
        """To be called by a rank that is about to talk to others: its own clock must have been reached."""
        if self.failure is not None:
            raise Unwound
        if rank.clock > self.now:
            self.at(rank.clock, rank)
            while rank.clock > self.now:
                self.block(rank)

    def block(self, rank: Rank) -> None:
        """Let others run until somebody wakes this rank. Called on the rank's own thread."""
        if get_ident() != rank.thread:
            raise RuntimeError(f"rank {rank.number} waits on a thread that it started itself; on sim a rank waits on its own thread only")
        following = self._next()
        if following is not rank:
            self._pass_to(following)
            rank.lock.acquire()
        if self.failure is not None:
            raise Unwound
        while rank.futures:
            rank.futures.pop(0).settle()

    def wait(self, rank: Rank, work: Waitable) -> None:
        """Block a rank until a work is done."""
        if self.failure is not None:
            raise Unwound
        outer, rank.waiting = rank.waiting, work  #  a future's callback may wait while its rank waits for something else
        while not work.done:
            self.block(rank)
        rank.waiting = outer

    def poll(self, rank: Rank, work: Waitable) -> None:
        """A rank asked in vain whether a work is done. Asking twice at one moment lets time pass, or a loop of asking would never end."""
        outer, rank.waiting = rank.waiting, work
        if rank.clock > self.now:
            self.enter(rank)
        elif rank.asked_at == self.now:
            self._pollers.append(rank)
            self.block(rank)
        rank.asked_at = self.now
        rank.waiting = outer

    def alone(self) -> bool:
        """Whether no rank has started a thread that is still there."""
        return set(threading.enumerate()) <= self._threads

    def on_main_thread(self, job: Callable[[], None]) -> None:
        """Do something on the thread that called `run`, where no rank's own modes (no_grad, default device, …) are in force."""
        self._job = job
        self._main.release()
        self._job_done.acquire()

    def _live(self, rank: Rank, rank_main: Callable[[int], Any], results: list[Any]) -> None:
        rank.thread = get_ident()
        rank.lock.acquire()
        record_into(rank, this_thread_only=True)
        torch.autograd.set_multithreading_enabled(False)  #  backward stays on the rank's own thread
        try:
            if self.failure is None:
                results[rank.number] = rank_main(rank.number)
        except Unwound:
            pass
        except BaseException as error:
            self._end_of(rank, error)
        finally:
            record_into(None, this_thread_only=True)
            rank.finished = True
            following = self._next()
            if following is None:
                self._main.release()
            else:
                self._pass_to(following)

    def _end_of(self, rank: Rank, error: BaseException) -> None:
        """A rank's own exception, at the time its own clock shows: another may have failed before."""
        try:
            self.enter(rank)
            if not reports_another(error, rank.number):
                self.fail(error, rank)
            elif self.reported is None:  #  the run goes on until the other rank's own error
                self.reported = error, rank
        except Unwound:
            pass

    def _pass_to(self, rank: Rank | None) -> None:
        if rank is None:  #  cannot be: who passes the baton on without having finished will be freed or unwound
            raise AssertionError("the sim lost its baton")
        if rank.number != self._current:
            self._switch(self._current, rank.number)
            self._current = rank.number
        rank.lock.release()

    def _next(self) -> Rank | None:
        """Who runs next; time moves on when nobody can run now. None when all have finished."""
        while True:
            if self.failure is not None:
                return next((rank for rank in self.ranks if not rank.finished), None)
            if self._ready:
                rank = self.ranks[self._ready.pop()]
                rank.queued = False
                return rank
            try:
                if not self._advance():
                    return None
            except Exception as error:  #  ours or torch's, in moving data: whoever holds the baton is not to blame, and must pass it on
                self.fail(error)

    def _advance(self) -> bool:
        """Nobody can run now: links are handed out, and time moves to the next event. False when all have finished."""
        links = self.links
        if links.asking or links.freed:
            links.arbitrate(self.now)
        if self._times:
            self.now = heappop(self._times)
            for item in self._agenda.pop(self.now):
                item.happen()
            self._fruitless = 0
        elif not self._pollers or self._in_vain():
            finished = all(rank.finished for rank in self.ranks)
            if self.reported is not None:
                self.fail(*self.reported)
            elif not finished:
                self.fail(self.last_word() or self.referee.verdict() or self._deadlock())
            if finished:
                return False
        for rank in self._pollers:
            self.wake(rank)
        self._pollers.clear()
        self._woken.sort(reverse=True)
        self._ready, self._woken = self._woken, []
        return True

    def _in_vain(self) -> bool:
        self._fruitless += 1
        return self._fruitless > FRUITLESS

    def _deadlock(self) -> Exception:
        waits = {rank.number: rank.waiting for rank in self.ranks if rank.waiting is not None and not rank.finished}
        frames = sys._current_frames()  #  where each is blocked, which may be some lines after where it posted
        calls = {number: work.call()._replace(where=where(frames.get(self.ranks[number].thread))) for number, work in waits.items()}
        returned = [rank.number for rank in self.ranks if rank.finished]
        error = stuck(calls, lambda call: waits[call.rank].missing(), returned)
        return error or AssertionError(f"the sim stands still without a deadlock: {calls}")  #  what nobody misses has an end on the agenda
