"""Under torchrun this process is a rank already: `launch` joins the job, and every rank gets all results.

    torchrun --nproc-per-node 4 script.py      four processes run script.py; each launch() in it is one program on all of them

There is no launching process here to see what goes wrong: the ranks watch over each other (see jobwatcher).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel101.ranks.run import Run
from parallel101.ranks.watcher import Gaze
from parallel101.ranks.wire import unpack
from parallel101.ranks.worker import no_copy_of_a_rank, own_setup_accepted, pack_result, story
from parallel101.record import process_groups as real
from parallel101.record.calls import Call, Referee
from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed, broken_connection, named, reports_another
from parallel101.record.recorder import Ledger, Posted
from parallel101.record.spans import record_into
from parallel101.record.trace import Trace
from parallel101.record.wait_for import Board, Standing
from parallel101.record.where import shown, where

# ── The thread that watches over one rank of a torchrun job: there is no launching process, so the ranks report to the job's store.


TICK = 0.1  #  seconds between two looks
GRACE = 1.0  #  seconds for a rank to end by itself once the run has failed


class JobWatcher(threading.Thread):
    """Publishes where this rank stands; on rank 0, reads where all stand; ends a rank that can't go on.

    Args:
        ledger: of the rank that is watched over.
        store: a connection of its own to the store of this launch.
        size: ranks of the job.
        timeout: seconds the launch may take.
        calls: to which a checked run appends what this rank posts.
    """

    def __init__(self, ledger: Ledger, store: dist.Store, size: int, timeout: float, calls: list[Call]):
        super().__init__(daemon=True, name="parallel101 job watcher")
        self.ledger, self.store, self.size, self.timeout, self.calls = ledger, store, size, timeout, calls
        self.gaze = Gaze(ledger)
        #  any rank can tell when the time is over: rank 0 may not have come to this launch at all
        self.deadline = time.monotonic() + timeout + (0.0 if ledger.rank == 0 else GRACE)
        self.done = threading.Event()  #  this rank's function has returned
        self.over = threading.Event()
        self.board = Board(size)
        self.referee = Referee()
        self.told = self.batches = 0  #  calls that were published, and in how many batches
        self.heard = [0] * size  #  batches of them that were read, by rank
        self.announced = False  #  the verdict is this rank's
        self._publish(Standing())

    def run(self) -> None:
        seen: Posted | None = None
        reported: Posted | None = None
        while not self.over.wait(TICK):
            try:
                waiting = self.gaze.blocked_in()
                if not self.done.is_set() and waiting is not reported and (waiting is None or waiting is seen):
                    self._publish(self._standing(waiting))
                    reported = waiting
                seen = waiting
                self._tell_calls()
                if self.ledger.rank == 0:
                    self._look()
                if time.monotonic() > self.deadline:
                    self.announce(self._too_late())
                if (failure := self.verdict(within=0.0)) is not None:
                    self._end(failure)
            except (RuntimeError, OSError):
                return  #  the store is gone, and the job with it

    def stop(self) -> None:
        """The launch is over. (A thread that is still in the store when Python ends would take the process down.)"""
        self.over.set()
        self.join(GRACE)

    def verdict(self, within: float) -> BaseException | None:
        """What some rank has announced, or announces in the next seconds."""
        deadline = time.monotonic() + within
        while not self.store.check(["verdict"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return pickle.loads(bytes.fromhex(self.store.get("verdict").decode()))

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that the run has failed, unless somebody has already."""
        ours = pickle.dumps(error).hex()
        self.announced = self.store.compare_set("verdict", "", ours).decode() == ours

    def returned(self) -> None:
        """This rank's function has returned. Waits until all have, or raises what went wrong elsewhere."""
        self.done.set()
        self._publish(Standing(None, True, *self.ledger.report()))
        self.store.add("returned", 1)
        while self.store.add("returned", 0) < self.size:
            if (failure := self.verdict(within=0.001)) is not None:
                raise failure

    def _standing(self, waiting: Posted | None) -> Standing:
        call = None if waiting is None else waiting.call(self._place())
        return Standing(call, False, *self.ledger.report())

    def _place(self) -> str:
        return where(sys._current_frames().get(self.ledger.thread))

    def _publish(self, standing: Standing) -> None:
        self.store.set(f"standing/{self.ledger.rank}", pickle.dumps(standing))  # type: ignore[arg-type]  #  bytes will do

    def _tell_calls(self) -> None:
        if new := self.calls[self.told :]:
            self.store.set(f"calls/{self.ledger.rank}/{self.batches}", pickle.dumps(new))  # type: ignore[arg-type]
            self.told += len(new)
            self.batches += 1

    def _look(self) -> None:
        """On rank 0: whatever can be known of all ranks."""
        self.board.ranks = self._standings()
        if (misuse := self.referee.verdict()) is not None:
            self.announce(misuse)
        elif (found := self.board.deadlock(time.monotonic())) is not None:
            self.announce(found)
        for rank in range(self.size) if self.ledger.tell is not None else ():
            while self.store.check([f"calls/{rank}/{self.heard[rank]}"]):
                for call in pickle.loads(self.store.get(f"calls/{rank}/{self.heard[rank]}")):
                    self.referee.hear(call)
                self.heard[rank] += 1

    def _standings(self) -> list[Standing]:
        keys = [f"standing/{rank}" for rank in range(self.size)]
        if self.store.check(keys):
            return [pickle.loads(data) for data in self.store.multi_get(keys)]
        return [pickle.loads(self.store.get(key)) if self.store.check([key]) else Standing() for key in keys]

    def _too_late(self) -> LaunchTimeout:
        said = [f"the ranks were still at work after {self.timeout:g} s (launch(..., timeout=seconds) allows more):"]
        for rank, standing in enumerate(self._standings()):
            if standing.returned:
                said.append(f"  rank {rank} had returned")
            elif standing.blocked is not None:
                said.append(f"  rank {rank} waited in {standing.blocked.kind}, at {shown(standing.blocked.where)}")
            elif not self.store.check([f"standing/{rank}"]):
                said.append(f"  rank {rank} had not come to this launch: every process of the job must make the same launches")
        return LaunchTimeout("\n".join(said))

    def _end(self, error: BaseException) -> None:
        """The run has failed. This rank's own thread raises if it can; if it is blocked, the process ends."""
        if self.over.wait(GRACE):
            return
        if self.announced:
            sys.stderr.write(f"[rank {self.ledger.rank}] {named(error)}\n")
        if isinstance(error, LaunchTimeout):
            sys.stderr.write(f"[rank {self.ledger.rank}] was at {shown(self._place())}\n")
        sys.stderr.flush()
        os._exit(1)


