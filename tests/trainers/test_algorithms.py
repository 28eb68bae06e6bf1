"""A trainer's collectives by an algorithm of one's own choice: the same training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models import MLP

DATA = {"overlap": False, "algorithm": "ring"}
TWO = {"reduce_scatter": "ring", "all_gather": "bruck"}
WAYS = {
    "data": (p101.DataParallelTrainer, DATA),
    "naive": (p101.DataParallelTrainer, {**DATA, "bucket_bytes": 0}),
    "a dict": (p101.DataParallelTrainer, {**DATA, "algorithm": {"all_reduce": "ring"}}),
    "ZeRO-1": (partial(p101.ShardedTrainer, zero_stage=1), DATA),
    "ZeRO-2": (partial(p101.ShardedTrainer, zero_stage=2), {**DATA, "algorithm": TWO}),
    "ZeRO-3": (partial(p101.ShardedTrainer, zero_stage=3), {**DATA, "algorithm": TWO}),
    "tensor": (p101.TensorParallelTrainer, DATA),
}


def build(way, **options):
    return WAYS[way][0](
        MLP([6, 9, 6], dtype=torch.float64),
        F.mse_loss,
        partial(torch.optim.Adam, lr=0.1),
        **options,
    )


def trained(way, options):
    x = torch.linspace(-1, 1, 42, dtype=torch.float64).view(7, 6)
    trainer = build(way, **options)
    with p101.span("steps"):
        losses = [trainer.step(*trainer.share((x, x.sin()))) for _ in range(3)]
    return losses, trainer.state_dict()


@pytest.mark.parametrize("way", WAYS)
def test_the_training_is_the_same_and_the_messages_are_the_algorithms(way):
    """On three ranks a ring's messages go to the right neighbour only."""
    runs = [
        p101.launch(trained, way, options, world_size=3, backend="sim")
        for options in (WAYS[way][1], {})
    ]
    (losses, state), (expected, as_always) = (run.results[0] for run in runs)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(value, as_always[name], rtol=1e-9, atol=1e-12)
    if WAYS[way][1]["algorithm"] != TWO:
        assert [receivers(run.trace) for run in runs] == [{1}, {1, 2}]


def receivers(trace):
    """To which ranks rank 0 sends gradients or activations in its steps."""
    steps = trace.spans("steps")[0]
    sends = [e for e in trace.events if e.rank == 0 and e.kind == "send" and e.start < steps.end]
    return {e.peer for e in sends if e.nbytes > 48}


@pytest.mark.parametrize(
    ("way", "options", "says"),
    [
        ("data", {"algorithm": "ring"}, "'ring' can't overlap with computing: say overlap=False"),
        ("tensor", {"algorithm": "ring"}, "say overlap=False"),
        (
            "data",
            {**DATA, "algorithm": "rings"},
            r"expected one name, or a dict, out of all_reduce: \[.*'ring'",
        ),
        ("data", {**DATA, "algorithm": TWO}, "expected one name, or a dict, out of all_reduce"),
        (
            "ZeRO-1",
            {**DATA, "algorithm": {"all_reduce": "ring"}},
            "a dict, out of reduce_scatter: ",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(way, options, says):
    with pytest.raises(ValueError, match=says):
        build(way, **options)
