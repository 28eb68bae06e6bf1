"""Reads what the program of one rank is doing, from another thread of its process.

    program's thread   ── q.get() ── … blocked
    watcher            RankObserver.stack() ─▶ RankStack: lines of Python, seconds without a call,
                                              use of the CPU

C code that holds Python's lock keeps the watcher from running, too. Then the rank doesn't answer.
"""

from __future__ import annotations

import time
import traceback
from types import FrameType
from typing import NamedTuple

from parallel101.laboratory.record.program_lines import is_inside, is_library, where

MOST_FRAMES = 20  # the innermost ones are kept


class RankStack(NamedTuple):
    """The place and the stack of one rank, and how long it has called nothing."""

    rank: int
    place: str  # "file:line" in the program, or what it does outside of it
    lines: list[str]  # its Python stack, the innermost call last; as text, with source lines
    quiet: float | None = None  # seconds in which it has called nothing of torch.distributed
    busy: float = 0.0  # cores that its process has used in the last second or two
    waits: str = ""  # on sim: "in recv for rank 1", or "for its turn"


class QuietClock:
    """Notes since when a state is the same, and the CPU time that the process uses."""

    EVERY = 1.0  # seconds between two samples

    def __init__(self) -> None:
        self.state: object = self
        self.since = 0.0
        self.older = self.newer = (-1.0, 0.0)  # samples: the time and the CPU time

    def look(self, state: object) -> tuple[float, float]:
        """Return `quiet` and `busy` of a RankStack. Call it often."""
        now, cpu = time.monotonic(), time.process_time()
        if state != self.state:
            self.state, self.since = state, now
        if now - self.newer[0] >= self.EVERY:
            self.older, self.newer = self.newer, (now, cpu)
        return now - self.since, (cpu - self.older[1]) / (now - self.older[0])


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
    name = frame.f_code.co_filename
    return is_inside(name) or name == "<string>"  # the fork server's own first line
