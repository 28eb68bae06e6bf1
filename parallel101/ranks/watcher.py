"""The thread in a rank that speaks while the program is blocked: what it waits for, where, and what it has posted so far.

    program's thread   … compute … ──wait()───────────────────────────▶ …
    watcher            ·    ·    ·    ·  "blocked in recv from 3, at a.py:7" ·    ·  "free"

It looks ten times a second. Counts of what was posted only grow, and a blocked rank posts nothing, so the reports of all ranks together are
enough to tell a deadlock for certain (see trace.board).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import sysconfig
import threading
import time
from types import FrameType

import torch

from parallel101.ranks.wire import BLOCKED, BOOKS, FREE, LEAVE, PLACES, TELL, WHERE, Wire
from parallel101.record.recorder import Ledger, Posted
from parallel101.record.where import is_inside, where

# ── What a rank's program is surely blocked in, as another thread of the same process sees it.


STILL = 0.5  #  seconds without CPU time after which a thread in C++ is believed to wait
_WAITING = (*torch.autograd.__path__, *torch.futures.__path__)  #  where torch waits for futures
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Gaze:
    """Looks at the program's thread, again and again."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.spot: tuple[int, int, float] | None = None  #  where the thread was in C++, and how much CPU time it had used
        self.since = 0.0

    def blocked_in(self) -> Posted | None:
        """The call in which the program waits, and can't but wait; None while it may still post another."""
        waiting = self.ledger.waiting or self._in_backward()
        return None if waiting is None or others_at_work(self.ledger.thread) else waiting

    def _in_backward(self) -> Posted | None:
        taken = self.ledger.taken
        while taken and taken[0][0].is_completed():
            taken.popleft()
        frame = sys._current_frames().get(self.ledger.thread) if taken else None
        if frame is None or not frame.f_code.co_filename.startswith(_WAITING) or not hasattr(time, "pthread_getcpuclockid"):
            self.spot = None
            return None
        spot = id(frame), frame.f_lasti, time.clock_gettime(time.pthread_getcpuclockid(self.ledger.thread))
        now = time.monotonic()
        if spot != self.spot:
            self.spot, self.since = spot, now
        return taken[0][1] if now - self.since >= STILL else None


def others_at_work(program: int) -> bool:
    """Whether the program has another thread that may post something. One that is inside of a library has nothing to do with it."""
    mine = {program, threading.get_ident()}
    frames = sys._current_frames() if threading.active_count() > len(mine) else {}
    others = [thread for thread in threading.enumerate() if thread.ident not in mine]
    return any(isinstance(thread, threading.Timer) or _in_program(frames.get(thread.ident or 0)) for thread in others)


def _in_program(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_inside(name) and not name.startswith(_INSTALLED):
            return True
        frame = frame.f_back
    return False


TICK = 0.1  #  seconds
_leave = os._exit


class Obedient(threading.Thread):
    """Listens to the launching process. `finish` is set when the rank may go; when that process is gone, so is this one."""

    def __init__(self, wire: Wire):
        super().__init__(daemon=True, name="parallel101 watcher")
        self.wire = wire
        self.finish = threading.Event()

    def run(self) -> None:
        while not self.finish.is_set():
            if select.select([self.wire], [], [], TICK)[0]:
                self.obey()
            with contextlib.suppress(OSError):  #  the socket is gone: the next look tells
                self.look()

    def obey(self) -> None:
        try:
            kind, _ = self.wire.receive()
        except (EOFError, OSError):
            _leave(1)
        if kind == LEAVE:
            self.finish.set()
        elif kind == WHERE:
            self.wire.send(PLACES, self.places())
        elif kind == TELL:
            self.tell()

    def look(self) -> None:
        """What there is to report, ten times a second."""

    def tell(self) -> None:
        """Send what was recorded so far."""

    def places(self) -> list[tuple[int, str]]:
        """Where the program is: rank and "file:line"."""
        return []


class Watcher(Obedient):
    """The watcher of a real rank, which reports what it is blocked in."""

    def __init__(self, ledger: Ledger, wire: Wire):
        super().__init__(wire)
        self.ledger = ledger
        self.gaze = Gaze(ledger)
        self.apart = "its start, before the program"  #  where it is while that is no line of the program; "": there it is
        self.seen: Posted | None = None
        self.reported: Posted | None = None

    def look(self) -> None:
        waiting = self.gaze.blocked_in()
        if self.reported is not None and waiting is not self.reported:
            self.wire.send(FREE)
            self.reported = None
        if waiting is not None and waiting is self.seen and self.reported is None:
            with contextlib.suppress(RuntimeError):  #  another thread posted while the counts were copied: at the next look then
                self.wire.send(BLOCKED, (tuple(waiting.call(self.where())), self.ledger.report()))
                self.reported = waiting
        self.seen = waiting

    def tell(self) -> None:
        self.wire.send(BOOKS, (self.ledger.events, self.ledger.unfinished, self.ledger.report()))

    def places(self) -> list[tuple[int, str]]:
        return [(self.ledger.rank, self.apart or self.where())]

    def where(self) -> str:
        return where(sys._current_frames().get(self.ledger.thread))
