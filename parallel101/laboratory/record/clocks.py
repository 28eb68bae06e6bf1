"""The clocks of real ranks.

On a CPU a moment is a number. On a GPU it is a CUDA event, because the program runs ahead of the
GPU.

    CPU   post  wait  post  wait              perf_counter measures calls that only queue work
    GPU         ░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░▓▓▓▓▓▓  a CUDA event in the same stream measures the work

A CUDA event has a time once the GPU has reached it. Virtual ranks have no such clock: see
parallel101/laboratory/sim/clock.py.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.record.events import Event


class Moment(NamedTuple):
    """A position in the GPU's stream, and when the program reached it."""

    event: torch.cuda.Event
    queued: float


class CpuClock:
    """A clock that is the same for all processes of a machine."""

    now = staticmethod(time.perf_counter)

    def catch_up(self) -> None:
        """Do nothing: a CPU has no queue."""

    def in_seconds(self, events: list[Event]) -> list[Event]:
        return events


class GpuClock:
    """The machine's clock, read when this rank's GPU reaches a position in its stream."""

    def __init__(self) -> None:
        self.zero = torch.cuda.Event(enable_timing=True)
        self.zero.record()
        self.catch_up()
        self.began = time.perf_counter()

    def now(self) -> Moment:
        """Return the present position in this thread's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Moment(event, time.perf_counter())

    def catch_up(self) -> None:
        """Wait until the GPU has done all queued work."""
        torch.cuda.synchronize()

    def in_seconds(self, events: list[Event]) -> list[Event]:
        """Return events whose times are moments with their times in seconds."""
        seconds: Any = self.seconds
        return [
            e._replace(start=seconds(e.start), end=seconds(e.end), posted=seconds(e.posted))
            for e in events
        ]

    def seconds(self, moment: Moment) -> float:
        """Return the time at which the GPU reached a moment.

        If the GPU hangs before it, in a message that nobody sends: when the program reached it.
        """
        if not moment.event.query():
            return moment.queued
        return self.began + self.zero.elapsed_time(moment.event) / 1000
