"""launch() under torchrun: this process is already a rank of a job, so `launch` joins that job.

    torchrun --nproc-per-node 4 script.py
        four processes run script.py; each launch() in it is one program on all of them
    srun --ntasks 4 python script.py, mpirun -n 4 python script.py
        the same (see schedulers.py)

Every rank gets all results. No process is above the ranks to see what goes wrong. So each rank has
a JobWatcher, and these report to each other in the job's store, as JSON. What a rank gets from
another is never unpickled (see job_messages.py). torchrun itself shows what the ranks print.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel101.laboratory.ranks.diagnosis import RUN_CHECKED, rank_raised, timed_out
from parallel101.laboratory.ranks.heartbeat import (
    LOOK_EVERY,
    Heartbeats,
    ended_text,
    loss_text,
    lost_after,
    raised_text,
    silence_text,
    store_loss_text,
    texts_of,
)
from parallel101.laboratory.ranks.job_messages import (
    exchange,
    from_json,
    pack_for_all,
    pack_record,
    to_json,
    unpack_from,
    unpack_record,
)
from parallel101.laboratory.ranks.program import failure_of, forked_children_exit, own_init_accepted
from parallel101.laboratory.ranks.run_watcher import REPORTS, RunWatcher, write_on_stderr
from parallel101.laboratory.ranks.schedulers import advice_on_address, torchrun_variables
from parallel101.laboratory.ranks.stuck import rank_lines
from parallel101.laboratory.ranks.watcher import TICK, RankObserver, recorded
from parallel101.laboratory.ranks.wire import CALLS, STATUS, Failure, RankRecord, RankStack
from parallel101.laboratory.record import process_groups
from parallel101.laboratory.record.errors import (
    DeadlockError,
    LaunchTimeout,
    MisuseError,
    RankFailed,
    one_line,
)
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.recorder import RankRecorder
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph
from parallel101.spans import record_into

# seconds for a rank to raise by itself, or to hear of another's failure, once the run has failed
GRACE = 1.0
TO_ANSWER = 2.5  # seconds for all ranks to send their stacks: they look once a second
SILENT_FOR = 10.0  # seconds without an answer after which the store is reported
STORE_ENDS_LATER = 0.3  # seconds by which rank 0's process, which may hold the store, ends earlier
_job_stores: list[dist.Store] = []  # the store of this process's job, once it is known
_launches = 0


def in_a_job() -> bool:
    """Return whether this process is a rank of a job that torchrun, srun or mpirun started."""
    return "PARALLEL101_RANK" not in os.environ and bool(torchrun_variables(os.environ))


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
    keep_waiting: bool = False,
    stuck_after: float = math.inf,
    folder: Path | None = None,
) -> tuple[list[Any], list[RankRecord]]:
    """Run fn as this process's rank of the job; see `launch`.

    Returns what every rank returned, and what every rank recorded. A function may return tensors,
    numbers, strings, containers of them, and what the program has allowed by
    torch.serialization.add_safe_globals on all ranks. That is what torch.load(weights_only=True)
    accepts.

    With `keep_record`, nothing is exchanged or returned. Each rank calls it with its own record
    when its program has ended, also if it has failed. `folder`: where reports of stuck ranks are
    written to, besides stderr.

    Raises ValueError when world_size is not the job's, or when the job's variables make no sense.
    """
    rank, size = rank_and_size()
    if world_size is not None and world_size != size:
        raise ValueError(
            f"world_size is {world_size!r}, but this job has {size} ranks (WORLD_SIZE). Leave "
            f"world_size out, or start {world_size} processes"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialized, and launch() initializes it itself. Call "
            "launch() first, or use your own process group without launch()"
        )
    global _launches
    _launches += 1
    # after torchrun has restarted the ranks, the store may still have what the earlier ones wrote
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"parallel101/{attempt}/{_launches}", _job_store(timeout))
    recorder = RankRecorder(
        rank, recording=recording, payload_bytes=payload_bytes, keep_waiting=keep_waiting
    )
    # a call blocks its connection, so the watcher needs its own
    watcher_store: dist.Store = store.clone()  # type: ignore[attr-defined]
    watcher = JobWatcher(recorder, watcher_store, size, timeout, stuck_after, folder, keep_record)
    watcher.start()
    if recording:
        record_into(recorder)
    try:
        process_groups.own_device(backend, int(os.environ.get("LOCAL_RANK", rank)))
        hook = sys.excepthook
        with loopback_explained():
            process_groups.init(backend, recorder, store, rank, size)
        if _launches > 1:
            # each init adds one that puts "[rank0]:" before every line of a traceback
            sys.excepthook = hook
        try:
            if not faulthandler.is_enabled():  # a rank that C code kills writes where it was
                faulthandler.enable(sys.__stderr__ or sys.stderr)
            with own_init_accepted(), forked_children_exit(), watcher.observer.uncaught.held():
                process_groups.start_together()
                watcher.heartbeats.next_look = 0.0  # on gloo all ranks have come
                value = fn(*args, **kwargs)
            result = pack_for_all(value, rank)
        except BaseException as error:
            watcher.keep_record()
            failure = failure_of(rank, error)
            if failure.consequence and (cause := watcher.cause_of(failure)) is not None:
                raise cause from None
            if isinstance(error, DeadlockError | MisuseError):
                watcher.announce(error)
                raise
            failed = rank_raised(failure, recorder.unwaited)
            watcher.announce(failed)
            raise failed from error
        recorder.close()
        watcher.keep_record()
        watcher.returned()
        if keep_record is not None:
            return [], []
        record = recorded(recorder)
        device = "cuda" if backend == "nccl" else "cpu"
        returned = exchange("result", result, store, device)
        records = exchange("record", pack_record(record, size, backend), store, device)
    finally:
        record_into(None)
        watcher.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
    results = [unpack_from(data, source) for source, data in enumerate(returned)]
    return results, list(map(unpack_record, records))


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the job's size.

    torchrun's variables are set as it sets them, if another launcher started this process. Raises
    ValueError if they make no sense.
    """
    os.environ.update(torchrun_variables(os.environ))
    rank, size, port = (
        int(text) if (text := os.environ.get(name, "")).isdecimal() else -1
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if not 0 <= rank < size:
        wrong = "RANK must be a whole number from 0 to WORLD_SIZE - 1"
    elif not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        wrong = "MASTER_ADDR and MASTER_PORT, where rank 0 is found, are not both set"
    elif not 0 <= port < 1 << 16:
        wrong = f"MASTER_PORT is {os.environ['MASTER_PORT']!r}, which isn't a port number"
    else:
        return rank, size
    job = " and ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE"))
    raise ValueError(f"this process is a rank of a job ({job}), but {wrong}. {advice_on_address()}")


