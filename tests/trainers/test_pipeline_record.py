"""What the record of a pipeline shows: who sends what to whom, what each stage holds, and that
receives are posted ahead.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import OPTIMIZERS, randn

WIDTH, SAMPLES, MICROBATCHES = 6, 16, 8
SECONDS = {"forward": 1.0, "backward": 2.0, "input gradient": 1.0, "weight gradient": 1.0}


class Costly(MLP):
    """Its forward takes a second of a virtual rank's time, its backward two."""

    def forward(self, x):
        return Wait.apply(super().forward(x))


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        p101.compute(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        p101.compute(2.0)
        return g


def step(schedule, chunks=1, steps=1, microbatches=MICROBATCHES):
    ranks = torch.distributed.get_world_size()
    model = torch.nn.Sequential(
        *(Costly([WIDTH, WIDTH], seed=s, dtype=torch.float64) for s in range(ranks * chunks))
    )
    options = {
        "schedule": schedule,
        "microbatches": microbatches,
        "chunks": chunks,
        "verify": False,
    }
    trainer = p101.PipelineTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options)
    for number in range(steps):
        p101.barrier()
        with p101.span("step", number=number):
            trainer.step(randn(0, SAMPLES, WIDTH), randn(1, SAMPLES, WIDTH))


def activations_and_gradients(trace):
    """The messages of the pipeline, without those that announce shapes, which are whole numbers."""
    return [
        e
        for e in trace.events
        if e.kind == "send" and e.group.axis == "pp" and e.dtype == "float64"
    ]


@pytest.mark.parametrize("schedule", ["zb-h2", "1f1b"])
def test_activations_travel_to_the_next_stage_only_and_gradients_back(schedule):
    trace = p101.launch(step, schedule, world_size=3, backend="sim").trace
    counted = Counter((e.rank, e.peer) for e in activations_and_gradients(trace))
    assert counted == dict.fromkeys([(0, 1), (1, 2), (1, 0), (2, 1)], MICROBATCHES)
    assert {e.nbytes for e in activations_and_gradients(trace)} == {
        SAMPLES // MICROBATCHES * WIDTH * 8
    }


def test_shapes_are_announced_once():
    trace = p101.launch(step, "1f1b", steps=3, world_size=3, backend="sim").trace
    announced = [
        e for e in trace.events if e.kind == "send" and e.group.axis == "pp" and e.dtype == "int64"
    ]
    assert Counter((e.rank, e.peer) for e in announced) == {(0, 1): 1, (1, 2): 1}


def held_at_most(trace, rank):
    """(stage, microbatch) pairs from the start of the forward to the end of the backward, or of
    its last half.
    """
    done = "weight gradient" if trace.spans("weight gradient") else "backward"
    starts = [(e.start, 1) for e in trace.spans("forward") if e.rank == rank]
    ends = [(e.end, -1) for e in trace.spans(done) if e.rank == rank]
    held = peak = 0
    for _, change in sorted(starts + ends):
        held += change
        peak = max(peak, held)
    return peak


def test_one_f_one_b_holds_at_most_p_minus_rank_microbatches():
    trace = p101.launch(step, "1f1b", world_size=4, backend="sim").trace
    assert [held_at_most(trace, rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1)],
)
def test_a_run_takes_the_time_that_the_schedule_predicts(schedule, chunks):
    """On a virtual clock, where a forward takes one second and a backward two, all of it in its
    first half.
    """
    free = p101.Network(latency=0.0, bandwidth=math.inf)
    where = {"world_size": 4, "backend": "sim", "network": free}
    trace = p101.launch(step, schedule, chunks=chunks, **where).trace
    spans = [e for name in SECONDS for e in trace.spans(name)]
    run = max(e.end for e in spans) - min(e.start for e in spans)
    lists = p101.schedule(schedule, stages=4, microbatches=MICROBATCHES, chunks=chunks)
    assert run == pytest.approx(lists.time(forward=1.0, input_grad=2.0, weight_grad=0.0).makespan)


def messages(trace, rank, kind, begun):
    """Of this rank along pp, from then on."""
    of_rank = (e for e in trace.events if e.rank == rank and e.group.axis == "pp")
    return [e for e in of_rank if e.kind == kind and e.posted >= begun]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_the_next_receive_is_posted_before_the_present_compute_ends(backend):
    """From the second message of a shape on, since the first one is announced."""
    trace = p101.launch(step, "1f1b", steps=2, world_size=3, backend=backend, trace=True).trace
    begun = {e.rank: e.start for e in trace.spans("step") if e.args["number"] == 1}
    for rank in range(3):
        spans = (e for name in SECONDS for e in trace.spans(name) if e.rank == rank)
        computed = sorted((e for e in spans if e.start >= begun[rank]), key=lambda e: e.start)
        received = messages(trace, rank, "recv", begun[rank])
        assert len(received) == MICROBATCHES * (1 if rank in (0, 2) else 2)
        for e in received:
            # the first that may use it
            user = next(i for i, span in enumerate(computed) if span.end >= e.end)
            assert e.posted <= computed[max(0, user - 1)].end


def test_lists_with_messages_are_carried_out_in_their_order():
    """From the second step on, when shapes are known."""
    rank_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    rank_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    lists = p101.Schedule([rank_0.split(), rank_1.split()])
    trace = p101.launch(step, lists, microbatches=2, steps=2, world_size=2, backend="sim").trace
    begun = max(e.start for e in trace.spans("step") if e.args["number"] == 1)
    for rank, expected in enumerate((["send"] * 2 + ["recv"] * 2, ["recv"] * 2 + ["send"] * 2)):
        of_rank = [e for kind in ("send", "recv") for e in messages(trace, rank, kind, begun)]
        assert [e.kind for e in sorted(of_rank, key=lambda e: e.posted)] == expected
