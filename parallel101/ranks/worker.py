"""A rank's side of a launch: take the job, join the group, run the program, hand back what it returned or how it failed.

control ◀── job, function          the launching process (see monitor)
        ──▶ calls as they are posted (a checked run), "blocked" / "free", events, result or error
        ◀── finish                 nobody leaves before all have returned: others may still need this rank
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import json
import linecache
import marshal
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from parallel101.ranks.rendezvous import Address, meet
from parallel101.ranks.watcher import Watcher
from parallel101.ranks.wire import BOOKS, CALL, ERROR, IMPORTED, JOB, RESULT, Wire, pack, unpack
from parallel101.record import process_groups as real
from parallel101.record.calls import Call
from parallel101.record.errors import broken_connection, named, reports_another
from parallel101.record.process_groups import batches_on_nccl
from parallel101.record.recorder import Ledger
from parallel101.record.spans import record_into
from parallel101.record.where import is_inside

# ── Whole programs run under launch, their own set-up and clean-up included.


@contextmanager
def own_setup_accepted() -> Iterator[None]:
    """Inside, making the default group that is there already, and ending it, do nothing. Numbers that are not the launch's are an error."""
    make, end = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> None:
        for name, asked, is_ in (("rank", rank, dist.get_rank()), ("world_size", world_size, dist.get_world_size())):
            if asked not in (-1, is_):
                raise ValueError(f"init_process_group({name}={asked}) on rank {dist.get_rank()} of a launch, where {name} is {is_}")

    @functools.wraps(end)
    def destroy_process_group(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            end(group)

    dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
    try:
        with batches_on_nccl():
            yield
    finally:
        dist.init_process_group, dist.destroy_process_group = make, end


@dataclass
class Job:
    """What a rank has to know. For sim one process is all the ranks, and `rank` is 0."""

    rank: int
    world_size: int
    backend: str
    meeting: Address | None
    recording: bool
    checked: bool
    payload_bytes: int
    network: Any = None
    path: list[str] = field(default_factory=list)
    folder: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    local_rank: int = 0
    sources: dict[str, tuple] = field(default_factory=dict)  #  linecache's entries for code that is in no file: a notebook's cells


#  what torch imports when an optimizer, a DTensor or FSDP2 is first used, a second each
SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
leave = os._exit  #  kept: on sim a program's own os._exit means its virtual rank


def main(ticket: str = "", *, control: int = -1, calls: int = -1, status: int = -1) -> NoReturn:
    """What a new process runs: serve one job and end. `ticket` says where its control socket is, for a spawned one."""
    if ticket:
        control, calls, status = _take(ticket)
    wire = Wire(socket.socket(fileno=control))
    if status >= 0:
        faulthandler.enable(status)  #  the last words of a rank that C code aborts: where it was
    _own_streams()
    keep_large_blocks()
    gc.freeze()  #  what torch's import left is no garbage: looking through it again and again takes longer than a message
    code = 0
    try:
        loaded = set(sys.modules)
        kind, job = wire.receive()
        if kind != JOB:
            raise EOFError  #  Ctrl-C, before there was a job
        _settle_in(job)
        if job.backend == "sim":
            from parallel101.ranks.simworker import run_virtual

            run_virtual(job, wire, loaded)
        else:
            run_rank(job, wire, calls, loaded)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 1  #  the launching process is gone, or has had enough
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
        leave(code)


def run_rank(job: Job, wire: Wire, calls: int, loaded: set[str]) -> None:
    """One real rank."""
    _, body, buffers = wire.receive_packed()
    ledger = Ledger(
        job.rank,
        recording=job.recording,
        payload_bytes=job.payload_bytes,
        tell=_teller(wire, calls) if job.checked else None,
    )
    watcher = Watcher(ledger, wire)
    watcher.start()
    if job.recording:
        record_into(ledger)
    try:
        assert job.meeting is not None
        store = meet(job.meeting, job.world_size)
        real.own_device(job.backend, job.local_rank)
        real.init(job.backend, ledger, store, job.rank, job.world_size)
        function, args, kwargs = unpack_program(body, buffers)
        del body, buffers
        real.start_together()
        watcher.apart = ""
        with own_setup_accepted(), no_copy_of_a_rank():
            value = function(*args, **kwargs)
        watcher.apart = "its end, handing back what it returned"
        packed = pack_result(value, job.rank)
    except BaseException as error:
        record_into(None)
        report_failure(wire, job.rank, error, ledger)
    else:
        record_into(None)
        ledger.close()
        wire.send(BOOKS, (ledger.events, ledger.unfinished, ledger.report()))
        wire.send(IMPORTED, worth_preloading(loaded))
        del value
        wire.send_packed(RESULT, *packed, give_back=True)
    watcher.finish.wait()


def unpack_program(body: bytes, buffers: list) -> tuple[Callable, tuple, dict]:
    """The function and its arguments. What can't be read here, though it could be packed there, is an error that says so."""
    try:
        return unpack(body, buffers)
    except ImportError as error:
        advice = "The ranks import it by its name, as a script would: put its folder on sys.path before the launch."
        raise ImportError(f"the function or an argument comes from a module that the ranks can't import: {error}. {advice}") from error
    except Exception as error:
        advice = "Make it inside the function, or pass what it is made from."
        raise TypeError(f"the function or an argument was pickled and can't be read back on the ranks: {named(error)}. {advice}") from error


def worth_preloading(loaded: set[str]) -> list[str]:
    """What the fork server had better import too, now that a rank did: not the program's own modules, which may change between launches."""
    return [name for name in sys.modules.keys() - loaded if name in SLOW_IMPORTS or name.startswith("parallel101.")]


@contextlib.contextmanager
def no_copy_of_a_rank() -> Iterator[None]:
    """A process that the program forked, and that comes back from it, is no rank: it ends here."""
    me = os.getpid()
    try:
        yield
    except BaseException:
        if os.getpid() != me:
            traceback.print_exc()
            leave(1)
        raise
    if os.getpid() != me:
        leave(0)


def _teller(wire: Wire, calls: int) -> Callable[[Call], None]:
    """How a checked run's calls go out: at once, since the call may end this process, but waking nobody."""
    if calls < 0:
        return lambda call: wire.send(CALL, tuple(call))

    def tell(call: Call) -> None:
        data = marshal.dumps(tuple(call))
        os.write(calls, len(data).to_bytes(4, "little") + data)  #  below PIPE_BUF, and the pipe blocks: never a part of it

    return tell


def pack_result(value: Any, rank: int) -> tuple[bytes, list]:
    """Pickle what a rank returned; a value that can't be pickled is an error that says so."""
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that can't be pickled, so it can't be handed back: {error}. "
            "Return tensors, numbers, strings and containers of them."
        ) from None


