"""launch() under torchrun: this process is already a rank of a job, so `launch` joins that job.

    torchrun --nproc-per-node 4 script.py
        four processes run script.py; each launch() in it is one program on all of them
    srun --ntasks 4 python script.py, mpirun -n 4 python script.py
        the same (see schedulers.py)

No process is above the ranks to see what goes wrong. So a thread of rank 0 does what the launching
process does for local ranks (monitor.py), over connections from all ranks:

    JobWatcher of each rank ──▶ calls, blocked, unblocked, result or failure ──▶ Monitor on rank 0
                            ◀── what all ranks returned, or the error that ends the run

Every rank gets all results. What a rank gets from another is plain: it holds no code (see
pickling.py). torchrun itself shows what the ranks print.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hmac
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel101.laboratory.ranks.diagnosis import ABSENT, how_it_was_lost, rank_raised, timed_out
from parallel101.laboratory.ranks.monitor import (
    LOOK_AT_PROCESSES_EVERY,
    REPORTS,
    Monitor,
    is_stopped,
    write_on_stderr,
)
from parallel101.laboratory.ranks.pickling import OWN_ERRORS, unpack
from parallel101.laboratory.ranks.program import run_rank
from parallel101.laboratory.ranks.schedulers import advice_on_address, torchrun_variables
from parallel101.laboratory.ranks.watcher import Watcher, exit_process
from parallel101.laboratory.ranks.wire import (
    EXIT,
    FAILED,
    LEAVES,
    RESULT,
    WANTS_REPORT,
    Job,
    RankRecord,
    Wire,
)
from parallel101.laboratory.record.errors import (
    LaunchTimeout,
    MisuseError,
    RankFailed,
    one_line,
)
from parallel101.laboratory.record.program_lines import caller, shown
from parallel101.laboratory.record.recorder import RankRecorder

GRACE = 1.0  # seconds for a rank to raise by itself, once the run has failed
TO_CONNECT = 10.0  # seconds
# the signals that a launch notes, and their default handlers
DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
if hasattr(signal, "SIGUSR1"):
    DEFAULTS[signal.SIGUSR1] = signal.SIG_DFL
# what a rank sends first: the secret, its number, its process and its host
HELLO = struct.Struct("!32sII255s")
_job_stores: list[dist.Store] = []  # the store of this process's job, once it is known
_launches = 0


def in_a_job() -> bool:
    """Return whether this process is a rank of a job that torchrun, srun or mpirun started."""
    return "PARALLEL101_RANK" not in os.environ and bool(torchrun_variables(os.environ))


def join_job(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    job: Job,
    world_size: int | None = None,
    keep_record: Callable[[RankRecord], None] | None = None,
    folder: Path | None = None,
) -> tuple[list[Any], list[RankRecord]]:
    """Run fn as this process's rank of the job; see `launch`.

    Returns what every rank returned, and what every rank recorded. `job` gets its world size.

    With `keep_record`, nothing is returned. Each rank calls it with its own record when its program
    has ended, also if it has failed. `folder`: where reports of stuck ranks are written to, besides
    stderr.

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
    job.world_size = size
    if not _job_stores:
        limit = timedelta(seconds=job.timeout)
        _job_stores.append(next(iter(dist.rendezvous("env://", timeout=limit)))[0])
    # after torchrun has restarted the ranks, the store may still have what the earlier ones wrote
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"parallel101/{attempt}/{_launches}", _job_stores[0])
    monitor = None
    if rank == 0:
        monitor = MonitorThread(Monitor(job, write_on_stderr, folder), store)
        monitor.start()
    wire, monitor_pid = connect(rank, store, job.timeout)
    recorder = RankRecorder(rank, **job.recorder_options)
    watcher = JobWatcher(recorder, wire, job.timeout, keep_record, monitor_pid)
    watcher.signals.note()
    watcher.start()
    hook = sys.excepthook
    if not faulthandler.is_enabled():  # a rank that C code kills writes where it was
        faulthandler.enable(sys.__stderr__ or sys.stderr)
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        failure = run_rank(job, watcher, local_rank, lambda: store, lambda: (fn, args, kwargs))
        watcher.may_exit.wait()
    finally:
        if _launches > 1:
            # each init adds one that puts "[rank0]:" before every line of a traceback
            sys.excepthook = hook
        watcher.over.set()
        watcher.join(GRACE)
        wire.sock.close()
        if monitor is not None:
            monitor.join(2 * GRACE)
        if dist.is_initialized():
            dist.destroy_process_group()
        watcher.signals.forget(failed=watcher.error is not None)
    if (error := watcher.error) is not None:
        told_here = getattr(error, "announced_by", None) == rank
        if failure is not None and isinstance(error, RankFailed) and told_here:
            raised = rank_raised(failure, recorder.unwaited)
            if error.rank == rank and not isinstance(error, MisuseError):
                error = raised
            elif error.rank != rank:  # a rank was lost, and so this one's connection
                error.args = (f"{error}\n  {raised}",)
        raise error from error.__cause__
    results, records = watcher.outcome
    return [unpack(body, buffers, plain=True) for body, buffers in results], records


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


