"""What the record says of data parallel: the bytes that theory says, and buckets that leave
while backward still computes.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101 import DataParallelTrainer
from parallel101.analysis.overlap import time_breakdown, time_windows
from parallel101.models.mlp import MLP
from parallel101.sim.network import Network

VARIANTS = {
    "naive": {"overlap": False, "bucket_bytes": 0},
    "bucketed": {"overlap": False, "bucket_bytes": 1500},
    "overlapped": {"overlap": True, "bucket_bytes": 1500},
    "as it comes": {},
}
WIDTH = 12  # 2, 3 and 4 divide it, and so every gradient


def step(variant, accumulate=1):
    """One step, begun after all ranks have met."""
    trainer = DataParallelTrainer(
        MLP([WIDTH] * 5),
        F.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        accumulate=accumulate,
        **variant,
    )
    share = trainer.share((torch.ones(24, WIDTH), torch.ones(24, WIDTH)))
    p101.barrier()
    with p101.span("step"):
        trainer.step(*share)


def steps(*settings):
    for variant, accumulate in settings:
        step(VARIANTS[variant], accumulate)


EVERY = [(variant, accumulate) for variant in VARIANTS for accumulate in (1, 3)]
GRADIENT_BYTES = 4 * sum(p.numel() for p in MLP([WIDTH] * 5).parameters())
CLOCK = Network(latency=1.0, bandwidth=1e6)


def gradient_bytes_sent(trace):
    """By rank and step. Gradients are float32; the few numbers with which ranks agree on counts
    and losses are not.
    """
    sent = [[0] * (len(trace.spans("step")) // trace.world_size) for _ in range(trace.world_size)]
    for rank in range(trace.world_size):
        mine = [span for span in trace.spans("step") if span.rank == rank]
        for e in trace.events:
            if e.kind == "send" and e.rank == rank and "float32" in e.dtype:
                (number,) = (i for i, span in enumerate(mine) if span.start <= e.posted <= span.end)
                sent[rank][number] += e.nbytes
    return sent


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_bytes_are_two_n_minus_one_over_n_of_the_gradients(p):
    """In every variant, however many microbatches."""
    trace = p101.launch(steps, *EVERY, world_size=p, backend="sim", network=CLOCK).trace
    expected = 2 * (p - 1) * GRADIENT_BYTES // p
    assert gradient_bytes_sent(trace) == [[expected] * len(EVERY)] * p
    asked = (
        (8 + 16 + 32) * (p - 1)
    )  # first a hash of the model and a seed; in a step a count, and a loss, its weight and the unused parameters
    met = math.ceil(math.log2(p))  # the barrier's bytes
    assert trace.bytes_sent == [len(EVERY) * (expected + asked + met)] * p, "and nothing else"


def test_bytes_on_gloo(backend):
    trace = p101.launch(steps, *EVERY, world_size=2, backend=backend, trace=True).trace
    assert gradient_bytes_sent(trace) == [[GRADIENT_BYTES] * len(EVERY)] * 2


def test_ranks_that_do_not_divide_the_gradients_send_as_much_together():
    trace = p101.launch(steps, *EVERY, world_size=5, backend="sim", network=CLOCK).trace
    assert [sum(of_step) for of_step in zip(*gradient_bytes_sent(trace))] == [
        2 * (5 - 1) * GRADIENT_BYTES
    ] * len(EVERY)


def first_gradient(trace, backward):
    """When the first gradient left after this backward had begun."""
    sends = (
        e
        for e in trace.events
        if e.kind == "send" and e.rank == backward.rank and "float32" in e.dtype
    )
    return min(e.posted for e in sends if e.posted >= backward.start)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_first_bucket_leaves_before_the_last_gradient_is_ready(backend):
    settings = [("as it comes", 1), ("overlapped", 1), ("bucketed", 1)]
    trace = p101.launch(
        steps,
        *settings,
        world_size=2,
        backend=backend,
        trace=True,
        network=CLOCK if backend == "sim" else None,
    ).trace
    for rank in range(2):
        *overlapping, afterwards = (e for e in trace.spans("backward") if e.rank == rank)
        for backward in overlapping:
            ready = [
                e
                for e in trace.spans("gradient ready")
                if e.rank == rank and backward.start <= e.start <= backward.end
            ]
            assert len(ready) == 8
            assert {e.args["parameter"] for e in ready[-2:]} == {"layers.0.weight", "layers.0.bias"}
            if backend == "gloo":  # backward takes no virtual time
                assert first_gradient(trace, backward) < ready[-1].start
            assert first_gradient(trace, backward) <= ready[-1].start
        assert first_gradient(trace, afterwards) >= afterwards.end, (
            "where backward comes first, nothing leaves before its end"
        )


class TakesTime(nn.Module):
    """A layer whose backward takes a virtual rank ten seconds."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            p101.compute(10.0)
            return g

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 10, bias=False)

    def forward(self, x):
        return self.Function.apply(self.linear(x))


def deep(overlap):
    torch.manual_seed(0)
    model = nn.Sequential(*(TakesTime() for _ in range(6)))
    trainer = DataParallelTrainer(
        model, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), overlap=overlap, bucket_bytes=400
    )
    x = torch.ones(dist.get_world_size(), 10)
    with p101.span("step"):
        trainer.step(*trainer.share((x, x)))


def test_time_is_saved_by_sending_while_computing():
    """Six layers of 10 s each; each gradient takes 2 s to be added up and 2 s to be told.

    Overlapped, of the six only the last, and what
    the last but one has to tell, are left when backward ends."""
    network = Network(latency=0.0, bandwidth=100.0)
    times = {}
    for overlap in (True, False):
        trace = p101.launch(deep, overlap, world_size=2, backend="sim", network=network).trace
        backward, synchronise = trace.spans("backward")[0], trace.spans("synchronise")[0]
        times[overlap] = (backward.end - backward.start, synchronise.end - synchronise.start)
    assert times[False] == pytest.approx((60.0, 6 * 4.0))
    assert times[True] == pytest.approx((60.0, 2.0 + 4.0))


def test_to_wait_for_gradients_is_no_compute():
    """Where a gradient takes longer than a layer, backward lasts as long as the network does;
    the lanes show the 60 s of compute.
    """
    trace = p101.launch(
        deep, True, world_size=2, backend="sim", network=Network(latency=0.0, bandwidth=10.0)
    ).trace
    (window,) = time_windows(trace, ["step"])
    for rank in range(2):
        (backward,) = (e for e in trace.spans("backward") if e.rank == rank)
        waits = [
            e
            for e in trace.spans("wait for gradients")
            if e.rank == rank and backward.start <= e.start < backward.end
        ]
        waited = sum(e.end - e.start for e in waits)
        assert waited > 0
        assert backward.end - backward.start == pytest.approx(60.0 + waited)
        assert time_breakdown(window, rank).compute == pytest.approx(60.0)