def report_failure(wire: Wire, rank: int, error: BaseException, ledger: Ledger | None = None) -> None:
    """Send an exception with its traceback; one that can't be pickled goes as its text."""
    headline, text, consequence = named(error), story(error), broken_connection(error) or reports_another(error, rank)
    books = None if ledger is None else (ledger.events, ledger.unfinished, ledger.report())
    #  an exception's frames hold tensors, works and groups: it travels without them
    error.__traceback__ = None
    try:
        packed = pack((rank, error, headline, text, consequence))
        unpack(*packed)
    except Exception:
        packed = pack((rank, RuntimeError(headline), headline, text, consequence))
    if books is not None:
        with contextlib.suppress(Exception):
            wire.send(BOOKS, books)
    wire.send_packed(ERROR, *packed)


def story(error: BaseException) -> str:
    """The error's traceback from the program's own first frame on: what called it is no part of what went wrong. Nothing, where that
    is all there is."""
    tb = error.__traceback__
    while tb is not None and is_inside(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    if tb is None and not _ours(error):
        tb = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip() if tb is not None else ""


def _ours(error: BaseException) -> bool:
    """Whether an error was raised where the program is called: arguments that its function does not take, a result that can't travel."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and os.path.dirname(tb.tb_frame.f_code.co_filename) == os.path.dirname(__file__)


# ---- a new process makes itself at home ----


def _take(ticket: str) -> tuple[int, int, int]:
    if ticket != "share":
        control, calls, status = (int(part) for part in ticket.split(","))
        return control, calls, status
    shared = bytes.fromhex(json.loads(sys.stdin.readline()))
    return socket.fromshare(shared).detach(), -1, -1  # type: ignore[attr-defined]


def _own_streams() -> None:
    """Whole lines, at once, from Python and from C: pipes are buffered by the block otherwise."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "wb", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def keep_large_blocks() -> None:
    """Tell glibc to keep freed memory: a fresh 64 MiB tensor costs as much as sending it, all of it page faults. Elsewhere: nothing."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  #  M_MMAP_MAX: large blocks come from the heap, and so go back to it
        libc.mallopt(-8, 1)  #  M_ARENA_MAX: of one heap, also for a thread that computes a backward or is a virtual rank
        libc.mallopt(-1, 0x7FFFFFFF)  #  M_TRIM_THRESHOLD: and the heap keeps them


def share_cores_calmly() -> None:
    """Make this process batch work, which pushes nobody off a core when it wakes. Linux only, and allowed to everybody.

    Ranks and gloo's own threads are more than the cores. Woken the usual way, a thread of gloo's takes the core from the thread that holds
    what it needs, and waits for it by spinning: 4 KiB all-to-all on 4 ranks and 2 cores took 3.1 ms so and takes 0.3 ms as batch work.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # type: ignore[attr-defined,unused-ignore]


def _settle_in(job: Job) -> None:
    sys.path[:] = job.path
    linecache.cache.update(job.sources)
    with contextlib.suppress(OSError):
        os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environ)
    #  forked ranks share what the fork server drew: each starts afresh, as a new process would (torch's own seed is the same for all)
    random.seed()
    if "numpy.random" in sys.modules:  #  asking for it would import it, which takes longer than all the rest here
        sys.modules["numpy.random"].seed()
    if job.backend == "gloo":
        share_cores_calmly()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    if job.backend != "sim":
        os.environ.update(
            RANK=str(job.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(job.local_rank), LOCAL_WORLD_SIZE=str(job.world_size)
        )
    os.environ["PARALLEL101_RANK"] = str(job.rank)
    torch.set_num_threads(1)


def loopback() -> str:
    """The name of this machine's loopback interface: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in ("lo", "lo0") if name in names), "lo")