# ---- the connections of all ranks with rank 0 ----


class MonitorThread(threading.Thread):
    """Rank 0's thread with the Monitor of the job.

    Args:
        store: where it writes its address, with a word that only the job's ranks can know.
    """

    def __init__(self, monitor: Monitor, store: dist.Store):
        super().__init__(daemon=True, name="parallel101 monitor")
        self.monitor, self.secret = monitor, secrets.token_hex(16)
        if monitor.folder is not None:
            (monitor.folder / REPORTS).unlink(missing_ok=True)  # of an earlier run
        both, all_ranks = socket.has_dualstack_ipv6(), len(monitor.ranks)
        family = socket.AF_INET6 if both else socket.AF_INET
        self.listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=all_ranks
        )
        monitor.listen_to(self.listener, self._on_connection, None)
        port, process = self.listener.getsockname()[1], f"{socket.gethostname()} {os.getpid()}"
        store.set("monitor", f"{own_address()} {port} {self.secret} {process}")

    def run(self) -> None:
        monitor = self.monitor
        try:
            monitor.watch()
            results = [
                (body, [pickle.PickleBuffer(buffer) for buffer in buffers])
                for body, buffers in monitor.said(RESULT)
            ]
            kind, value = EXIT, (results, monitor.records())
        except Exception as error:
            if not isinstance(error, OWN_ERRORS):  # perhaps another version of parallel101
                error = RankFailed(f"rank 0 can't read what a rank sent: {one_line(error)}", 0)
            teller = getattr(error, "announced_by", 0)
            kind, value = FAILED, (error, teller)  # type: ignore[assignment]
        monitor.let_exit(kind, value, seconds=2 * GRACE)
        # the listener, and strangers that have said nothing
        others = [key.fileobj for key in monitor.selector.get_map().values()]
        monitor.close()
        for sock in [*others, *(rank.wire.sock for rank in monitor.ranks if rank.wire)]:
            if isinstance(sock, socket.socket):
                sock.close()

    def _on_connection(self, listener: socket.socket, _: None) -> None:
        connection, _address = listener.accept()
        connection.settimeout(0.0)  # a rank's hello arrives at once; nobody else is waited for
        self.monitor.listen_to(connection, self._on_hello, None)

    def _on_hello(self, connection: socket.socket, _: None) -> None:
        self.monitor.selector.unregister(connection)
        hello, secret = b"", self.secret.encode()
        with contextlib.suppress(OSError):
            hello = connection.recv(HELLO.size)
        if len(hello) < HELLO.size or not hmac.compare_digest(hello[: len(secret)], secret):
            return connection.close()
        connection.settimeout(None)
        _, number, pid, host = HELLO.unpack(hello)
        rank = self.monitor.ranks[number]
        rank.host = host.rstrip(b"\0").decode()
        rank.pid = pid if rank.host == socket.gethostname() else None
        self.monitor.add(rank, Wire(connection, plain=True))


