"""On the sim, a rank's own exception ends the other ranks, and the process is as before afterwards.
(Other faults: tests/ranks/faults.py.)
"""

from __future__ import annotations

import os
import random
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.sim.simulate import simulate
from parallel101.spans import recorder

from .programs import run, wait_for


def test_writing_beside_a_sent_view_is_no_misuse():
    """torch's version counter of a view counts writes to its whole base, so the bytes must be
    compared.
    """

    def program(rank):
        x = torch.full((4,), float("nan"))
        works = [
            dist.isend(x[:2], 1 - rank),
            dist.irecv(x[2:3], 1 - rank, tag=1),
            dist.irecv(torch.empty(2), 1 - rank),
        ]
        works.append(dist.isend(torch.ones(1), 1 - rank, tag=1))
        x[3] = 5.0
        wait_for(works)
        return x[2:].tolist()

    assert run(program, 2).results == [[1.0, 5.0]] * 2


def test_inference_tensors_are_sent_and_received():
    def program(rank):
        with torch.inference_mode():
            x, y = torch.full((2,), float(rank)), torch.empty(2)
            wait_for([dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)])
            dist.all_reduce(x)
            return y.tolist(), x.tolist()

    assert run(program, 2).results == [([1.0, 1.0], [1.0, 1.0]), ([0.0, 0.0], [1.0, 1.0])]


def test_an_exception_on_one_rank_cancels_the_others():
    closed = []

    def program(rank):
        try:
            if rank == 1:
                dist.recv(torch.empty(1), 0)
                raise KeyError("mine")
            if rank == 0:
                dist.send(torch.ones(1), 1)
            try:
                dist.barrier()
            except Exception:
                closed.append("never")
        finally:
            closed.append(rank)

    result = simulate(program, 3)
    assert result.failed_rank == 1 and isinstance(result.error, KeyError)
    assert result.error.__traceback__ is not None and sorted(closed) == [0, 1, 2]


def test_a_failing_job_leaves_the_process_as_it_was():
    def settings():
        process = threading.active_count(), torch.get_num_threads(), dist.is_initialized()
        cores = (
            (os.sched_getaffinity(0), os.sched_getscheduler(0)) if sys.platform == "linux" else None
        )
        return *process, torch.get_default_dtype(), random.random.__qualname__, cores

    before, state = settings(), torch.get_rng_state()

    def program(rank):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1)
        dist.recv(torch.empty(1), (rank + 1) % 4)

    simulate(program, 4)
    assert settings() == before
    assert torch.equal(torch.get_rng_state(), state) and recorder() is None


@pytest.mark.parametrize("n", [0, -1])
def test_a_world_size_below_one(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        simulate(lambda r: None, n)
