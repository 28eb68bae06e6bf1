"""launch() under torchrun: this process is already a rank of a job, so `launch` joins that job.

    torchrun --nproc-per-node 4 script.py
        four processes run script.py; each launch() in it is one program on all of them

Every rank gets all results. No process is above the ranks to see what goes wrong. So each rank has
a JobWatcher, and these report to each other in the job's store. torchrun itself shows what the
ranks print.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel101.ranks.diagnosis import rank_raised, timed_out, waited
from parallel101.ranks.program import (
    failure_of,
    forked_children_exit,
    own_init_accepted,
    pack_result,
)
from parallel101.ranks.watcher import TICK, BlockedDetector, recorded
from parallel101.ranks.wire import RankRecord, unpack
from parallel101.record import process_groups
from parallel101.record.calls import Call, CallChecker
from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, one_line
from parallel101.record.recorder import PostedCall, RankRecorder
from parallel101.record.spans import record_into
from parallel101.record.wait_for import RankStatus, WaitForGraph
from parallel101.record.where import shown, where

# seconds for a rank to raise by itself, or to hear of another's failure, once the run has failed
GRACE = 1.0
_job_stores: list[dist.Store] = []  # the store of this process's job, once it is known
_launches = 0


def in_a_job() -> bool:
    """Whether this process is a rank of a job, as torchrun makes it."""
    return (
        "RANK" in os.environ and "WORLD_SIZE" in os.environ and "PARALLEL101_RANK" not in os.environ
    )


def join_job(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    *,
    world_size: int | None,
    backend: str,
    recording: bool,
    timeout: float,
    payload_bytes: int = 0,
    keep_record: Callable[[RankRecord], None] | None = None,
) -> tuple[list[Any], list[RankRecord]]:
    """Run fn as this process's rank of the job; see `launch`.

    Returns what every rank returned, and what every rank recorded.

    With `keep_record`, records are not exchanged. Each rank calls it with its own when its program
    has ended, also if it has failed.

    Raises ValueError when world_size is not the job's, or when the job's variables make no sense.
    """
    rank, size = _rank_and_size()
    if world_size is not None and world_size != size:
        raise ValueError(
            f"world_size is {world_size!r}, but this job has {size} ranks (WORLD_SIZE). Leave "
            f"world_size out, or start {world_size} processes"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialised, and launch() initialises it itself. Call "
            "launch() first, or use your own process group without launch()"
        )
    global _launches
    _launches += 1
    store = dist.PrefixStore(f"parallel101/{_launches}", _job_store(timeout))
    calls: list[Call] = []
    recorder = RankRecorder(
        rank,
        recording=recording,
        payload_bytes=payload_bytes,
        on_call=calls.append if recording else None,
    )
    # a call blocks its connection, so the watcher needs its own
    watcher_store: dist.Store = store.clone()  # type: ignore[attr-defined]
    watcher = JobWatcher(recorder, watcher_store, size, timeout, calls, keep_record)
    watcher.start()
    if recording:
        record_into(recorder)
    try:
        process_groups.own_device(backend, int(os.environ.get("LOCAL_RANK", rank)))
        hook = sys.excepthook
        process_groups.init(backend, recorder, store, rank, size)
        if _launches > 1:
            # each init adds one that puts "[rank0]:" before every line of a traceback
            sys.excepthook = hook
        try:
            with own_init_accepted(), forked_children_exit(), _crashes_reported():
                process_groups.start_together()
                value = fn(*args, **kwargs)
            body, buffers = pack_result(value, rank)
        except BaseException as error:
            watcher.keep_record()
            failure = failure_of(rank, error)
            if failure.consequence and (cause := watcher.announced(within=GRACE)) is not None:
                raise cause from None
            if isinstance(error, DeadlockError | MisuseError):
                watcher.announce(error)
                raise
            failed = rank_raised(failure, recorder.unwaited)
            watcher.announce(failed)
            raise failed from error
        recorder.close()
        watcher.returned()
        gathered: list[Any] = [None] * size
        watcher.keep_record()
        record = (
            RankRecord([], [], recorder.unwaited) if keep_record is not None else watcher.record()
        )
        dist.all_gather_object(
            gathered,
            (body, [bytes(buffer.raw()) for buffer in buffers], pickle.dumps((calls, record))),
        )
    finally:
        record_into(None)
        watcher.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
    all_calls, records = zip(*(pickle.loads(recorded) for _, _, recorded in gathered))
    _check_calls([call for calls in all_calls for call in calls])
    return [
        unpack(body, [bytearray(buffer) for buffer in buffers]) for body, buffers, _ in gathered
    ], list(records)


def _check_calls(calls: list[Call]) -> None:
    checker = CallChecker()
    for call in sorted(calls, key=lambda call: call.seq):
        checker.check(call)
    if (misuse := checker.error()) is not None:
        raise misuse


def _rank_and_size() -> tuple[int, int]:
    """This process's rank and the job's size, from the variables that torchrun sets."""
    rank, size, port = (
        _whole_number(os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if rank is None or size is None or not 0 <= rank < size:
        wrong = "RANK must be a whole number from 0 to WORLD_SIZE - 1"
    elif not os.environ.get("MASTER_ADDR"):
        wrong = "MASTER_ADDR, the address of rank 0, is not set"
    elif port is None or not 0 <= port < 1 << 16:
        wrong = f"MASTER_PORT is {os.environ.get('MASTER_PORT', '')!r}, which is no port number"
    else:
        return rank, size
    job = " and ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE"))
    raise ValueError(
        f"{job} are set, as torchrun sets them, but {wrong}. Start this script with torchrun, or "
        "unset RANK and WORLD_SIZE"
    )


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _job_store(timeout: float) -> dist.Store:
    """The job's own store. A process can ask for it once."""
    if not _job_stores:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        _job_stores.append(store)
    return _job_stores[0]


