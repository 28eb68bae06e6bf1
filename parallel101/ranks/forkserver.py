"""The fork server: a process that has imported torch, done nothing with it, and turns into a rank whenever it is asked to.

serve:  request (a rank's ends of its channels) ──▶ fork ──▶ worker.main      its exit code ──▶ the rank's status pipe
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

COLLAPSE = getattr(mmap, "MADV_COLLAPSE", 25)
PIECE = 8 << 20  #  bytes: 10 ms of work, for which a request may have to wait


def serve(fd: int) -> None:
    """The fork server's loop: fork a rank for each request, report each rank's exit code, end with the launching process."""
    import parallel101.ranks.worker as worker  #  with all that a rank needs, so that a fork has it at once

    importlib.import_module("parallel101.autograd")  #  and the collectives, which most programs call

    server = socket.socket(fileno=fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, int] = {}  #  pid of a living rank -> where its exit code goes
    pieces = memory()  #  to be put into large pages when there is nothing else to do
    while True:
        ready, _, _ = select.select([server.fileno(), woken], [], [], 0 if pieces and not reports else None)
        if not ready:
            use_large_pages(*pieces.pop())
        if woken in ready:
            os.read(woken, 4096)
            _reap(reports)
        if server.fileno() in ready:
            try:
                request, fds, _, _ = socket.recv_fds(server, 4096, 5)
            except ConnectionResetError:
                request = b""
            if not request:
                break
            what, number, *names = request.decode().split()
            if what == "import":
                _answer(server, number, 0)  #  whoever asked need not wait for it
                for name in names:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)
                pieces = memory()
                continue
            try:
                pid = os.fork()
            except OSError as refused:  #  too many processes, or no memory
                for end in fds:
                    os.close(end)
                _answer(server, number, -(refused.errno or errno.EAGAIN))
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                worker.main(**_stdio(*fds))
            with contextlib.suppress(OSError):  #  it has ended already
                os.setpgid(pid, pid)  #  a group of its own, which whoever asked can kill as soon as it knows of the rank
            *theirs, reports[pid] = fds
            for end in theirs:
                os.close(end)
            _answer(server, number, pid)
    server.close()
    for pid in reports:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _answer(server: socket.socket, number: str, answer: int) -> None:
    """A rank's pid, or an errno below zero; 0 where nothing was to be started."""
    with contextlib.suppress(OSError):  #  whoever asked is gone: the next request will be none
        server.send(f"{number} {answer}\n".encode())


def memory() -> list[tuple[int, int]]:
    """The memory that this process has written to, as pieces of at most PIECE bytes: where each starts and stops. (Linux only.)"""
    try:
        with open("/proc/self/maps") as maps:
            areas = [line.split() for line in maps]
    except OSError:
        return []
    pieces = []
    for span, access, _, _, inode, *name in areas:
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(end, 16) for end in span.split("-"))
            cuts = [start, *range(start - start % PIECE + PIECE, stop, PIECE), stop]  #  a large page lies within one piece
            pieces += list(itertools.pairwise(cuts))
    return pieces


def use_large_pages(start: int, stop: int) -> None:
    """Have the system keep memory in pages of 2 MiB, not 4 KiB (since Linux 6.1; elsewhere nothing happens).

    A fork copies the table of all pages, and a rank's end takes it apart: 6 and 8 ms by small pages, 1.5 and 3 ms by large ones.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), COLLAPSE)


def _stdio(control: int, out: int, err: int, calls: int, status: int) -> dict[str, Any]:
    """In a new rank: make its pipes the standard streams, and let go of all else that the fork server holds."""
    import fcntl  #  not on Windows, and neither is fork

    null = os.open(os.devnull, os.O_RDONLY)
    aside = [fcntl.fcntl(end, fcntl.F_DUPFD, 16) for end in (null, out, err, control, calls, status)]  #  out of the way of 0 to 5
    for wanted, end in enumerate(aside):
        os.dup2(end, wanted)
    os.closerange(6, max(int(name) for name in os.listdir("/dev/fd")) + 1)
    return {"control": 3, "calls": 4, "status": 5}


def _reap(reports: dict[int, int]) -> None:
    while reports:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in reports:
            end = reports.pop(pid)
            try:
                os.write(end, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except BrokenPipeError:
                pass  #  whoever asked no longer listens
            os.close(end)
