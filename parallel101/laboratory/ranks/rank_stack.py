"""Reads what the program of one rank is doing, from another thread of its process.

    program's thread   ── q.get() ── … blocked
    watcher            StackReader.read() ──▶ RankStack: lines of Python, the function in C that it
                                              is in, seconds without a call, CPU time

C code that holds Python's lock keeps the watcher from running, too. For that case a signal's
handler writes the stack (`stack_on_signal`), which needs no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import IO, NamedTuple

from parallel101.laboratory.record.program_lines import is_inside, is_library, where
from parallel101.laboratory.record.recorder import RankRecorder

MOST_FRAMES = 20  # the innermost ones are kept
# The launching process asks by this signal for a rank's stack. A program may use SIGUSR1 itself.
STACK_SIGNAL: int | None = getattr(signal, "SIGRTMAX", None)
USER_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
# System calls whose first argument is a file, by number. (Source: Linux, syscall_64.tbl for x86-64
# and include/uapi/asm-generic/unistd.h for ARM.)
WITH_FILE = {
    "x86_64": {0, 1, 17, 18, 19, 20, 43, 44, 45, 46, 47, 72, 73, 74, 75, 288},
    "aarch64": {25, 32, 63, 64, 65, 66, 67, 68, 82, 83, 202, 206, 207, 211, 212, 242},
}.get(platform.machine(), set())


class RankStack(NamedTuple):
    """The place and the stack of one rank, and how long it has called nothing."""

    rank: int
    place: str  # "file:line" in the program, or what it does outside of it
    lines: list[str]  # its Python stack, the innermost call last; as text, with source lines
    native: str = ""  # the function in C that it is in, and where in the system; "" if not known
    quiet: float | None = None  # seconds in which it has called nothing of torch.distributed
    lately: float | None = None  # the last ones of these, in seconds: one to two
    cpu: float | None = None  # seconds of CPU time that its process used lately
    waits: str = ""  # on sim: "in recv for rank 1", or "for its turn"


class QuietClock:
    """Notes since when a state is the same, and the CPU time that the process uses meanwhile.

    Call `look` often. Without `at_once`, it does something once a second.
    """

    EVERY = 1.0  # seconds

    def __init__(self) -> None:
        self.state: object = self
        self.since = self.looked = -math.inf
        # the time and the CPU time of the last sample, and of the one before
        self.sample = self.before = (0.0, 0.0)

    def look(self, state: object, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self.looked < self.EVERY:
            return
        self.looked = now
        if state != self.state:
            self.state, self.since = state, now
            self.sample = self.before = now, time.process_time()
        elif now - self.sample[0] >= self.EVERY:
            self.before, self.sample = self.sample, (now, time.process_time())

    def times(self) -> tuple[float, float, float]:
        """Return `quiet`, `lately` and `cpu` of a RankStack."""
        now, (start, cpu) = time.monotonic(), self.before
        return now - self.since, now - start, time.process_time() - cpu


class StackReader:
    """Reads the stack of a rank's program, and notes since when it has called nothing.

    The watcher's thread calls `look` now and then.
    """

    def __init__(self, recorder: RankRecorder):
        self.recorder = recorder
        self.clock = QuietClock()

    def look(self, at_once: bool = False) -> None:
        self.clock.look(self.recorder.calls_posted, at_once)

    def read(self, outside: str = "", interrupted: FrameType | None = None) -> RankStack:
        """Return the stack now.

        Args:
            outside: where the rank is, if it isn't in its program.
            interrupted: where its program was, if Ctrl-C has interrupted it. What it did in C is
                not known then.
        """
        self.look(at_once=True)
        thread = self.recorder.thread
        frame = interrupted or sys._current_frames().get(thread)
        place, lines = outside or program_place(frame), stack_lines(frame)
        if interrupted is not None:
            return RankStack(self.recorder.rank, place, lines)
        native = native_frame(thread)
        return RankStack(self.recorder.rank, place, lines, native, *self.clock.times())


def program_place(frame: FrameType | None) -> str:
    """Return the "file:line" of the program's innermost frame, or else of a library's."""
    for f, line in traceback.walk_stack(frame) if frame is not None else ():
        if not is_library(f.f_code.co_filename):
            return f"{f.f_code.co_filename}:{line}"
    return where(frame)


def stack_lines(frame: FrameType | None) -> list[str]:
    """Return the Python stack as lines of text, without our frames that called the program."""
    if frame is None:
        return []
    frames = list(traceback.walk_stack(frame))[::-1]
    first = next((i for i, (f, _) in enumerate(frames) if not _runs_programs(f)), len(frames))
    summary = traceback.StackSummary.extract(iter(frames[first:] or frames))
    left_out = len(summary) - MOST_FRAMES
    text = "".join(traceback.format_list(summary[-MOST_FRAMES:])).splitlines()
    return [f"  … {left_out} outer calls", *text] if left_out > 0 else text


def _runs_programs(frame: FrameType) -> bool:
    return _is_ours(frame.f_code.co_filename)


def _is_ours(name: str) -> bool:
    return is_inside(name) or name == "<string>"  # the fork server's own first line


def native_frame(thread: int) -> str:
    """Return the innermost C function of a thread of this process that is blocked in the system.

    For example "clock_nanosleep in libc.so.6, in the kernel's hrtimer_nanosleep". It is "" for a
    thread that computes, on systems other than Linux, and where the system tells nothing.
    """
    native = next((t.native_id for t in threading.enumerate() if t.ident == thread), None)
    if thread == threading.main_thread().ident:  # after a fork, native_id is still the parent's
        native = os.getpid()
    task = f"/proc/self/task/{native}"
    try:
        with open(f"{task}/syscall") as file:
            call = file.read().split()
    except OSError:
        return ""
    if len(call) != 9:  # "running"
        return ""
    parts = [_symbol(int(call[-1], 16)), in_kernel(task)]
    if int(call[0]) in WITH_FILE:
        try:
            parts.append(f"file {os.readlink(f'/proc/self/fd/{int(call[1], 16)}')}")
        except (OSError, ValueError):
            pass
    return ", ".join(filter(None, parts))


def in_kernel(process: str) -> str:
    """Return where the kernel holds a process or thread, given its /proc folder; "" if unknown."""
    try:
        with open(f"{process}/wchan") as file:
            name = file.read().strip()
    except OSError:
        return ""
    return "" if name in ("", "0") else f"in the kernel's {name}"


class _Symbol(ctypes.Structure):
    """The fields of Dl_info, as dladdr(3) fills it."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _symbol(address: int) -> str:
    """Return the function at an address, "write in libc.so.6", or only its library."""
    symbol = _Symbol()
    try:
        known = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    except (OSError, AttributeError):
        return ""
    if not known or not symbol.file:
        return ""
    library = os.path.basename(symbol.file.decode(errors="replace"))
    return f"{symbol.name.decode(errors='replace')} in {library}" if symbol.name else library


