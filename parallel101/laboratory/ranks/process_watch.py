"""Finds which ranks of this host have ended, and how. Each rank of a job watches the others.

    rank 1's process ── ends ──▶ its pidfd can be read, and /proc/<pid>/stat has its exit status
    rank 0's watch   ── waits for that; the status is there until torchrun has fetched it

Only the parent of a process is sure to learn its exit status, and here that is torchrun. So the
status may be unknown. Ranks on other hosts are not seen: see heartbeat.py. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel101.laboratory.ranks.diagnosis import how_it_ended
from parallel101.laboratory.ranks.heartbeat import texts_of
from parallel101.laboratory.ranks.job_messages import from_json

LOOK_EVERY = 1.0  # seconds between two looks for ranks that have come
ON_LINUX = hasattr(os, "pidfd_open") and hasattr(select, "epoll")


class ProcessWatch(threading.Thread):
    """Waits for the end of the other ranks' processes on this host.

    Attributes:
        ended: by rank, its exit code (negative: the signal that killed it), or None if that is not
            known.
    """

    def __init__(self, rank: int, size: int, store: dist.Store):
        super().__init__(daemon=True, name="parallel101 process watch")
        self.rank, self.size, self.store = rank, size, store
        self.ended: dict[int, int | None] = {}
        self.unknown = set(range(size)) - {rank}  # ranks that have not said where they run
        self.watched: dict[int, tuple[int, int]] = {}  # pidfd → rank, pid
        self.looking, self.next_look = threading.Lock(), 0.0
        self.over = False
        self.events: Any = None
        if ON_LINUX:
            self.events = select.epoll()
            self.woken, self.wake = os.pipe()
            self.events.register(self.woken, select.EPOLLIN)

    def look(self, at_once: bool = False) -> None:
        """Watch ranks of this host that have come since the last look, once a second."""
        if not self.unknown or self.events is None:
            return
        with self.looking:
            if time.monotonic() < self.next_look and not at_once:
                return
            self.next_look = time.monotonic() + LOOK_EVERY
            for rank, text in enumerate(texts_of("process", self.size, self.store)):
                if text and rank in self.unknown:
                    self.unknown.remove(rank)
                    host, pid, _ = from_json(text)
                    if host == socket.gethostname():
                        self._watch(rank, pid)

    def run(self) -> None:
        while self.events is not None and not self.over:
            for fd, _ in self.events.poll():
                if fd != self.woken:
                    rank, pid = self.watched[fd]
                    self.events.unregister(fd)
                    self.ended[rank] = _exit_code(pid)

    def stop(self) -> None:
        """End the watch. It can't be used again."""
        self.over = True
        if self.events is None:
            return
        os.write(self.wake, b"x")
        if self.ident is not None:
            self.join()
        for fd in (*self.watched, self.woken, self.wake):
            os.close(fd)
        self.events.close()

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended[rank] = None
        except OSError:
            pass  # an old kernel, or too many files
        else:
            self.watched[fd] = rank, pid
            self.events.register(fd, select.EPOLLIN)


def ended_text(ended: Mapping[int, int | None]) -> str:
    """Return a line for each rank whose process has ended, given their exit codes."""
    host = socket.gethostname()
    return "\n  ".join(f"rank {rank} (on {host}) {_how(code)}" for rank, code in ended.items())


def _how(code: int | None) -> str:
    if code is None:
        return (
            "has ended before its program: its process was killed by a signal, or has called "
            "os._exit. The report of its launcher (torchrun, srun, mpirun) has the exit code"
        )
    return how_it_ended(code)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended, if its parent has not fetched it."""
    with contextlib.suppress(OSError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    return None
