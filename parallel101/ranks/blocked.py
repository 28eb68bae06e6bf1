"""What a rank's program is surely blocked in, as another thread of the same process sees it.

in a wait() of a message or a collective               the ledger knows
in C++, in the middle of a backward (torch's DDP)      its thread uses no CPU, and a work whose future torch took has not ended
another thread of the program may still post           then nothing is sure
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from types import FrameType

import torch

from parallel101.backends.record import Ledger
from parallel101.backends.works import Posted
from parallel101.trace.where import is_inside

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
