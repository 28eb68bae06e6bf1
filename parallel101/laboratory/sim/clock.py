"""The sim's scheduler and virtual clock.

Each virtual rank is a thread, exactly one of them runs at a time, and all share one time.

    1. All ranks that can run at time T run, the lowest first, until each blocks. Running takes no
       virtual time.
    2. Messages that are ready get the free links of the network (network.py).
    3. T moves to the next scheduled event, and the ranks that it frees can run again.

So a run is the same every time, to the last bit. If no rank can run and nothing is scheduled, the
run is stopped as a deadlock, at once. What ranks do while it is their turn is not in this file:
message_matching.py has the sends and receives, group.py the collectives.
"""

from __future__ import annotations

import sys
import threading
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from parallel101.laboratory.record.calls import Call, CallChecker, call_to_compare
from parallel101.laboratory.record.errors import broken_connection, reports_another
from parallel101.laboratory.record.events import EventRow, span_event
from parallel101.laboratory.record.program_lines import caller, where
from parallel101.laboratory.record.wait_for import find_deadlock
from parallel101.laboratory.sim.network import Links, Network
from parallel101.laboratory.sim.time_limits import TimeLimits, Waitable
from parallel101.spans import record_into

if TYPE_CHECKING:
    from parallel101.laboratory.sim.mirrored import MirroredAxes

# polls per rank while nothing is scheduled; after that, polling in a loop counts as waiting, and is
# a deadlock
MAX_IDLE_POLLS = 1000


class RankCancelled(BaseException):
    """Ends the other ranks of a run that has failed.

    It isn't an Exception, so that `except Exception` in a rank's code lets it pass.
    """


class VirtualRank:
    """A virtual rank: its thread, its own clock, and what it waits for.

    Its clock is ahead of the world's after `compute`.
    """

    def __init__(self, number: int, index: int, world: World):
        self.number = number
        self.index = index  # its place among the ranks that have a thread
        self.world = world
        self.clock = 0.0
        # its thread acquires this lock to wait for its turn; the thread that ran before releases it
        self.turn: LockType = allocate_lock()
        self.turn.acquire()
        self.thread = 0
        self.wakes = False  # it will run at the present time
        self.finished = False
        self.groups: list[Any] = []  # its view of each of its process groups
        self.waiting: Waitable | None = None
        # what its wait raises when it runs next, although its work is not done
        self.interrupted: Exception | None = None
        self.in_flight = 0  # messages that it has sent and that have not arrived
        self.send_order = 0  # numbers those messages, from 0 whenever there are none
        self.spans = 0
        # whether each time in which it is blocked in a call becomes a span
        self.record_waits = False
        # how many collectives of parallel101's own it has called, by kind and group
        self.agreements: dict[str, int] = {}
        self.polled_at = -1.0  # when it last asked whether a work is done, and it was not
        self.unfinished_futures: list[Any] = []  # works that have a torch future and have not ended
        # sends and receives that have ended and for which it has not waited
        self.unwaited: set[Any] = set()
        # works that have ended, and whose future is to be set on the rank's own thread
        self.finished_futures: list[Any] = []

    def set_futures(self) -> None:
        """Set the futures of works that have ended, on the rank's own thread."""
        while self.finished_futures:
            self.finished_futures.pop(0).set_future()

    # ---- the rank's recorder: see spans.py ----

    def now(self) -> float:
        return max(self.clock, self.world.now)

    def compute(self, seconds: float) -> None:
        self.clock = self.now() + seconds

    def unrecorded(self) -> AbstractContextManager[None]:
        return self.world.unrecorded(self)

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        if self.world.mirrors is not None:  # the ranks without a thread never call
            line = f"{kind} {within} {ranks[0]} {ranks[-1]} {len(ranks)}"
            self.agreements[line] = self.agreements.get(line, 0) + 1
            return self.agreements[line]
        call = call_to_compare(self.number, kind, ranks, within, alike, self.agreements)
        self.world.check(call)
        return call.seq

    def add_span(
        self, name: str, start: float, end: float, args: dict[str, Any], waiting: bool = False
    ) -> None:
        about: dict[str, Any] = {"where": caller(), "seq": self.spans, "waiting": waiting}
        self.world.events.append(tuple(span_event(self.number, name, start, end, args, **about)))
        self.spans += 1