_store: list[dist.Store] = []
_launches = 0


def in_a_job() -> bool:
    """Whether somebody (torchrun) has made this process a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "PARALLEL101_RANK" not in os.environ


def join(
    fn: Callable, args: tuple, kwargs: dict, *, world_size: int | None, backend: str, trace: bool | str, timeout: float, payload_bytes: int
) -> Run:
    """Run fn as this process's rank of the job; see `launch`. Raises ValueError when world_size is not the job's, or there is no job."""
    rank, size = _rank_and_size()
    if world_size is not None and world_size != size:
        raise ValueError(
            f"world_size is {world_size!r}, but this job has {size} ranks (WORLD_SIZE); leave it out, or start {world_size} processes"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already; launch() does that itself: call it first, or use your own group without launch()"
        )
    global _launches
    _launches += 1
    store = dist.PrefixStore(f"parallel101/{_launches}", _job_store(timeout))
    calls: list[Call] = []
    ledger = Ledger(rank, recording=bool(trace), payload_bytes=payload_bytes, tell=calls.append if trace else None)
    other: dist.Store = store.clone()  # type: ignore[attr-defined]  #  a connection of its own: one call at a time blocks one
    watcher = JobWatcher(ledger, other, size, timeout, calls)
    watcher.start()
    if trace:
        record_into(ledger)
    try:
        real.own_device(backend, int(os.environ.get("LOCAL_RANK", rank)))
        hook = sys.excepthook
        real.init(backend, ledger, store, rank, size)
        if _launches > 1:
            sys.excepthook = hook  #  torch puts "[rank0]:" before a traceback's lines, once more at every init
        try:
            with own_setup_accepted(), no_copy_of_a_rank(), _told_when_killed():
                real.start_together()
                value = fn(*args, **kwargs)
            body, buffers = pack_result(value, rank)
        except BaseException as error:
            consequence = broken_connection(error) or reports_another(error, rank)
            if consequence and (cause := watcher.verdict(within=GRACE)) is not None:
                raise cause from None  #  another rank is gone, and said why
            if isinstance(error, DeadlockError | MisuseError):
                watcher.announce(error)
                raise
            failure = RankFailed(f"rank {rank} raised {named(error)}\n\n{story(error)}".rstrip(), rank)
            watcher.announce(failure)
            raise failure from error
        ledger.close()
        watcher.returned()
        gathered: list[Any] = [None] * size
        about = pickle.dumps((calls, ledger.events, ledger.unfinished))
        dist.all_gather_object(gathered, (body, [bytes(buffer.raw()) for buffer in buffers], about))
    finally:
        record_into(None)
        watcher.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
    parts = [pickle.loads(about) for _, _, about in gathered]
    _see_misuse([call for calls, *_ in parts for call in calls])
    results = [unpack(body, [bytearray(buffer) for buffer in buffers]) for body, buffers, _ in gathered]
    return Run(results, _trace(parts, size, backend) if trace else None, backend, size)


def _rank_and_size() -> tuple[int, int]:
    """This process's rank and the job's size, from what torchrun sets. Raises ValueError where that can't be."""
    rank, size, port = (_whole(os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank is None or size is None or not 0 <= rank < size:
        wrong = "a rank is a whole number from 0 to below the world size"
    elif not os.environ.get("MASTER_ADDR"):
        wrong = "MASTER_ADDR, where the ranks meet, is missing"
    elif port is None or not 0 <= port < 1 << 16:
        wrong = f"MASTER_PORT is {os.environ.get('MASTER_PORT', '')!r}, which is no port"
    else:
        return rank, size
    job = " and ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE"))
    raise ValueError(f"RANK and WORLD_SIZE are set, as torchrun sets them: {job}, but {wrong}; unset them to launch here")


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


@contextlib.contextmanager
def _told_when_killed() -> Iterator[None]:
    """Inside, a rank that C code aborts says on stderr where it was."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.disable()


def _job_store(timeout: float) -> dist.Store:
    """The job's own store, met once a process."""
    if not _store:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        _store.append(store)
    return _store[0]


def _see_misuse(calls: list[Call]) -> None:
    referee = Referee()
    for call in sorted(calls, key=lambda c: c.seq):
        referee.hear(call)
    if (verdict := referee.verdict()) is not None:
        raise verdict


def _trace(parts: list, size: int, backend: str) -> Trace:
    events, unfinished = ([row for part in parts for row in part[kind]] for kind in (1, 2))
    return Trace.from_rows(events, size, backend, unfinished)
