"""On NCCL a moment is an event in the GPU's stream.

Here the GPU is simulated, and ten seconds behind its program.
"""

import time

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.record.clocks import GpuClock

BEHIND = 10.0


class LateEvent:
    """Replaces torch.cuda.Event: it happens BEHIND seconds after it was queued, or never."""

    queued_for_ever = False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def query(self):
        return not self.queued_for_ever

    def elapsed_time(self, other):
        return 1000 * (other.at + BEHIND - self.at)


def program():
    torch.cuda.Event, torch.cuda.synchronize = LateEvent, lambda: None
    clock = dist.group.WORLD.recorder.clock = GpuClock()
    x, began = torch.ones(4), time.perf_counter()
    with p101.span("forward"):
        dist.all_reduce(x)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    moment = clock.now()
    ended = time.perf_counter()
    seen = []
    for LateEvent.queued_for_ever in (False, True):
        times = [row[5:7] for row in dist.group.WORLD.recorder.events]
        seen.append((times, clock.seconds(moment)))
    return began, ended, seen


def test_times_are_when_the_gpu_reached_an_event_or_else_when_the_program_did():
    """They are on the clock of the CPU."""
    run = p101.launch(program, world_size=2, trace=True)
    for began, ended, seen in run.results:
        for late, (times, moment) in zip((BEHIND, 0.0), seen, strict=True):
            assert len(times) == 3
            for start, end in [*times, (moment, moment)]:
                assert began + late <= start <= end <= ended + late + 1
    kinds = [event.kind for event in run.trace.events if event.rank == 0]
    assert kinds == ["span", "all_reduce", "send"]
