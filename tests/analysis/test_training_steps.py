"""Training steps are found by spans or by the optimizer's marks, and keep their numbers if the
record has the last events only.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.run_window import training_steps
from parallel101.laboratory.record.trace import Trace
from parallel101.spans import OPTIMIZER_STEP, span
from tests.record.test_rank_files import window
from tests.sim.programs import run, trace

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
    return trace(run(lambda rank: program(name), SIZE))


@pytest.mark.parametrize("name", ["step", "optimizer", OPTIMIZER_STEP])
def test_steps_are_found_and_numbered(name):
    whole = record(name)
    steps = training_steps(whole)
    assert steps.first == 1 and len(steps.times) == STEPS
    took = [end - begin for begin, end in steps.times]
    assert took.index(max(took)) == 19
    assert sorted(took)[STEPS // 2] == pytest.approx(3.0, rel=1e-3)
    part = training_steps(window(whole, 60))
    assert part.first > 1 and part.first + len(part.times) - 1 == STEPS
    assert part.times == steps.times[part.first - 1 :]


def test_a_program_without_such_spans_has_no_steps():
    assert training_steps(record("nothing")) is None
    assert training_steps(Trace([], 2, "sim")) is None