def own_address() -> str:
    """Return the address of this host that the job's other hosts reach."""
    master = os.environ["MASTER_ADDR"]
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:  # nothing is sent
        route.connect(address)
        own = route.getsockname()[0]
    # if the master is this host, the others know it by that name
    return master if own.startswith(("127.", "::1")) or own == address[0] else own


def connect(rank: int, store: dist.Store, timeout: float) -> tuple[Wire, int | None]:
    """Return this rank's connection to the job's Monitor, and the Monitor's process if it is here.

    Raises LaunchTimeout if rank 0 doesn't come.
    """
    try:
        store.wait(["monitor"], timedelta(seconds=timeout))
    except RuntimeError:
        raise timed_out(timeout, [f"rank 0 {ABSENT}"]) from None
    address, port, secret, host, pid = store.get("monitor").decode().split()
    try:
        connection = socket.create_connection((address, int(port)), TO_CONNECT)
    except OSError as error:
        raise RankFailed(
            f"rank {rank} can't reach rank 0 at {address}:{port}, which watches the job: {error}. "
            "Either the run has ended already, or the network doesn't let them connect",
            rank,
        ) from None
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = socket.gethostname()
    connection.sendall(HELLO.pack(secret.encode(), rank, os.getpid(), own.encode()[:255]))
    return Wire(connection, plain=True), int(pid) if host == own else None


class JobWatcher(Watcher):
    """The watcher of a rank of a job. It ends a rank that can't go on.

    Args:
        timeout: seconds the launch may take.
        on_record: as in Watcher.
        monitor_pid: rank 0's process, if it is on this host.

    Attributes:
        error: what ends the run. `announced_by` is the rank that says it to the user.
    """

    def __init__(
        self,
        recorder: RankRecorder,
        wire: Wire,
        timeout: float,
        on_record: Callable[[RankRecord], None] | None = None,
        monitor_pid: int | None = None,
    ):
        super().__init__(recorder, wire, on_record)
        self.signals = signals_of_this_process()
        self.timeout, self.deadline = timeout, time.monotonic() + timeout + 4 * GRACE
        self.monitor_pid, self.next_look = monitor_pid, 0.0
        self.stopped = 0  # looks at which rank 0 was stopped, in a row
        self.error: BaseException | None = None
        self.over = threading.Event()  # the program's thread goes on by itself

    def look(self) -> None:
        super().look()
        self._handle_signals(self.signals.arrived())
        if self.recorder.rank == 1 and self.monitor_pid and time.monotonic() >= self.next_look:
            self._look_at_rank_0(self.monitor_pid)
        if time.monotonic() > self.deadline:  # rank 0 keeps the time, but may be stopped itself
            lines = [f"rank 0 does not answer; rank {self.recorder.rank} was at {self._where()}"]
            self.failed(timed_out(self.timeout, lines), self.recorder.rank)

    def _look_at_rank_0(self, pid: int) -> None:
        """Report, as rank 1, that rank 0 is stopped, which reports all other ranks."""
        self.next_look = time.monotonic() + LOOK_AT_PROCESSES_EVERY
        self.stopped = self.stopped + 1 if is_stopped(pid) else 0
        if self.stopped == 2:
            head = f"parallel101: a signal has stopped rank 0. To continue: kill -CONT {pid}"
            write_on_stderr(f"{head}\n  rank 1 is at {self._where()}")

    def unwatched(self) -> None:
        if not self.may_exit.is_set():
            how = how_it_was_lost(os.environ["MASTER_ADDR"])
            text = f"rank 0 {how}\n  rank {self.recorder.rank} was at {self._where()}"
            self.failed(RankFailed(text, 0), self.recorder.rank)

    def failed(self, error: BaseException, teller: int) -> None:
        """End this rank, because the run has failed.

        If its own thread is blocked and does not raise within GRACE, the process exits.
        """
        self.error, error.announced_by = error, teller  # type: ignore[attr-defined]
        self.may_exit.set()
        with contextlib.suppress(OSError):
            self.wire.sock.shutdown(socket.SHUT_WR)  # so that rank 0 sees that this rank knows
        if self.over.wait(GRACE):
            return
        self.keep_record()
        if teller == self.recorder.rank:
            self._write(one_line(error))
        if isinstance(error, LaunchTimeout):
            self._write(f"was at {self._where()}")
        exit_process(1)

    def exits(self, code: int) -> None:
        super().exits(code)
        if self.recorder.rank == 0:  # and with it the thread that would say so
            self._write(f"ends itself at {shown(caller())}")

    def _where(self) -> str:
        return shown(self.place())

    def _write(self, text: str) -> None:
        write_on_stderr(f"[rank {self.recorder.rank}] {text}")

    def _handle_signals(self, arrived: set[int]) -> None:
        # torchrun passes Ctrl-C on to the ranks, and one that is blocked in C++ isn't interrupted
        blocked = signal.SIGINT in arrived and not self.over.wait(GRACE)
        if blocked and signal.SIGINT not in self.signals.handled:
            self._write(f"interrupted at {self._where()}")
            self._leave(signal.SIGINT)
        if signal.SIGTERM in arrived:
            # perhaps torchrun stops this rank because another one has died: first the report
            until = time.monotonic() + GRACE
            while time.monotonic() < until and not self.may_exit.is_set():
                self.listen()
            if not self.may_exit.is_set():
                self._leave(signal.SIGTERM)
        if arrived - {signal.SIGINT, signal.SIGTERM}:
            self.wire.send(WANTS_REPORT)

    def _leave(self, number: int) -> None:
        """End this rank because a signal asks for it."""
        with contextlib.suppress(OSError):
            self.wire.send(LEAVES, True)
        self.keep_record()
        exit_process(128 + number)


