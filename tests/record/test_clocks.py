"""On NCCL a moment is an event in the GPU's stream.

Here the GPU is simulated, and ten seconds behind its program.
"""

import time

import pytest
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


def simulate_gpu():
    torch.cuda.Event, torch.cuda.synchronize = LateEvent, lambda: None
    dist.group.WORLD.recorder.clock = GpuClock()


def program(hangs):
    simulate_gpu()
    x, began = torch.ones(4), time.perf_counter()
    with p101.span("forward"):
        dist.all_reduce(x)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    ended = time.perf_counter()
    LateEvent.queued_for_ever = hangs
    return began, ended, [row[5:7] for row in dist.group.WORLD.recorder.events]


@pytest.mark.parametrize("hangs", [False, True])
def test_times_are_when_the_gpu_reached_an_event_or_else_when_the_program_did(hangs):
    run = p101.launch(program, hangs, world_size=2, trace=True)
    late = 0.0 if hangs else BEHIND
    for began, ended, times in run.results:
        assert len(times) == 3
        for start, end in times:
            assert began + late <= start <= end <= ended + late + 1
    kinds = [event.kind for event in run.trace.events if event.rank == 0]
    assert kinds == ["span", "all_reduce", "send"]


def a_moment():
    simulate_gpu()
    clock = dist.group.WORLD.recorder.clock
    before, moment = time.perf_counter(), clock.now()
    reached = clock.seconds(moment)
    LateEvent.queued_for_ever = True
    return before, reached, clock.seconds(moment), time.perf_counter()


def test_seconds_are_on_the_clock_of_the_cpu():
    before, reached, queued, after = p101.launch(a_moment, world_size=1).results[0]
    assert before <= queued <= after
    assert before + BEHIND <= reached <= after + BEHIND + 1