class World:
    """All virtual ranks of a run, and their common time.

    Args:
        size: how many ranks.
        network: what is between them.
        mirrors: which of them have a thread, and stand for the others; None: all have one.
    """

    def __init__(self, size: int, network: Network, mirrors: MirroredAxes | None = None):
        self.size = size
        self.network = network
        self.mirrors = mirrors
        self.route = network.router(size) if mirrors is None else mirrors.router(network)
        self.now = 0.0
        self.round = 0  # how often ranks have run at this time before
        numbers = range(size) if mirrors is None else mirrors.present
        self.ranks = [VirtualRank(number, index, self) for index, number in enumerate(numbers)]
        self.links = Links(self.schedule, network.latency_overlaps)
        self.time_limits = TimeLimits(self)
        self.events: list[EventRow] = []
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self.call_checker = CallChecker()
        # a better explanation than a deadlock, when nothing goes on
        self.find_misuse: Callable[[], Exception | None] = lambda: None
        # what else to say about a deadlock: (sentence, "file:line")
        self.deadlock_notes: Callable[[], list[tuple[str, str]]] = list
        # the world of the ranks that are in unrecorded(): see second_world.py
        self.second: World | None = None
        self.unrecorded: Callable[[VirtualRank], AbstractContextManager[None]] = lambda _: (
            nullcontext()
        )
        # the first exception that reports another rank's failure
        self._report: tuple[BaseException, VirtualRank] | None = None
        self._switch: Callable[[int], None] = lambda index: None
        self._current = 0
        self._ready: list[int] = []  # the ranks that still run at this time, the next one last
        self._woken: list[int] = []
        self._pollers: list[VirtualRank] = []
        self._idle_polls = 0
        self._scheduled: dict[float, list[Callable[[], None]]] = {}
        self._times: list[float] = []  # a heap of the keys of `_scheduled`
        self._threads: set[threading.Thread] = set()
        self._mover: ThreadPoolExecutor

    # ---- a run, from the thread that starts it ----

    def run(self, rank_main: Callable[[int], Any], switch: Callable[[int], None]) -> list[Any]:
        """Run `rank_main(rank)` on every rank, and return what they returned.

        If the run has failed, `failure` is the error. `switch(index)` is called whenever
        another rank than before starts running.
        """
        self._switch = switch
        results: list[Any] = [None] * len(self.ranks)
        threads = [
            threading.Thread(
                target=self._run_rank,
                args=(rank, rank_main, results),
                name=f"rank {rank.number}",
                daemon=True,
            )
            for rank in self.ranks
        ]
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as mover:
            self._mover = mover
            mover.submit(bool).result()  # begins its thread
            try:
                for thread in threads:
                    thread.start()
                self._threads = set(threading.enumerate())
                for rank in self.ranks:
                    self.wake(rank)
                self._ready, self._woken = self._woken[::-1], []
                self._give_turn(self._next())
                for thread in threads:
                    thread.join()
            except BaseException as error:
                self.fail(error)
                raise
        return results

    def without_modes(self, job: Callable[[], None]) -> None:
        """Do something on a thread of its own.

        No rank's own modes (no_grad, default device, …) are active there.
        """
        self._mover.submit(job).result()

    # ---- what ranks, messages and collectives call ----

    def schedule(self, time: float, event: Callable[[], None]) -> None:
        """Let `event()` be called at `time`."""
        events = self._scheduled.get(time)
        if events is None:
            self._scheduled[time] = [event]
            heappush(self._times, time)
        else:
            events.append(event)

    def in_flight(self) -> list[Any]:
        """Return the messages that wait for links, and what has a time at which it will end."""
        events = (event for events in self._scheduled.values() for event in events)
        return [*self.links.waiting(), *(getattr(event, "__self__", None) for event in events)]

    def wake(self, rank: VirtualRank) -> None:
        """Let a rank run at the present time."""
        if not rank.wakes and not rank.finished:
            rank.wakes = True
            self._woken.append(rank.index)

    def enter(self, rank: VirtualRank) -> None:
        """Wait until the world's time reaches the rank's own clock, before it communicates."""
        if self.failure is not None:
            raise RankCancelled
        if rank.clock > self.now:
            self.schedule(rank.clock, partial(self.wake, rank))
            while rank.clock > self.now:
                self.block(rank)

    def block(self, rank: VirtualRank) -> None:
        """Let others run until somebody wakes this rank. Called on the rank's own thread."""
        if get_ident() != rank.thread:
            raise RuntimeError(
                f"rank {rank.number} waits for a message or a collective on a thread that it "
                "started itself. On the sim backend, a rank can wait only on its own thread"
            )
        following = self._next()
        if following is not rank:
            self._give_turn(following)
            rank.turn.acquire()
        if self.failure is not None:
            raise RankCancelled
        if rank.finished_futures:
            rank.set_futures()

    def wait(self, rank: VirtualRank, work: Waitable, seconds: float | None = None) -> None:
        """Block a rank until a work is done, or until the program's time limit, if it has one.

        See time_limits.py.
        """
        if self.failure is not None:
            raise RankCancelled
        if seconds is not None or self.time_limits.in_use:
            self.time_limits.begin(rank, work, seconds)
        # a future's callback may wait while its rank waits for something else
        outer, rank.waiting = rank.waiting, work
        began = (rank.now(), work.call()) if rank.record_waits else None
        while not work.done and rank.interrupted is None:
            self.block(rank)
        rank.waiting = outer
        if rank.interrupted is not None:
            error, rank.interrupted = rank.interrupted, None
            raise error
        if began is not None and self.now > began[0]:
            start, call = began
            rank.add_span(call.kind, start, self.now, call.wait_labels, waiting=True)

    def poll(self, rank: VirtualRank, work: Waitable) -> None:
        """Handle a rank's question whether a work is done, while it is not.

        If it asks twice at the same time, time passes: a loop that asks must end.
        """
        outer, rank.waiting = rank.waiting, work
        if rank.clock > self.now:
            self.enter(rank)
        elif rank.polled_at == self.now:
            self._pollers.append(rank)
            self.block(rank)
        rank.polled_at = self.now
        rank.waiting = outer

    def check(self, call: Call) -> None:
        """Compare the ranks' calls of a collective; end the run if all have called and differ."""
        self.call_checker.check(call)
        if self.call_checker.all_called and (error := self.call_checker.error()):
            self.fail(error)
            raise RankCancelled

    def fail(self, error: BaseException, rank: VirtualRank | None = None) -> None:
        """End the run: every other rank is cancelled. Only the first failure counts."""
        if self.failure is None:
            self.failure = error
            self.failed_rank = None if rank is None else rank.number
            if self.second is not None:
                self.second.failure = error

    def raise_in(self, rank: VirtualRank, error: Exception) -> NoReturn:
        """End the run by an error that the rank's own call raises."""
        self.fail(error, rank)
        raise error

    def only_rank_threads(self) -> bool:
        """Return whether no thread that a rank has started is still running."""
        return set(threading.enumerate()) <= self._threads

    # ---- whose turn it is, and when time moves ----

    def _run_rank(
        self, rank: VirtualRank, rank_main: Callable[[int], Any], results: list[Any]
    ) -> None:
        """Run a rank's thread, from start to end."""
        rank.thread = get_ident()
        rank.turn.acquire()
        record_into(rank, this_thread_only=True)
        torch.autograd.set_multithreading_enabled(False)  # backward stays on the rank's own thread
        try:
            if self.failure is None:
                results[rank.index] = rank_main(rank.number)
        except RankCancelled:
            pass
        except BaseException as error:
            self._rank_raised(rank, error)
        finally:
            record_into(None, this_thread_only=True)
            rank.finished = True
            if (following := self._next()) is not None:
                self._give_turn(following)

    def _rank_raised(self, rank: VirtualRank, error: BaseException) -> None:
        """Handle an exception that a rank raised.

        It counts from the time on the rank's own clock: another rank may have failed before.

        An exception may only report another rank's failure. Then the run goes on until that rank
        raises its own exception, which is the cause, or until no rank can run any more.
        """
        try:
            self.enter(rank)
        except RankCancelled:
            return
        if not (reports_another(error, rank.number) or broken_connection(error)):
            self.fail(error, rank)
        elif self._report is None:
            self._report = error, rank

    def _give_turn(self, rank: VirtualRank | None) -> None:
        # impossible: a rank that gives its turn away before it has finished is woken or cancelled
        # later
        if rank is None:
            raise AssertionError("no virtual rank can run, but the run has not ended")
        if rank.index != self._current:
            self._switch(rank.index)
            self._current = rank.index
        rank.turn.release()

    def _next(self) -> VirtualRank | None:
        """Return the rank that runs next, or None if all have finished.

        If none can run now, time moves on.
        """
        while True:
            if self.failure is not None:
                return next((rank for rank in self.ranks if not rank.finished), None)
            if self._ready:
                rank = self.ranks[self._ready.pop()]
                rank.wakes = False
                return rank
            try:
                if not self._advance():
                    return None
            except Exception as error:
                # ours or torch's, while moving data: this rank must still pass the turn on
                self.fail(error)

    def _advance(self) -> bool:
        """Move time on, because no rank can run now; in the second world if it can.

        False if all ranks have finished.
        """
        if (self.second is not None and self.second.move()) or self.move():
            self._idle_polls = 0
        elif not self._pollers or self._idle_polls >= MAX_IDLE_POLLS:
            if self._report is not None:
                self.fail(*self._report)
            elif all(rank.finished for rank in self.ranks):
                return False
            else:
                deadlock, misuse = self._why_stuck()
                self.fail(misuse or deadlock or AssertionError("no virtual rank can run"))
        else:
            self._idle_polls += 1
        for rank in self._pollers:
            rank.world.wake(rank)
        self._pollers.clear()
        self._woken.sort(reverse=True)
        self._ready, self._woken = self._woken, []
        return True

    def move(self) -> bool:
        """Give messages their links, and move time to the next event. False if there is none."""
        links = self.links
        if links.requests or links.freed:
            links.arbitrate(self.now)
        limit = self.time_limits.next() if self.time_limits.waits else None
        if limit is not None and (not self._times or limit < self._times[0]):
            # ranks may never go on, although a group's limit would end their wait
            deadlock, misuse = self._why_stuck(before_limits=True)
            if deadlock is not None:
                self.fail(misuse or deadlock)
                return True
            self.now = limit
            self.time_limits.expire()
        elif self._times:
            # it may be earlier, because a rank has left unrecorded(): see second_world.py
            before, self.now = self.now, heappop(self._times)
            self.round = self.round + 1 if self.now == before else 0
            for event in self._scheduled.pop(self.now):
                event()
        else:
            return False
        return True

    def _why_stuck(self, before_limits: bool = False) -> tuple[Exception | None, Exception | None]:
        """Return the deadlock among the ranks, and a misuse that explains it better.

        `before_limits`: ranks that poll, or handle a time limit that is still to come, go on.
        """
        worlds = [self, self.second] if self.second is not None else [self]
        others: set[int] = set()
        if before_limits:
            others = {rank.number for rank in self._pollers}.union(
                *(world.time_limits.handled() for world in worlds)
            )
        waits = {
            rank.number: rank.waiting
            for world in worlds
            for rank in world.ranks
            if rank.waiting is not None and not rank.finished and rank.number not in others
        }
        threads = {rank.number: rank.thread for rank in self.ranks}
        # where each rank is blocked, which may be some lines after its call
        lines = {thread: where(frame) for thread, frame in sys._current_frames().items()}
        calls = {
            number: work.call()._replace(where=lines.get(threads[number], where(None)))
            for number, work in waits.items()
        }
        returned = [rank.number for rank in self.ranks if rank.finished]
        notes = [note for world in worlds for note in world.deadlock_notes()]
        deadlock = find_deadlock(calls, lambda call: waits[call.rank].missing(), returned, notes)
        misuses = (world.call_checker.error() or world.find_misuse() for world in worlds)
        return deadlock, next(filter(None, misuses), None)