@contextlib.contextmanager
def _crashes_reported() -> Iterator[None]:
    """Inside, a rank that C code kills writes on stderr where its program was."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.disable()


class JobWatcher(threading.Thread):
    """Publishes the status of this rank.

    On rank 0, reads the status of all ranks. Stops a rank that can't go on.

    Args:
        recorder: of the rank that it watches.
        store: a connection of its own to the store of this launch.
        size: ranks of the job.
        timeout: seconds the launch may take.
        calls: the list to which a checked run appends what this rank posts.
        on_record: takes this rank's record, once, when its program has ended or is about to be
            stopped.
    """

    def __init__(
        self,
        recorder: RankRecorder,
        store: dist.Store,
        size: int,
        timeout: float,
        calls: list[Call],
        on_record: Callable[[RankRecord], None] | None = None,
    ):
        super().__init__(daemon=True, name="parallel101 job watcher")
        self.recorder, self.store, self.size, self.timeout, self.calls = (
            recorder,
            store,
            size,
            timeout,
            calls,
        )
        self.on_record = on_record
        self.termination = None if on_record is None else TerminationSignal()
        self.detector = BlockedDetector(recorder)
        # Every rank keeps the time, because rank 0 may not have reached this launch at all.
        self.deadline = time.monotonic() + timeout + (0.0 if recorder.rank == 0 else GRACE)
        self.done = threading.Event()  # this rank's function has returned
        self.over = threading.Event()  # so is the launch
        self.wait_for = WaitForGraph(size)
        self.call_checker = CallChecker()
        self.calls_published = self.batches_published = 0
        self.batches_read = [0] * size  # by rank
        self.announced_here = False  # the failure that all ranks raise was found here
        self._publish(RankStatus())

    def run(self) -> None:
        seen: PostedCall | None = None
        published: PostedCall | None = None
        while not self.over.wait(TICK):
            try:
                blocked = self.detector.blocked_in()
                if (
                    not self.done.is_set()
                    and blocked is not published
                    and (blocked is None or blocked is seen)
                ):
                    call = None if blocked is None else blocked.call(self._place())
                    self._publish(RankStatus(call, False, *self.recorder.report()))
                    published = blocked
                seen = blocked
                self._publish_calls()
                if self.recorder.rank == 0:
                    self._check_all_ranks()
                if self.termination is not None and self.termination.arrived():
                    self.keep_record()
                    os._exit(128 + signal.SIGTERM)
                if time.monotonic() > self.deadline:
                    self.announce(self._timed_out())
                if (failure := self.announced(within=0.0)) is not None:
                    self._stop_rank(failure)
            except (RuntimeError, OSError):
                return  # the store is gone, and the job with it

    def stop(self) -> None:
        """End the watcher: the launch is over.

        If Python ended while the thread is in the store, it would crash.
        """
        self.over.set()
        self.join(GRACE)

    def keep_record(self) -> None:
        """Pass on what this rank has recorded, unless that has been done."""
        keep, self.on_record = self.on_record, None
        if keep is not None:
            keep(self.record())

    def record(self) -> RankRecord:
        """What this rank has recorded so far."""
        return recorded(self.recorder)

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that the run has failed, unless a rank has done so already."""
        ours = pickle.dumps(error).hex()
        self.announced_here = self.store.compare_set("failure", "", ours).decode() == ours

    def announced(self, within: float) -> BaseException | None:
        """The failure that some rank has announced, or announces in the next `within` seconds."""
        deadline = time.monotonic() + within
        while not self.store.check(["failure"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return pickle.loads(bytes.fromhex(self.store.get("failure").decode()))

    def returned(self) -> None:
        """This rank's function has returned.

        Wait until all have, or raise what went wrong on another rank.
        """
        self.done.set()
        self._publish(RankStatus(None, True, *self.recorder.report()))
        self.store.add("returned", 1)
        while self.store.add("returned", 0) < self.size:
            if (failure := self.announced(within=0.001)) is not None:
                raise failure

    def _publish(self, status: RankStatus) -> None:
        pickled: Any = pickle.dumps(status)  # set() takes bytes too, which its stub does not say
        self.store.set(f"status/{self.recorder.rank}", pickled)

    def _publish_calls(self) -> None:
        if new := self.calls[self.calls_published :]:
            place = f"calls/{self.recorder.rank}/{self.batches_published}"
            self.store.set(place, pickle.dumps(new))  # type: ignore[arg-type]
            self.calls_published += len(new)
            self.batches_published += 1

    def _check_all_ranks(self) -> None:
        """On rank 0: look for misuse and deadlocks."""
        self.wait_for.ranks = self._all_statuses()
        if (misuse := self.call_checker.error()) is not None:
            self.announce(misuse)
        elif (deadlock := self.wait_for.confirmed_deadlock(time.monotonic())) is not None:
            self.announce(deadlock)
        for rank in range(self.size) if self.recorder.on_call is not None else ():
            while self.store.check([f"calls/{rank}/{self.batches_read[rank]}"]):
                for call in pickle.loads(self.store.get(f"calls/{rank}/{self.batches_read[rank]}")):
                    self.call_checker.check(call)
                self.batches_read[rank] += 1

    def _all_statuses(self) -> list[RankStatus]:
        keys = [f"status/{rank}" for rank in range(self.size)]
        if self.store.check(keys):
            return [pickle.loads(data) for data in self.store.multi_get(keys)]
        return [
            pickle.loads(self.store.get(key)) if self.store.check([key]) else RankStatus()
            for key in keys
        ]

    def _timed_out(self) -> LaunchTimeout:
        lines = []
        self.wait_for.ranks = self._all_statuses()
        for rank, status in enumerate(self.wait_for.ranks):
            if status.returned:
                lines.append(f"rank {rank} had returned")
            elif status.blocked is not None:
                lines.append(waited(rank, status.blocked))
            elif not self.store.check([f"status/{rank}"]):
                lines.append(
                    f"rank {rank} had not reached this launch: every process of the job must make "
                    "the same launches"
                )
        return timed_out(self.timeout, lines, self.wait_for.dropped_works())

    def _stop_rank(self, error: BaseException) -> None:
        """End this rank, because the run has failed.

        If its own thread is blocked and does not raise within GRACE, the process exits.
        """
        if self.over.wait(GRACE):
            return
        self.keep_record()
        rank = self.recorder.rank
        if self.announced_here:
            sys.stderr.write(f"[rank {rank}] {one_line(error)}\n")
        if isinstance(error, LaunchTimeout):
            sys.stderr.write(f"[rank {rank}] was at {shown(self._place())}\n")
        sys.stderr.flush()
        os._exit(1)

    def _place(self) -> str:
        return where(sys._current_frames().get(self.recorder.thread))


class TerminationSignal:
    """Whether this process has got SIGTERM.

    torchrun stops the other ranks by it when one has failed. Python calls a handler on the
    program's thread only, and that may be blocked in C++. So the watcher's thread learns it from a
    pipe.
    """

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, self._noted)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._restore)

    def arrived(self) -> bool:
        """True once it has arrived, unless the program has a handler of its own."""
        try:
            signals = os.read(self.reader, 1024)
        except BlockingIOError:
            return False
        return signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) == self._noted

    def _noted(self, *_: object) -> None:
        """The handler does nothing: the signal's number is in the pipe."""

    def _restore(self) -> None:
        """In a forked child, such as a DataLoader's worker, the signal ends the process again."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._noted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
