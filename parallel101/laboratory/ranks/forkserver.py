"""The fork server: a process that has imported torch and forks a rank for each request.

    request (the rank's ends of its channels) ──▶ fork ──▶ worker.main or grade.rank.main
    the rank's exit code                      ──▶ its status pipe

It runs no program itself. processes.py starts it and sends it the requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import mmap
import os
import select
import signal
import socket
from typing import Any

MADV_COLLAPSE = getattr(mmap, "MADV_COLLAPSE", 25)
PIECE = 8 << 20  # bytes put into large pages at a time: 10 ms, for which a request may have to wait


def serve(fd: int) -> None:
    """Fork a rank for each request, report its exit code, and end with the launching process."""
    # with everything that a rank needs, so that each fork has it at once
    importlib.import_module("parallel101.laboratory.ranks.worker")
    importlib.import_module("parallel101.autograd")  # and the collectives, which most programs call

    server = socket.socket(fileno=fd)
    child_ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}  # the pid of each living rank -> the pipe for its exit code
    pieces = written_memory()  # to be put into large pages while there is nothing else to do
    while True:
        ready, _, _ = select.select(
            [server.fileno(), child_ended], [], [], 0 if pieces and not statuses else None
        )
        if not ready:
            use_large_pages(*pieces.pop())
        if child_ended in ready:
            os.read(child_ended, 4096)
            _reap(statuses)
        if server.fileno() in ready:
            request, fds = _receive(server)
            if not request:
                break
            what, *names = request
            if what == "import":
                # at once: the launching process need not wait for the imports
                _answer(server, 0)
                for name in names:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)
                pieces = written_memory()
                continue
            module = importlib.import_module(names[0])  # here, so that it is imported once
            try:
                pid = os.fork()
            except OSError as refused:  # too many processes, or no memory
                for end in fds:
                    os.close(end)
                _answer(server, -(refused.errno or errno.EAGAIN))
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                module.main(**_take_channels(*fds))
            with contextlib.suppress(OSError):  # it has ended already
                # a group of its own, which the launching process can kill as soon as it knows the
                # pid
                os.setpgid(pid, pid)
            *theirs, statuses[pid] = fds
            for end in theirs:
                os.close(end)
            _answer(server, pid)
    server.close()
    for pid in statuses:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # Python would first free all that torch has made, for up to a second


def _receive(server: socket.socket) -> tuple[list[str], list[int]]:
    """Return the words of the next request, which is a line, and its file descriptors.

    There are no words if the launching process is gone. Names of modules may be thousands of bytes.
    """
    line, fds = b"", list[int]()
    with contextlib.suppress(ConnectionResetError):
        while not line.endswith(b"\n"):
            part, received, _, _ = socket.recv_fds(server, 1 << 16, 4)
            line, fds = line + part, fds + received
            if not part:
                return [], []
    return line.decode().split(), fds


def _answer(server: socket.socket, answer: int) -> None:
    """Answer a request: a rank's pid, or an errno below zero; 0 where no rank was asked for."""
    # the launching process is gone: the next request will be empty
    with contextlib.suppress(OSError):
        server.send(str(answer).encode())


def _take_channels(control: int, out: int, err: int, status: int) -> dict[str, Any]:
    """Make a new rank's pipes its standard streams, and close all other inherited files."""
    import fcntl  # not on Windows, where there is no fork either

    null = os.open(os.devnull, os.O_RDONLY)
    # out of the way of 0 to 4
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD, 16) for end in (null, out, err, control, status)]
    for wanted, end in enumerate(moved):
        os.dup2(end, wanted)
    os.closerange(5, max(int(name) for name in os.listdir("/dev/fd")) + 1)
    return {"control": 3, "status": 4}


def _reap(statuses: dict[int, int]) -> None:
    """Report the exit codes of the ranks that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if (end := statuses.pop(pid, -1)) >= 0:
            with contextlib.suppress(BrokenPipeError):  # the launching process no longer reads
                os.write(end, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(end)


# ---- large pages, which make a fork cheaper ----


def written_memory() -> list[tuple[int, int]]:
    """List (start, stop) of each piece of memory that this process has written to (Linux only).

    A piece has at most PIECE bytes.
    """
    try:
        with open("/proc/self/maps") as maps:
            areas = [line.split() for line in maps]
    except OSError:
        return []
    pieces = []
    for span, access, _, _, inode, *name in areas:
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(end, 16) for end in span.split("-"))
            # a large page is within one piece
            cuts = [start, *range(start - start % PIECE + PIECE, stop, PIECE), stop]
            pieces += list(itertools.pairwise(cuts))
    return pieces


def use_large_pages(start: int, stop: int) -> None:
    """Ask the system to keep memory in pages of 2 MiB instead of 4 KiB.

    This works on Linux 6.1 and later; elsewhere nothing happens.

    A fork copies the table of all pages, and the rank's exit frees it: 6 and 8 ms with small pages,
    1.5 and 3 ms with large ones.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_COLLAPSE)