def stack_on_signal(asked: int | IO, by_user: int | IO) -> None:
    """Let two signals make this process write its Python stack to a file, from now on.

    The signals work even while C code holds Python's lock. A program's own handlers stay.

    Args:
        asked: the file for STACK_SIGNAL.
        by_user: the file for SIGUSR1.
    """
    for number, file in ((STACK_SIGNAL, asked), (USER_SIGNAL, by_user)):
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            faulthandler.register(number, file, all_threads=False)


def ask_by_signal(pid: int) -> None:
    """Let a process write its stack (see `stack_on_signal`)."""
    if STACK_SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)


def no_stack_on_signal() -> None:
    """Undo `stack_on_signal`."""
    for number in (STACK_SIGNAL, USER_SIGNAL):
        if number is not None:
            faulthandler.unregister(number)


def stack_of_dump(rank: int, dump: str, pid: int) -> RankStack:
    """Return the stack that `stack_on_signal` wrote. It has no source lines."""
    dump = dump.rpartition("most recent call first")[2]  # the newest one
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (.*)$', dump, re.MULTILINE)
    places = [place for place in frames if not is_library(place[0])] or frames or [("?", 0, "")]
    own = places[0]
    while len(frames) > 1 and _is_ours(frames[-1][0]):
        frames.pop()
    lines = [f'  File "{name}", line {line}, in {function}' for name, line, function in frames]
    native = ["a function that holds Python's lock", in_kernel(f"/proc/{pid}")]
    return RankStack(
        rank, f"{own[0]}:{own[1]}", lines[:MOST_FRAMES][::-1], ", ".join(filter(None, native))
    )
