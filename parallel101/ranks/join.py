"""Under torchrun this process is a rank already: `launch` joins the job, and every rank gets all results.

    torchrun --nproc-per-node 4 script.py      four processes run script.py; each launch() in it is one program on all of them

There is no launching process here, so the ranks report to the job's store, and rank 0 reads who waits for whom. A rank that is
blocked for ever can't be woken (gloo has no way to): rank 0 prints what happened, the process ends, and torchrun ends the job.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel101.backends import real
from parallel101.backends.record import Ledger, Posted
from parallel101.errors import LaunchTimeout, RankFailed, broken_connection
from parallel101.ranks.run import Run
from parallel101.ranks.setup import own_setup_accepted
from parallel101.ranks.wire import pack, unpack
from parallel101.trace.board import Board, Standing
from parallel101.trace.calls import Call
from parallel101.trace.checks import Referee
from parallel101.trace.events import Trace
from parallel101.trace.spans import record_into
from parallel101.trace.where import where

TICK = 0.1  #  seconds between two looks
GRACE = 1.0  #  seconds for a rank to end by itself once the run has failed

_store: list[dist.Store] = []
_launches = 0


def in_a_job() -> bool:
    """Whether somebody (torchrun) has made this process a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "PARALLEL101_RANK" not in os.environ


def join(
    fn: Callable, args: tuple, kwargs: dict, *, world_size: int | None, backend: str, trace: bool | str, timeout: float, payload_bytes: int
) -> Run:
    """Run fn as this process's rank of the job; see `launch`. Raises ValueError when world_size is not the job's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
    watcher = _JobWatcher(ledger, other, size, timeout)
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
            with own_setup_accepted():
                value = fn(*args, **kwargs)
        except BaseException as error:
            if broken_connection(error) and (cause := watcher.verdict(within=GRACE)) is not None:
                raise cause from None  #  another rank is gone, and said why
            text = traceback.format_exc()
            failure = RankFailed(f"rank {rank} raised {type(error).__name__}: {error}\n\n{text.rstrip()}", rank)
            watcher.announce(failure)
            raise failure from error
        ledger.close()
        watcher.returned()
        gathered: list[Any] = [None] * size
        body, buffers = pack((value, calls, ledger.events, ledger.groups))
        dist.all_gather_object(gathered, (body, [bytes(buffer.raw()) for buffer in buffers]))
    finally:
        record_into(None)
        watcher.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
    parts = [unpack(body, [bytearray(buffer) for buffer in buffers]) for body, buffers in gathered]
    _see_misuse([call for _, calls, _, _ in parts for call in calls])
    return Run([value for value, _, _, _ in parts], _trace(parts, size, backend) if trace else None, backend, size)


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
    groups: dict[str, list[int]] = {"world": list(range(size))}
    for _, _, _, own in parts:
        groups.update(own)
    return Trace.from_rows([row for _, _, events, _ in parts for row in events], size, backend, groups)


class _JobWatcher(threading.Thread):
    """Publishes where this rank stands; on rank 0, reads where all stand; ends a rank that can't go on."""

    def __init__(self, ledger: Ledger, store: dist.Store, size: int, timeout: float):
        super().__init__(daemon=True, name="parallel101 job watcher")
        self.ledger, self.store, self.size, self.timeout = ledger, store, size, timeout
        self.deadline = time.monotonic() + timeout
        self.done = threading.Event()  #  this rank's function has returned
        self.over = threading.Event()
        self.board = Board(size)
        self._publish(Standing())

    def run(self) -> None:
        seen: Posted | None = None
        reported: Posted | None = None
        while not self.over.wait(TICK):
            try:
                waiting = self.ledger.waiting
                if not self.done.is_set() and waiting is not reported and (waiting is None or waiting is seen):
                    self._publish(self._standing(waiting))
                    reported = waiting
                seen = waiting
                if self.ledger.rank == 0:
                    self._look()
                if (failure := self.verdict(within=0.0)) is not None:
                    self._end(failure)
            except (RuntimeError, OSError):
                return  #  the store is gone, and the job with it

    def verdict(self, within: float) -> BaseException | None:
        """What some rank has announced, or announces in the next seconds."""
        deadline = time.monotonic() + within
        while not self.store.check(["verdict"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return _loads(self.store.get("verdict"))

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that the run has failed, unless somebody has already."""
        self.store.compare_set("verdict", "", pickle.dumps(error).hex())

    def returned(self) -> None:
        """This rank's function has returned. Waits until all have, or raises what went wrong elsewhere."""
        self.done.set()
        self._publish(Standing(None, True, *self.ledger.report()))
        self.store.add("returned", 1)
        while self.store.add("returned", 0) < self.size:
            if (failure := self.verdict(within=0.001)) is not None:
                raise failure

    def stop(self) -> None:
        self.over.set()

    def _standing(self, waiting: Posted | None) -> Standing:
        call = None if waiting is None else waiting.call(where(sys._current_frames().get(self.ledger.thread)))
        return Standing(call, False, *self.ledger.report())

    def _publish(self, standing: Standing) -> None:
        self.store.set(f"standing/{self.ledger.rank}", pickle.dumps(standing))  # type: ignore[arg-type]  #  bytes will do

    def _look(self) -> None:
        now = time.monotonic()
        standings = self.store.multi_get([f"standing/{rank}" for rank in range(self.size)])
        self.board.ranks = [pickle.loads(data) for data in standings]
        if (found := self.board.deadlock(now)) is not None:
            self.announce(found)
        if now > self.deadline and not all(standing.returned for standing in self.board.ranks):
            self.announce(
                LaunchTimeout(f"the ranks were still at work after {self.timeout:g} s (launch(..., timeout=seconds) allows more)")
            )

    def _end(self, error: BaseException) -> None:
        """The run has failed. This rank's own thread raises if it can; if it is blocked, the process ends."""
        if self.over.wait(GRACE):
            return
        if self.ledger.rank == 0 and not isinstance(error, RankFailed):  #  a rank that failed tells its story itself
            sys.stderr.write(f"[rank {self.ledger.rank}] {type(error).__name__}: {error}\n")
            sys.stderr.flush()
        os._exit(1)


def _loads(data: bytes) -> BaseException:
    return pickle.loads(bytes.fromhex(data.decode()))
