"""A rank's process: takes the job, joins the process group, runs the program, sends the result.

If the program fails, it sends the failure.

control ◀── job, program           the launching process (see monitor.py)
        ──▶ calls (a checked run), blocked, unblocked, record, result or failure
        ◀── exit                   no rank exits before all have returned: others may still need it

On sim one such process runs all virtual ranks: see simworker.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import linecache
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel101.laboratory.ranks.program import run_rank, torchrun_environment, unpack_program
from parallel101.laboratory.ranks.watcher import Watcher, exit_process
from parallel101.laboratory.ranks.wire import JOB, Job, Wire
from parallel101.laboratory.record.recorder import RankRecorder

SEND_BUFFER = 208 * 1024  # bytes, of which Linux makes twice as many; it allows so many everywhere


def main(*, control: int, status: int = -1) -> NoReturn:
    """Serve one job, and exit. The arguments are file descriptors: a socket, and a pipe's end."""
    wire = Wire(socket.socket(fileno=control))
    if status >= 0:
        # if C code kills this process, it writes there where the program was
        faulthandler.enable(status)
    open_streams()
    _keep_freed_memory()
    # what torch's import left isn't garbage, and to scan it again and again takes longer than a
    # message
    gc.freeze()
    code = 0
    try:
        loaded = set(sys.modules)
        kind, value = wire.receive()
        if kind != JOB:
            raise EOFError  # Ctrl-C, before there was a job
        rank, job, rendezvous, surroundings = value
        prepare(rank, job, **surroundings)
        if job.backend == "sim":
            from parallel101.laboratory.ranks.simworker import PrefixedStream, run_virtual_ranks

            open_streams(PrefixedStream)
            run_virtual_ranks(job, wire, loaded)
        else:
            run_real_rank(rank, job, rendezvous, wire, loaded)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 1  # the launching process is gone, or needs no more
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
        exit_process(code)


def run_real_rank(rank: int, job: Job, rendezvous: str, wire: Wire, loaded: set[str]) -> None:
    """Run the program as one real rank. `rendezvous`: the path of the file by which ranks meet."""
    packed = [wire.receive_packed()[1:]]
    watcher = Watcher(RankRecorder(rank, **job.recorder_options), wire)
    watcher.start()

    def load() -> tuple[Callable, tuple, dict]:
        _keep_send_buffers_small()  # now, since the ranks are connected
        return unpack_program(*packed.pop())  # the program alone holds its memory

    run_rank(job, watcher, rank, lambda: dist.FileStore(rendezvous), load, loaded)
    watcher.may_exit.wait()


# ---- a new process prepares itself ----


def shared_socket() -> int:
    """Return the control socket of a rank on Windows, which comes by stdin."""
    shared = bytes.fromhex(sys.stdin.readline())
    return socket.fromshare(shared).detach()  # type: ignore[attr-defined]


def open_streams(kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> None:
    """Let Python and C write whole lines at once: into a pipe both would write block by block."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "wb", closefd=False)
        stream = kind(raw, "utf-8", "backslashreplace", line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory.

    A fresh 64 MiB tensor costs as much as sending it, for its page faults. Elsewhere nothing
    happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, and so return to it
        # M_ARENA_MAX: there is one heap, also for the thread of a backward or of a virtual rank
        libc.mallopt(-8, 1)
        libc.mallopt(-1, 0x7FFFFFFF)  # M_TRIM_THRESHOLD: the heap keeps what is freed


def _keep_send_buffers_small() -> None:
    """Let a connection to another rank of this host hold SEND_BUFFER bytes that are on their way.

    Linux lets it grow to 4 MiB. A step on 4 ranks and 2 cores then took 219 ms with
    DataParallelTrainer and 215 with DDP, and takes 194 and 208 with this. With 64 KiB gloo stalled.
    On other systems nothing happens.
    """
    folder = "/proc/self/fd"
    for fd in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # it is closed, or not connected
            if not os.readlink(f"{folder}/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and connection.getpeername()[0] == connection.getsockname()[0]:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def prepare(
    rank: int,
    job: Job,
    path: list[str],
    directory: str,
    environ: dict[str, str],
    sources: dict[str, tuple],
) -> None:
    """Give this process the caller's sys.path, working directory and environment.

    It also gets random numbers of its own, and one thread. `sources`: linecache's entries for code
    that is in no file: a notebook's cells.
    """
    sys.path[:] = path
    linecache.cache.update(sources)
    with contextlib.suppress(OSError):
        os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    # Forked ranks inherit the fork server's generators. Each is seeded anew, as in a new process.
    # (torch's own seed is the same for all.)
    random.seed()
    if "numpy.random" in sys.modules:  # to import it would take longer than everything else here
        sys.modules["numpy.random"].seed()
    if job.backend == "gloo":
        _use_batch_scheduling()
        names = {name for _, name in getattr(socket, "if_nameindex", list)()}
        loopback = "lo0" if "lo0" in names and "lo" not in names else "lo"  # on macOS, on Linux
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if job.backend != "sim":  # there, each virtual rank has its own: see simworker.py
        os.environ.update(torchrun_environment(rank, job.world_size))
    torch.set_num_threads(1)


def _use_batch_scheduling() -> None:
    """Make this process batch work, which does not preempt others when it wakes.

    Linux only; every user may do this.

    There are more ranks and gloo threads than cores. Otherwise a gloo thread that wakes takes the
    core from the thread that holds what it needs, and spins until it gets it. A 4 KiB all-to-all on
    4 ranks and 2 cores took 3.1 ms that way, and takes 0.3 ms as batch work.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # type: ignore[attr-defined,unused-ignore]
