"""On the sim, misuse and a rank's own exception end the run at once, and the process is as
before afterwards.
"""

from __future__ import annotations

import os
import random
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.simulate import simulate
from parallel101.spans import compute, recorder
from tests.collectives.cases import negative
from tests.ranks.failing import line_of

from .programs import run, wait_for


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        (torch.ones(2), torch.ones(3), "shorter"),
        (torch.ones(3), torch.ones(2), "longer"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "dtypes: float32 sent, int32"),
        (torch.ones(2, 3), torch.ones(3, 2), r"shapes: \(2, 3\) sent, \(3, 2\)"),
    ],
    ids=["too short", "too long", "dtype", "shape"],
)
@pytest.mark.parametrize("late", [0, 1])
def test_two_sides_that_do_not_agree(sent, received, words, late):
    def program(rank):
        if rank == late:
            compute(1.0)
        if rank == 0:
            dist.send(sent.clone(), 1)
        else:
            dist.recv(received.clone(), 0)

    error = simulate(program, 2).error
    with pytest.raises(MisuseError, match=words):
        raise error
    assert (
        error.rank == 1
        and line_of(program, "dist.send") in str(error)
        and line_of(program, "dist.recv") in str(error)
    )


@pytest.mark.parametrize("side", ["send", "recv"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(4, 4)[:, 0], "strided.*contiguous"),
        (negative(torch.zeros(4)), r"lazily conjugated or negated.*x\.resolve_conj\(\)"),
    ],
    ids=["strided", "negated"],
)
def test_tensors_that_gloo_would_misread(side, bad, words):
    def program(rank):
        if rank == 0:
            dist.send(bad if side == "send" else torch.zeros(4), 1)
        else:
            dist.recv(bad if side == "recv" else torch.zeros(4), 0)

    error = simulate(program, 2).error
    with pytest.raises(MisuseError, match=words):
        raise error
    assert error.rank == (side == "recv")


@pytest.mark.parametrize("numel", [3, (1 << 20)])
@pytest.mark.parametrize("when", ["before it starts", "under way", "after it ended"])
def test_a_tensor_changed_between_isend_and_wait(numel, when):
    def program(rank):
        x = torch.zeros(numel)
        if rank == 0:
            work = dist.isend(x, 1)
            compute({"before it starts": 0.0, "under way": 1.5, "after it ended": 0.0}[when])
            if when == "after it ended":
                dist.recv(torch.empty(1), 1)
            elif when == "under way":
                wait_for([dist.isend(torch.ones(1), 0), dist.irecv(torch.ones(1), 0)])
            x.fill_(float("nan"))
            work.wait()
        else:
            if when != "after it ended":
                compute(1.0)
            dist.recv(x, 0)
            if when == "after it ended":
                dist.send(torch.ones(1), 0)

    error = simulate(program, 2, Network(latency=1.0, bandwidth=1e12)).error
    assert (
        isinstance(error, MisuseError)
        and error.rank == 0
        and "changed" in str(error)
        and line_of(program, "dist.isend(x") in str(error)
    )


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


def test_the_first_failure_in_virtual_time_is_the_one_reported():
    def program(rank):
        compute(10.0 - rank)
        raise ValueError(f"rank {rank}")

    result = simulate(program, 4)
    assert result.failed_rank == 3 and str(result.error) == "rank 3"


def test_a_rank_that_communicates_while_it_is_cancelled_is_cancelled_again():
    def program(rank):
        if rank == 0:
            raise ValueError("first")
        try:
            dist.barrier()
        finally:
            dist.all_reduce(torch.ones(1))

    result = simulate(program, 3)
    assert result.failed_rank == 0 and isinstance(result.error, ValueError)


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


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_failure_inside_torchs_data_parallel_cancels_the_other_ranks(where):
    """The other ranks are then blocked inside C++."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward" and dist.get_rank() == 1:
                raise ValueError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if where == "backward" and dist.get_rank() == 1:
                raise ValueError("on purpose")
            return grad

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.last(Breaks.apply(self.first(x)))

    def program(rank):
        net = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1e-6)
        loss = net(torch.ones(2, 3)).sum()
        if where == "between" and rank == 1:
            raise ValueError("on purpose")
        loss.backward()

    for _ in range(2):
        result = simulate(program, 3)
        assert result.failed_rank == 1 and str(result.error) == "on purpose"


def test_waiting_on_a_thread_that_the_rank_started_is_an_error_and_no_hang():
    def program(rank):
        raised = []

        def elsewhere():
            try:
                dist.recv(torch.empty(1), 1 - rank)
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return raised

    assert all("only on its own thread" in result[0] for result in run(program, 2).results)


@pytest.mark.parametrize("n", [0, -1])
def test_a_world_size_below_one(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        simulate(lambda r: None, n)


def test_a_torus_of_another_world_size():
    with pytest.raises(ValueError, match="4 ranks, but this run has 3"):
        simulate(lambda r: None, 3, Network.torus((2, 2)))


class Reported(RuntimeError):
    """What a rank raises because another rank has failed."""

    def __init__(self, failed_rank):
        super().__init__(f"rank {failed_rank} failed")
        self.failed_rank = failed_rank


def test_a_rank_that_only_reports_anothers_failure_is_not_the_cause():
    def program(rank):
        dist.barrier()
        if rank != 2:
            raise Reported(2)
        # so the failure comes after the reports, in virtual time too
        dist.all_reduce(torch.ones(1), group=dist.new_group([2]))
        compute(1.0)
        raise ValueError("on rank 2")

    result = simulate(program, 4)
    assert result.failed_rank == 2 and isinstance(result.error, ValueError)


def test_reports_lead_from_rank_to_rank_to_the_cause():
    def program(rank):
        compute(float(rank))
        raise Reported(rank + 1) if rank < 3 else Reported(3)

    result = simulate(program, 4)
    assert result.failed_rank == 3 and str(result.error) == "rank 3 failed"


@pytest.mark.parametrize("then", ["returns", "waits"])
def test_a_report_counts_if_the_rank_it_names_does_not_fail(then):
    def program(rank):
        if rank == 0:
            raise Reported(1)
        if then == "waits":
            dist.recv(torch.empty(1), 0)

    result = simulate(program, 3)
    assert result.failed_rank == 0 and isinstance(result.error, Reported)
