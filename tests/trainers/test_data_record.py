"""What the record says of data parallel and ZeRO: the bytes that theory says, and messages that
leave while forward and backward still compute.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.laboratory.analysis.overlap import time_breakdown, time_windows
from parallel101.models.mlp import MLP
from tests.trainers.cases import TRAINERS, sgd

SIZES = [12, 24, 36, 48, 60, 72]  # 2, 3 and 4 divide every layer; no two layers are alike
LAYERS = [4 * (a * b + b) for a, b in zip(SIZES, SIZES[1:])]  # bytes
VARIANTS = {name: partial(build, verify=False) for name, build in TRAINERS.items()} | {
    "as it comes": partial(p101.DataParallelTrainer, verify=False)
}
THEORY = {  # trainer, microbatches → how often (n−1)/n of the weights' bytes are sent
    (name, m): 2 for name in ("naive", "overlapped", "as it comes", "ZeRO-1") for m in (1, 3)
} | {
    ("ZeRO-2", 1): 2,
    ("ZeRO-2", 3): 3 + 1,  # stages 2 and 3 hold nothing to accumulate in
    ("ZeRO-3", 1): 3,
    ("ZeRO-3", 3): 3 * 3,
}
CLOCK = p101.Network(latency=1.0, bandwidth=1e6)


def steps(settings, **options):
    """One step with each setting, begun after all ranks have met."""
    for i, (name, accumulate) in enumerate(settings):
        trainer = VARIANTS[name](MLP(SIZES), F.mse_loss, sgd, accumulate=accumulate, **options)
        share = trainer.share((torch.ones(24, SIZES[0]), torch.ones(24, SIZES[-1])))
        p101.barrier()
        with p101.span("step", number=i):
            trainer.step(*share)


def sends(trace, rank):
    """Of weights and gradients, which are float32; what ranks agree on is not."""
    of_rank = (e for e in trace.events if e.kind == "send" and e.rank == rank)
    return [e for e in of_rank if "float32" in e.dtype]


def bytes_by_step(trace):
    return [
        [
            sum(e.nbytes for e in sends(trace, rank) if span.start <= e.posted <= span.end)
            for span in trace.spans("step")
            if span.rank == rank
        ]
        for rank in range(trace.world_size)
    ]


@pytest.mark.parametrize(("p", "backend"), [(1, "sim"), (3, "sim"), (4, "sim"), (2, "gloo")])
def test_bytes_are_those_of_theory(p, backend):
    """In every variant, however many microbatches: 2(n−1)/n of the gradients' bytes, and with
    ZeRO-3 3(n−1)/n of the weights'.
    """
    network = {"network": CLOCK} if backend == "sim" else {}
    run = p101.launch(steps, list(THEORY), world_size=p, backend=backend, trace=True, **network)
    expected = [times * (p - 1) * sum(LAYERS) // p for times in THEORY.values()]
    assert bytes_by_step(run.trace) == [expected] * p


def test_nothing_else_is_sent():
    """Before the step, a hash of the model and a seed; in it, a count of samples, then a loss,
    its weight and the unused parameters; and the bytes of the barrier.
    """
    p = 4
    trace = p101.launch(steps, [("overlapped", 1)], world_size=p, backend="sim").trace
    agreed, met = (8 + 16 + 32) * (p - 1), math.ceil(math.log2(p))
    assert trace.bytes_sent == [2 * (p - 1) * sum(LAYERS) // p + agreed + met] * p


def test_ranks_that_do_not_divide_the_gradients_send_as_much_together():
    settings = [("naive", 1), ("overlapped", 1)]
    trace = p101.launch(steps, settings, world_size=5, backend="sim", network=CLOCK).trace
    assert [sum(of_step) for of_step in zip(*bytes_by_step(trace))] == [2 * 4 * sum(LAYERS)] * 2


# ── overlap ──


@pytest.mark.parametrize("name", ["as it comes", "overlapped", "ZeRO-1", "ZeRO-2"])
def test_the_first_gradients_leave_before_the_last_is_ready(name, backend):
    for overlap in (True, False):
        options = {"overlap": overlap, "bucket_bytes": LAYERS[-1]}
        where = {"world_size": 2, "backend": backend, "trace": True}
        trace = p101.launch(steps, [(name, 1)], **options, **where).trace
        for rank in range(2):
            first = sends(trace, rank)[0].posted
            (backward,) = (e for e in trace.spans("backward") if e.rank == rank)
            ready = [e for e in trace.spans("gradient ready") if e.rank == rank]
            if overlap:
                last = {e.args["parameter"] for e in ready[-2:]}
                assert last == {"layers.0.weight", "layers.0.bias"}
                assert backward.start < first < ready[-1].start
            else:
                assert first >= (ready[-1].start if ready else backward.end)


def test_the_next_layer_is_on_its_way_before_this_one_ends(backend):
    ahead, on_demand = [], []
    for overlap, found in ((True, ahead), (False, on_demand)):
        where = {"world_size": 2, "backend": backend, "trace": True}
        trace = p101.launch(steps, [("ZeRO-3", 1)], overlap=overlap, **where).trace
        for rank in range(2):
            spans = {
                (e.name, e.args["layer"]): e
                for name in ("layer forward", "layer backward")
                for e in trace.spans(name)
                if e.rank == rank
            }
            assert len(spans) == 2 * len(LAYERS)
            # a layer's block travels three times: gathered, gathered again, and its gradient
            for i, layer in enumerate(LAYERS):
                forward, backward, gradient = (
                    e.start for e in sends(trace, rank) if e.nbytes == layer // 2
                )
                assert forward <= spans["layer forward", f"layers.{i}"].start
                assert backward <= spans["layer backward", f"layers.{i}"].start < gradient
                if i > 0:
                    found.append(forward < spans["layer forward", f"layers.{i - 1}"].end)
                if i < len(LAYERS) - 1:
                    found.append(backward < spans["layer backward", f"layers.{i + 1}"].end)
    assert all(ahead)
    assert not any(on_demand)


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
    options = {"overlap": overlap, "bucket_bytes": 400, "verify": False}
    trainer = p101.DataParallelTrainer(model, F.mse_loss, sgd, **options)
    x = torch.ones(dist.get_world_size(), 10)
    with p101.span("step"):
        trainer.step(*trainer.share((x, x)))


def test_time_is_saved_by_sending_while_computing():
    """Six layers of 10 s each; each gradient takes 2 s to be added up and 2 s to be told.

    With overlap, only these 4 s of the last layer and 2 s of the last but one are left when
    backward ends.
    """
    network = p101.Network(latency=0.0, bandwidth=100.0)
    times = {}
    for overlap in (True, False):
        trace = p101.launch(deep, overlap, world_size=2, backend="sim", network=network).trace
        backward, synchronize = trace.spans("backward")[0], trace.spans("synchronize")[0]
        times[overlap] = (backward.end - backward.start, synchronize.end - synchronize.start)
    assert times[False] == pytest.approx((60.0, 6 * 4.0))
    assert times[True] == pytest.approx((60.0, 2.0 + 4.0))


def test_to_wait_for_gradients_is_no_compute():
    """Where a gradient takes longer than a layer, backward lasts as long as the network does;
    the lanes show the 60 s of compute.
    """
    network = p101.Network(latency=0.0, bandwidth=10.0)
    trace = p101.launch(deep, True, world_size=2, backend="sim", network=network).trace
    (window,) = time_windows(trace, ["step"])
    for rank in range(2):
        (backward,) = (e for e in trace.spans("backward") if e.rank == rank)
        waits = (e for e in trace.spans("wait for gradients") if e.rank == rank)
        in_backward = [e for e in waits if backward.start <= e.start < backward.end]
        waited = sum(e.end - e.start for e in in_backward)
        assert waited > 0
        assert backward.end - backward.start == pytest.approx(60.0 + waited)
        assert time_breakdown(window, rank).compute == pytest.approx(60.0)


def forward_in_time(overlap, seconds):
    model = MLP([8] * 5, bias=False)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: p101.compute(seconds))
    trainer = VARIANTS["ZeRO-3"](model, F.mse_loss, sgd, overlap=overlap)
    with p101.span("evaluate all"):
        trainer.evaluate([(torch.ones(2, 8), torch.ones(2, 8))])


def test_on_the_virtual_clock_only_the_first_layer_is_waited_for():
    """A gather of half a layer takes as long as a layer computes: with overlap four layers take
    five times that, without it eight.
    """
    half = 8 * 8 * 4 / 2
    where = {"world_size": 2, "backend": "sim", "network": p101.Network(0.0, 1.0)}
    for overlap, expected in ((True, 5), (False, 8)):
        trace = p101.launch(forward_in_time, overlap, half, **where).trace
        took = [e.end - e.start for e in trace.spans("evaluate all")]
        assert took == pytest.approx([expected * half] * 2, rel=0.2), "and a few bytes to agree"
