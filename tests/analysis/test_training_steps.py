"""Training steps are found by spans or by the optimizer's marks, and keep their numbers if the
record has the last events only.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.training_steps import training_steps
from parallel101.laboratory.record.last_events import LastEvents
from parallel101.laboratory.record.trace import Trace
from parallel101.spans import OPTIMIZER_STEP, span

SIZE, STEPS = 2, 30


def program(name):
    """Each step takes 3 s on rank 0 and 2 s on rank 1, which then waits; step 20 takes 9 s more."""
    rank = dist.get_rank()
    for step in range(STEPS):
        slow = 9.0 * (step == 19)
        with span("step" if name == "step" else "work"):
            p101.compute(2.0 + slow + (rank == 0))
            for numel in (8, 8, 100):
                dist.all_reduce(torch.ones(numel))
            if step % 10 == 9:
                dist.broadcast(torch.ones(1), 0)
        if name in ("optimizer", OPTIMIZER_STEP):
            with span(name):
                pass


def record(name):
    return p101.launch(program, name, world_size=SIZE, backend="sim").trace


def last_events(trace, limit):
    rows, earlier = [], []
    for rank in range(SIZE):
        recorded = []
        last = LastEvents(limit, recorded, lambda events: events, list)
        for event in sorted((e for e in trace.events if e.rank == rank), key=lambda e: e.end):
            recorded.append(event)
            last.take_batches()
        kept, sums = last.rows(lambda recorded=recorded: [tuple(e) for e in recorded])
        rows += kept
        earlier += sums
    return Trace.from_rows(rows, SIZE, "sim", (), earlier)


@pytest.mark.parametrize("name", ["step", "optimizer", OPTIMIZER_STEP])
def test_steps_are_found_and_numbered(name):
    trace = record(name)
    steps = training_steps(trace)
    assert steps.first == 1 and len(steps.times) == STEPS
    took = [end - begin for begin, end in steps.times]
    assert took.index(max(took)) == 19
    assert sorted(took)[STEPS // 2] == pytest.approx(3.0, rel=1e-3)
    part = training_steps(last_events(trace, 60))
    assert part.first > 1 and part.first + len(part.times) - 1 == STEPS
    assert part.times == steps.times[part.first - 1 :]


def test_a_program_without_such_spans_has_no_steps():
    assert training_steps(record("nothing")) is None
    nothing = p101.launch(lambda: None, world_size=2, backend="sim").trace
    assert training_steps(nothing) is None