def _job_store(timeout: float) -> dist.Store:
    """Return the job's own store. A process can ask for it once."""
    if not _job_stores:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        _job_stores.append(store)
    return _job_stores[0]


@contextlib.contextmanager
def loopback_explained() -> Iterator[None]:
    """Add advice to gloo's error that another host's address is loopback, inside the block."""
    try:
        yield
    except RuntimeError as error:
        if (address := re.search(r"remote=\[(127\.[0-9.]+|::1)\]", str(error))) is None:
            raise
        raise RuntimeError(
            f"gloo looked for another host's rank at {address[1]}, which is this host itself: "
            "there, the host's own name has this address. Name the interface that connects the "
            "hosts, on all of them, e.g. GLOO_SOCKET_IFNAME=eth0 (`ip -brief address` lists them)"
        ) from error


class JobWatcher(threading.Thread):
    """Publishes the status of this rank.

    On rank 0, reads the status of all ranks. Stops a rank that can't go on.

    Args:
        recorder: of the rank that it watches.
        store: a connection of its own to the store of this launch, which has `size` ranks.
        timeout: seconds the launch may take.
        stuck_after, folder: see RunWatcher.
        on_record: takes this rank's record, once, when its program has ended or is about to be
            stopped.
    """

    def __init__(
        self,
        recorder: RankRecorder,
        store: dist.Store,
        size: int,
        timeout: float,
        stuck_after: float,
        folder: Path | None,
        on_record: Callable[[RankRecord], None] | None = None,
    ):
        super().__init__(daemon=True, name="parallel101 job watcher")
        self.recorder, self.store, self.size, self.timeout = recorder, store, size, timeout
        self.run_watcher = RunWatcher(size, stuck_after, self.ask_stacks, write_on_stderr, folder)
        if folder is not None and recorder.rank == 0:
            (folder / REPORTS).unlink(missing_ok=True)  # of an earlier run
        self.answered, self.next_answer = 0, 0.0  # rank 0's questions for stacks, by number
        self.on_record = on_record
        self.termination = None if on_record is None else TerminationSignal()
        self.observer = RankObserver(recorder, self._publish)
        # Every rank keeps the time, because rank 0 may not have reached this launch at all.
        self.deadline = time.monotonic() + timeout + (0.0 if recorder.rank == 0 else GRACE)
        self.done = threading.Event()  # this rank's function has returned
        self.over = threading.Event()  # so is the launch
        self.batches_published = 0
        self.batches_read = [0] * size  # by rank
        self.checking = threading.Lock()  # calls: the program's thread checks the last ones
        self.announced_here = False  # the failure that all ranks raise was found here
        self.status_texts = [b""] * size
        self.failure: BaseException | None = None  # which some rank has announced
        self.heartbeats = Heartbeats(recorder.rank, size, store)
        self.fault_since: float | None = None  # since when a rank of this host can't go on
        self.looked = time.monotonic()  # when the store answered last
        self._publish(STATUS, RankStatus())
        self.heartbeats.beat()

    def run(self) -> None:
        threading.Thread(target=self._report_silent_store, daemon=True).start()
        while not self.over.wait(TICK):
            self.looked = time.monotonic()
            try:
                self.observer.look()
                self.heartbeats.beat()
                if self.recorder.rank == 0:
                    self._check_all_ranks()
                self._answer()
                self._check_this_host()
                self._handle_signals()
                if time.monotonic() > self.deadline:
                    self.announce(self._timed_out())
                if (failure := self.announced(within=0.0)) is not None:
                    self._stop_rank(failure)
            except ValueError as error:  # what another rank wrote can't be read
                unread = RankFailed(str(error), self.recorder.rank)
                self.announce(unread)
                return self._stop_rank(unread)
            except (RuntimeError, OSError):
                return self._store_is_gone()

    def _report_silent_store(self) -> None:
        """Say once that the store does not answer, since this watcher is then blocked in a call."""
        while time.monotonic() - self.looked < SILENT_FOR:
            if self.over.wait(LOOK_EVERY):
                return
        self._write(silence_text(SILENT_FOR, self._place()))

    def _place(self) -> str:
        return shown(self.observer.place())

    def _write(self, text: str) -> None:
        write_on_stderr(f"[rank {self.recorder.rank}] {text}")

    def _handle_signals(self) -> None:
        if self.termination is None:
            return
        arrived = self.termination.arrived()
        # torchrun passes Ctrl-C on to the ranks, and one that is blocked in C++ isn't interrupted
        if signal.SIGINT in arrived and not self.over.wait(GRACE):
            self.keep_record()
            self.run_watcher.say(f"[rank {self.recorder.rank}] interrupted at {self._place()}")
            self._leave(signal.SIGINT)
        if signal.SIGTERM in arrived:
            self.keep_record()
            time.sleep(TICK)
            if not self._ended_early():  # else torchrun stops this rank for that: first the report
                self._leave(signal.SIGTERM)
        if arrived - {signal.SIGINT, signal.SIGTERM}:
            self.store.set("report wanted", "")

    def _leave(self, number: int) -> None:
        """End this rank because a signal asks for it."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"stopped/{self.recorder.rank}", "")
        os._exit(128 + number)

    def _ended_early(self) -> set[int]:
        """Return ranks of this host whose processes ended before their programs.

        Ranks that a signal has asked to end are left out.
        """
        ended = self.heartbeats.ended()
        if not ended or self.store.check(["checked"]):
            return set()
        return {rank for rank in ended if not self.store.check([f"stopped/{rank}"])}

    def _check_this_host(self) -> None:
        """Announce that a rank of this host has ended early, or that C++ aborts this one.

        It does so half a GRACE later, because others may know more: rank 0 the calls that disagree,
        and a rank whose connection has broken where that was. Ranks that are stopped are reported.
        """
        ended = self._ended_early()
        if self.run_watcher.stopped:
            self._newest_graph()
        self.run_watcher.report_stopped(self.heartbeats.pids, self.recorder.rank)
        if not ended and not self.observer.uncaught.thrown.is_set():
            return
        now = time.monotonic()
        self.fault_since = self.fault_since or now
        if now - self.fault_since < GRACE / 2 or self.announced(within=0.0) is not None:
            return
        if self.observer.uncaught.thrown.is_set():
            self.announce(RankFailed(text := self._abort_text(), self.recorder.rank))
            if self.announced_here:
                self._write(text)
            self.observer.uncaught.may_abort.set()
            return
        self.announce(RankFailed(self._end_text(ended), min(ended)))

    def _end_text(self, ended: Collection[int]) -> str:
        """Return the message for ended ranks, with the waiting ranks and where this one was."""
        graph = self._newest_graph()
        here = RankStack(self.recorder.rank, self.observer.place(), [])
        for rank in ended:
            graph.ranks[rank] = replace(graph.ranks[rank], blocked=None)
        return "\n  ".join([ended_text(ended), *rank_lines(graph, {here.rank: here})])

    def _abort_text(self) -> str:
        """Return the message for this rank, which C++ is about to abort."""
        rank = self.recorder.rank
        graph = self._newest_graph()
        graph.ranks[rank] = self.recorder.status()
        lines = [
            f"C++ aborts rank {rank}: one of its threads has thrown an exception that nothing "
            f"catches. Its text is in the rank's output. The program is at {self._place()}",
            "gloo does so if more bytes arrive than a rank expects.",
            *(graph.longer_messages(rank) or rank_lines(graph, {})),
        ]
        if self.recorder.on_call is None:
            lines.append(RUN_CHECKED)
        return "\n  ".join(lines)

    def stop(self) -> None:
        """End the watcher: the launch is over.

        If Python ended while the thread is in the store, it would crash.
        """
        self._wait_until_all_know()
        self.over.set()
        self.join(GRACE)

    def keep_record(self) -> None:
        """Pass on what this rank has recorded, unless that has been done."""
        keep, self.on_record = self.on_record, None
        if keep is not None:
            keep(recorded(self.recorder))

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that the run has failed, unless a rank has done so already."""
        ours = to_json(error)
        with contextlib.suppress(dist.DistNetworkError):  # then nobody is there to be told
            self.announced_here |= self.store.compare_set("failure", "", ours).decode() == ours

    def announced(self, within: float) -> BaseException | None:
        """Return the failure that some rank has announced, or announces within `within` seconds."""
        deadline = time.monotonic() + within
        while self.failure is None and not self.store.check(["failure"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        if self.failure is None:
            self.failure = from_json(self.store.get("failure"))
            self.store.set(f"knows/{self.recorder.rank}", "")  # the store may end now
        return self.failure

    def cause_of(self, failure: Failure) -> BaseException | None:
        """Return the error that broke this rank's connection: a failure or a rank that has died.

        None if it is not known.
        """
        try:
            if (cause := self.announced(within=0.0)) is not None:
                return cause
            deadline, before = time.monotonic() + lost_after(), self.heartbeats.texts()
            while not (ended := self._ended_early()) and time.monotonic() < deadline:
                if (cause := self.announced(within=TICK)) is not None:
                    return cause
            lost = {} if ended else self.heartbeats.lost(before)
        except dist.DistNetworkError:
            gone = RankFailed(store_loss_text(raised_text(failure)), 0)
            gone.announced_by = failure.rank  # type: ignore[attr-defined]
            return gone
        if not ended and not lost:
            return None
        text = (
            loss_text(lost, failure) if lost else f"{ended_text(ended)}\n  {raised_text(failure)}"
        )
        died = RankFailed(text, min(lost or ended))
        self.announce(died)
        if self.announced_here:
            died.announced_by = failure.rank  # type: ignore[attr-defined]
            return died
        return self.announced(within=0.0)

    def _wait_until_all_know(self) -> None:
        """Wait until all ranks know of a failure, if the store ends with this process.

        Under torchrun it does not.
        """
        # torchrun's own process, and not rank 0, then holds the store
        if self.recorder.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        deadline, all_ranks = time.monotonic() + 2 * GRACE, range(self.size)
        with contextlib.suppress(RuntimeError, OSError):
            while self.store.check(["failure"]) and time.monotonic() < deadline:
                if self.store.check([f"knows/{rank}" for rank in all_ranks]):
                    return
                time.sleep(0.01)

    def returned(self) -> None:
        """Note that this rank's function has returned.

        Wait until all have, or raise what went wrong on another rank.
        """
        self.done.set()
        self._publish(STATUS, self.recorder.status(returned=True))
        self.observer.send_calls()
        self.store.add("returned", 1)
        self._wait_for(lambda: self.store.add("returned", 0) >= self.size)
        if self.recorder.rank == 0:
            self._check_calls()
            if (misuse := self.run_watcher.calls.error()) is not None:
                self.announce(misuse)
            self.store.set("checked", "")
        self._wait_for(lambda: self.store.check(["checked"]))

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raise a failure that has been announced by then."""
        holds = False
        while not holds:
            holds = condition()
            if (failure := self.announced(within=0.0 if holds else 0.001)) is not None:
                raise failure

    def _publish(self, kind: bytes, value: Any) -> None:
        rank = self.recorder.rank
        if kind == CALLS:
            self.store.set(f"calls/{rank}/{self.batches_published}", to_json(value))
            self.batches_published += 1
        elif value.returned or not self.done.is_set():
            self.store.set(f"status/{rank}", to_json(value))

    def _check_calls(self) -> None:
        """Compare, on rank 0, the calls that were published since the last time."""
        with self.checking:
            for rank in range(self.size) if self.recorder.on_call is not None else ():
                while self.store.check([key := f"calls/{rank}/{self.batches_read[rank]}"]):
                    for call in from_json(self.store.get(key)):
                        self.run_watcher.check(call)
                    self.store.delete_key(key)
                    self.batches_read[rank] += 1

    def _check_all_ranks(self) -> None:
        """Look, on rank 0, for misuse and deadlocks, and write the reports that are due."""
        self._newest_graph()
        if self.store.check(["report wanted"]):
            self.store.delete_key("report wanted")
            self.run_watcher.report_wanted = True
        if (fault := self.run_watcher.look(time.monotonic())) is not None:
            self.announce(fault)
        self._check_calls()

    def _newest_graph(self) -> WaitForGraph:
        """Return who waits for whom now. Unchanged statuses are not read again."""
        graph = self.run_watcher.graph
        for rank, text in enumerate(texts_of("status", self.size, self.store)):
            if text != self.status_texts[rank]:
                self.status_texts[rank], graph.ranks[rank] = text, from_json(text)
        return graph

    def ask_stacks(self) -> dict[int, RankStack]:
        """Return, on rank 0, the stacks of the ranks that answer in time."""
        number, until = self.store.add("stacks/asked", 1), time.monotonic() + TO_ANSWER
        stacks = {0: self.observer.stack()}
        while len(stacks) < self.size and time.monotonic() < until and not self.over.wait(TICK):
            self.heartbeats.beat()
            for rank in set(range(self.size)) - stacks.keys():
                if self.store.check([key := f"stacks/{number}/{rank}"]):
                    stacks[rank] = from_json(self.store.get(key))
                    self.store.delete_key(key)
        return stacks

    def _answer(self) -> None:
        """Send this rank's stack if rank 0 has asked for it. That is looked up once a second."""
        if self.recorder.rank and time.monotonic() >= self.next_answer:
            self.next_answer = time.monotonic() + LOOK_EVERY
            if (asked := self.store.add("stacks/asked", 0)) > self.answered:
                self.answered, key = asked, f"stacks/{asked}/{self.recorder.rank}"
                self.store.set(key, to_json(self.observer.stack()))

    def _timed_out(self) -> LaunchTimeout:
        graph = self._newest_graph()
        lines = rank_lines(graph, {}) + [
            f"rank {rank} had not reached this launch: every process of the job must make the same "
            "launches"
            for rank, text in enumerate(self.status_texts)
            if not text
        ]
        return timed_out(self.timeout, lines, graph.dropped_works())

    def _stop_rank(self, error: BaseException) -> None:
        """End this rank, because the run has failed.

        If its own thread is blocked and does not raise within GRACE, the process exits.
        """
        if self.over.wait(GRACE):
            return
        self.keep_record()
        if self.announced_here:
            self._write(one_line(error))
        self._wait_until_all_know()
        if isinstance(error, LaunchTimeout):
            self._write(f"was at {self._place()}")
        os._exit(1)

    def _store_is_gone(self) -> None:
        """End this rank, unless the launch is ending: without the store the job can't go on."""
        if self.over.wait(STORE_ENDS_LATER):
            return
        self._write(store_loss_text(f"This rank was at {self._place()}"))
        if not self.over.wait(2 * GRACE):
            self.keep_record()
            os._exit(1)


class TerminationSignal:
    """Notes the signals that this process has got: SIGTERM, SIGINT or SIGUSR1.

    torchrun stops the other ranks by SIGTERM when one has failed, and by SIGINT after Ctrl-C. A
    user asks by SIGUSR1 for a report. Python calls a handler on the program's thread only, and that
    may be blocked in C++. So the watcher's thread learns of them from a pipe.
    """

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        self.numbers = [signal.SIGTERM, *filter(None, [getattr(signal, "SIGUSR1", None)])]
        for number in self.numbers:
            signal.signal(number, self._noted)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._restore)

    def arrived(self) -> set[int]:
        """Return the signals that have arrived since and for which the program has no handler."""
        try:
            numbers = set(os.read(self.reader, 1024))
        except BlockingIOError:
            return set()
        return {
            n for n in numbers if signal.getsignal(n) in (self._noted, signal.default_int_handler)
        }

    def _noted(self, *_: object) -> None:
        """Do nothing: the signal's number is in the pipe."""

    def _restore(self) -> None:
        """Let signals end a forked child, such as a DataLoader's worker, again."""
        signal.set_wakeup_fd(-1)
        for number in self.numbers:
            if signal.getsignal(number) == self._noted:
                signal.signal(number, signal.SIG_DFL)
