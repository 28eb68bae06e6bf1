"""What a batch and a loss may be: trees of tensors, fewer samples than ranks, and losses that
are sums with weights.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from parallel101.trainers.batches import number_of_values
from tests.trainers.cases import (
    CLOSE,
    OPTIMIZERS,
    TRAINERS,
    Case,
    Task,
    on_mesh,
    randn,
    unlike_one_process,
)

PLAN = {"layers.0": "column", "layers.1": "row"}
LAYOUTS = {  # on 4 ranks
    **{name: (TRAINERS[name], {}) for name in ("overlapped", "ZeRO-1", "ZeRO-2", "ZeRO-3")},
    "accumulated": (TRAINERS["overlapped"], {"accumulate": 2}),
    "tensor": (on_mesh("dp 2, tp 2"), {"plan": PLAN}),
    "pipeline": (on_mesh("dp 2, pp 2"), {"microbatches": 3, "zero_stage": 1}),
    "pipeline, split": (
        partial(p101.PipelineTrainer, verify=False),
        {"schedule": "zb-h1", "microbatches": 4},
    ),
    "pipeline, ZeRO-3": (on_mesh("pp 2, dp 2"), {"microbatches": 2, "zero_stage": 3}),
}


def mlp():
    return MLP([4, 8, 6, 6, 5], dtype=torch.float64)


def few(step):
    """Fewer samples than ranks."""
    samples = (6, 1, 3, 2, 5)[step]
    return randn(step, samples, 4), randn(100 + step, samples, 5)


def words(step):
    """Targets of which different ranks count differently many, and one rank none."""
    targets = torch.randint(5, (9,), generator=torch.Generator().manual_seed(step))
    targets[step : step + 3] = -100
    return randn(step, 9, 4), targets


def sum_and_weight(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


FEW = Task(mlp, F.mse_loss, few)
WORDS = Task(mlp, F.cross_entropy, words)  # one process has torch's own mean
BY_WEIGHT = {"loss_fn": sum_and_weight}


@pytest.mark.parametrize(
    ("backend", "names"),
    [("sim", list(LAYOUTS)), ("gloo", ["overlapped", "ZeRO-3", "pipeline"])],
    ids=["sim", "gloo"],
)
def test_parts_without_samples_and_a_mean_over_the_targets_that_count(backend, names):
    cases = []
    for i, (trainer, options) in enumerate(LAYOUTS[name] for name in names):
        cases.append(Case(FEW, trainer, "sgd", (None, 0.05)[i % 2], options))
        cases.append(Case(WORDS, trainer, "sgd", (0.05, None)[i % 2], {**options, **BY_WEIGHT}))
    run = p101.launch(unlike_one_process, cases, world_size=4, backend=backend)
    assert run.results == [[]] * 4


def evaluated(names):
    """The mean over two batches in which differently many targets count."""
    found = []
    for build, options in (LAYOUTS[name] for name in names):
        trainer = build(mlp(), sum_and_weight, OPTIMIZERS["sgd"], **options)
        found.append(trainer.evaluate([words(0), tuple(t[:3] for t in words(5))]))
    return found


def test_an_evaluation_weighs_by_the_targets_that_count():
    batches = [words(0), tuple(t[:3] for t in words(5))]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches))
    expected = F.cross_entropy(mlp()(inputs), targets).item()
    names = ["overlapped", "ZeRO-3", "tensor", "pipeline"]
    for found in p101.launch(evaluated, names, world_size=4, backend="sim").results:
        assert found == pytest.approx([expected] * len(names), rel=CLOSE)


# ── trees ──


class Masked(nn.Module):
    """Takes keywords, and returns outputs as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x, mask=None, labels=None, scale=None):
        logits = self.mlp(x if mask is None else x * mask) * (1 if scale is None else scale)
        return {"logits": logits, "loss": None if labels is None else F.mse_loss(logits, labels)}


def fitted(kind, layout):
    """Losses of three batches, given as this kind of tree."""
    batches = [(randn(i, 9, 4), randn(20 + i, 9, 4) > 0, randn(40 + i, 9, 5)) for i in range(3)]
    build, options = LAYOUTS.get(layout, (TRAINERS["naive"], {}))
    build = partial(build, **options)
    if kind == "model's loss":
        trainer = build(Masked(), None, OPTIMIZERS["sgd"])
        trees = [{"x": x, "mask": mask, "labels": y, "scale": None} for x, mask, y in batches]
    else:
        trainer = build(
            Masked(), lambda outputs, y: F.mse_loss(outputs["logits"], y["y"]), OPTIMIZERS["sgd"]
        )
        trees = [
            ((x, mask) if kind == "arguments" else {"x": x, "mask": mask}, {"y": y})
            for x, mask, y in batches
        ]
    losses = trainer.fit(trees, progress=False).losses
    return [*losses, trainer.evaluate(trees)]


@pytest.mark.parametrize("layout", ["overlapped", "ZeRO-3", "accumulated"])
def test_batches_are_trees_of_tensors(layout):
    expected = fitted("keywords", "alone")
    for kind in ("keywords", "arguments", "model's loss"):
        for found in p101.launch(fitted, kind, layout, world_size=4, backend="sim").results:
            assert found == pytest.approx(expected, rel=CLOSE)


class First(nn.Linear):
    """A stage that is called with two arguments."""

    def forward(self, x, mask):
        return super().forward(x * mask)


def two_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(First(4, 6), nn.GELU(), nn.Linear(6, 5)).double()
    trainer = p101.PipelineTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], microbatches=2)
    return trainer.step((randn(0, 6, 4), randn(0, 6, 4) > 0), randn(1, 6, 5))


def test_only_the_first_stage_takes_several_inputs():
    torch.manual_seed(0)
    first, gelu, last = First(4, 6).double(), nn.GELU(), nn.Linear(6, 5).double()
    x, y = randn(0, 6, 4), randn(1, 6, 5)
    expected = F.mse_loss(last(gelu(first(x, x > 0))), y).item()
    for loss in p101.launch(two_inputs, world_size=2, backend="sim").results:
        assert loss == pytest.approx(expected, rel=CLOSE)


def test_an_empty_tensor_leaves_a_batchs_checksum_as_it_is():
    ones, empty = torch.ones(3), torch.empty(0)
    assert number_of_values([ones, empty]) == number_of_values([ones]) != number_of_values([empty])
