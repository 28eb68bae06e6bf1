"""When was that? On a CPU a moment is a number. On a GPU the program only queues its work, and is far ahead of it.

    CPU   post  wait  post  wait                    what perf_counter would see: everything takes no time
    GPU         ░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░▓▓▓▓▓▓        what a CUDA event in the same stream sees

So on NCCL a moment is an event in the stream, and becomes a number once the GPU has come by.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from parallel101.record.events import Event


class Moment(NamedTuple):
    """A place in the GPU's stream, and when the program queued it."""

    event: torch.cuda.Event
    queued: float


class CpuClock:
    """One clock for all processes of a machine."""

    now = staticmethod(time.perf_counter)

    def catch_up(self) -> None:
        """Nothing is queued on a CPU."""

    def in_seconds(self, events: list[Event]) -> list[Event]:
        return events


class GpuClock:
    """The same clock, read by this rank's GPU as it comes by."""

    def __init__(self) -> None:
        self.zero = torch.cuda.Event(enable_timing=True)
        self.zero.record()
        self.catch_up()
        self.began = time.perf_counter()

    def now(self) -> Moment:
        """Here, in the stream in which this thread's work is queued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Moment(event, time.perf_counter())

    def catch_up(self) -> None:
        """Wait until the GPU has done all that is queued."""
        torch.cuda.synchronize()

    def in_seconds(self, events: list[Event]) -> list[Event]:
        """Events whose times are moments, with their times in seconds."""
        seconds: Any = self.seconds
        return [e._replace(start=seconds(e.start), end=seconds(e.end), posted=seconds(e.posted)) for e in events]

    def seconds(self, moment: Moment) -> float:
        """When the GPU came by; when the program did, where the GPU never will: it hangs in a message that nobody sends."""
        if not moment.event.query():
            return moment.queued
        return self.began + self.zero.elapsed_time(moment.event) / 1000