class Signals:
    """Notes the signals that this process gets during a launch: SIGTERM, SIGINT or SIGUSR1.

    torchrun stops the other ranks by SIGTERM when one has failed, and by SIGINT after Ctrl-C. A
    user asks by SIGUSR1 for a report. Python calls a handler on the program's thread only, and that
    may be blocked in C++. So the watcher's thread learns of them from a socket. A signal for which
    the program has a handler is left to it.

    Attributes:
        handled: those that the program's thread has noticed.
    """

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.handled: set[int] = set()
        if hasattr(os, "register_at_fork"):  # signals end a DataLoader's worker
            os.register_at_fork(after_in_child=self.forget)

    def note(self) -> None:
        """Begin, at the start of a launch. Only a program's main thread may handle signals."""
        if threading.current_thread() is threading.main_thread():
            self.handled.clear()
            self.wakeup = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) in (default, self._end_later):
                    signal.signal(number, self._noted)

    def forget(self, failed: bool = False) -> None:
        """Let signals do what they do by default; SIGTERM later, if the launch has failed."""
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) == self._noted:
                signal.set_wakeup_fd(self.wakeup)
                later = failed and number == signal.SIGTERM
                signal.signal(number, self._end_later if later else default)
                if later and number in self.handled:
                    self._end_later()

    def _end_later(self, *_: Any) -> None:
        """End this process by SIGTERM when it has had time to show why its launch has failed."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end = threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGTERM))
        end.daemon = True
        end.start()

    def arrived(self) -> set[int]:
        """Return the signals that have arrived since and for which the program has no handler."""
        try:
            numbers = set(self.reader.recv(1024))
        except BlockingIOError:
            return set()
        return {number for number in numbers if signal.getsignal(number) == self._noted}

    def _noted(self, number: int, frame: Any) -> None:
        """Interrupt the program after Ctrl-C. Else do nothing: the number is in the socket."""
        self.handled.add(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt


signals_of_this_process = functools.cache(Signals)
