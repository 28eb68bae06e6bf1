"""What the record says of sharding: the bytes that theory says, and the next layer on its way
before this one ends.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101 import ShardedTrainer
from parallel101.models.mlp import MLP

SIZES = [12, 24, 36, 48, 60, 72]  # 2, 3 and 4 divide every layer; no two layers are alike
LAYERS = [4 * (a * b + b) for a, b in zip(SIZES, SIZES[1:])]  # bytes


def one_step(zero_stage, accumulate=1, **options):
    model = MLP(SIZES)
    trainer = ShardedTrainer(
        model,
        F.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        zero_stage=zero_stage,
        accumulate=accumulate,
        **options,
    )
    trainer.step(*trainer.share((torch.ones(24, SIZES[0]), torch.ones(24, SIZES[-1]))))


def steps(settings):
    for i, (zero_stage, accumulate) in enumerate(settings):
        p101.barrier()
        with p101.span("step", number=i):
            one_step(zero_stage, accumulate)


def bytes_by_step(trace):
    """Of weights and gradients, which are float32; what ranks agree on is not. By rank and step."""
    sent = [[0] * (len(trace.spans("step")) // trace.world_size) for _ in range(trace.world_size)]
    for span in trace.spans("step"):
        for e in trace.events:
            if (
                e.kind == "send"
                and e.rank == span.rank
                and "float32" in e.dtype
                and span.start <= e.posted <= span.end
            ):
                sent[span.rank][span.args["number"]] += e.nbytes
    return sent


SETTINGS = {  # (zero_stage, accumulate) → how often (n−1)/n of the weights' bytes are sent
    (1, 1): 2,
    (2, 1): 2,
    (3, 1): 3,
    (1, 3): 2,
    (2, 3): 3 + 1,
    (3, 3): 3 * 3,
}


@pytest.mark.parametrize(
    ("p", "backend"), [(1, "gloo"), (2, "gloo"), (2, "sim"), (3, "sim"), (4, "sim")]
)
def test_bytes_are_those_of_theory(p, backend):
    """2(n−1)/n of the gradients' for stages 1 and 2, 3(n−1)/n of the weights' for stage 3;
    stages 2 and 3 hold nothing to accumulate in.
    """
    network = {"network": p101.Network(latency=1.0, bandwidth=1e6)} if backend == "sim" else {}
    trace = p101.launch(
        steps, list(SETTINGS), world_size=p, backend=backend, trace=True, **network
    ).trace
    assert (
        bytes_by_step(trace)
        == [[times * (p - 1) * sum(LAYERS) // p for times in SETTINGS.values()]] * p
    )


def first_sends(trace, rank, nbytes):
    return [
        e.start for e in trace.events if e.kind == "send" and e.rank == rank and e.nbytes == nbytes
    ]


def test_the_next_layer_is_on_its_way_before_this_one_ends(backend):
    ahead, on_demand = [], []
    for overlap, found in ((True, ahead), (False, on_demand)):
        trace = p101.launch(
            one_step, 3, world_size=2, backend=backend, trace=True, overlap=overlap
        ).trace
        for rank in range(2):
            spans = {
                (e.name, e.args["layer"]): e
                for e in trace.spans()
                if e.rank == rank and e.name in ("layer forward", "layer backward")
            }
            assert len(spans) == 2 * len(LAYERS)
            # a layer's block travels three times: gathered, gathered again, and its gradient
            for i, layer in enumerate(LAYERS):
                forward, backward, gradient = first_sends(trace, rank, layer // 2)
                assert forward <= spans["layer forward", f"layers.{i}"].start
                assert backward <= spans["layer backward", f"layers.{i}"].start < gradient
                if i > 0:
                    found.append(forward < spans["layer forward", f"layers.{i - 1}"].end)
                if i < len(LAYERS) - 1:
                    found.append(backward < spans["layer backward", f"layers.{i + 1}"].end)
                    assert (
                        spans["layer backward", f"layers.{i + 1}"].end
                        <= spans["layer backward", f"layers.{i}"].start
                    )
    assert all(ahead)
    assert not any(on_demand)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_first_gradients_leave_before_the_last_is_ready(zero_stage, backend):
    for overlap in (True, False):
        trace = p101.launch(
            one_step,
            zero_stage,
            world_size=2,
            backend=backend,
            trace=True,
            overlap=overlap,
            bucket_bytes=LAYERS[-1],
        ).trace
        for rank in range(2):
            last = max(e.start for e in trace.spans("gradient ready") if e.rank == rank)
            first = min(
                e.start
                for e in trace.events
                if e.kind == "send" and e.rank == rank and "float32" in e.dtype
            )
            assert (first < last) == overlap


def forward_in_time(overlap, seconds):
    model = MLP([8] * 5, bias=False)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: p101.compute(seconds))
    trainer = ShardedTrainer(
        model, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), zero_stage=3, overlap=overlap
    )
    with p101.span("evaluate all"):
        trainer.evaluate([(torch.ones(2, 8), torch.ones(2, 8))])


def test_on_the_virtual_clock_only_the_first_layer_is_waited_for():
    """A gather of half a layer takes as long as a layer computes: with overlap four layers take
    five times that, without it eight.
    """
    half = 8 * 8 * 4 / 2
    for overlap, expected in ((True, 5), (False, 8)):
        network = p101.Network(latency=0.0, bandwidth=1.0)
        trace = p101.launch(
            forward_in_time, overlap, half, world_size=2, backend="sim", network=network
        ).trace
        took = [e.end - e.start for e in trace.spans("evaluate all")]
        assert took == pytest.approx([expected * half] * 2, rel=0.2), "and a few bytes to agree"
