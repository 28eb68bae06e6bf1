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
from tests.trainers.cases import (
    CLOSE,
    OPTIMIZERS,
    TRAINERS,
    Task,
    differences,
    one_process,
    randn,
    trained,
)
from tests.trainers.hybrid_cases import mesh_of

PLAN = {"layers.0": "column", "layers.1": "row"}
LAYOUTS = {  # on 4 ranks
    **{name: TRAINERS[name] for name in ("naive", "overlapped", "ZeRO-1", "ZeRO-2", "ZeRO-3")},
    "accumulated": partial(p101.DataParallelTrainer, accumulate=2),
    "tensor": lambda *args: p101.HybridTrainer(*args, mesh=mesh_of("dp 2, tp 2"), plan=PLAN),
    "pipeline": lambda *args: p101.HybridTrainer(
        *args, mesh=mesh_of("dp 2, pp 2"), microbatches=3, zero_stage=1
    ),
    "pipeline, split": lambda *args: p101.PipelineTrainer(*args, schedule="zb-h1", microbatches=4),
    "pipeline, ZeRO-3": lambda *args: p101.HybridTrainer(
        *args, mesh=mesh_of("pp 2, dp 2"), microbatches=2, zero_stage=3
    ),
}


def mlp():
    return MLP([4, 8, 6, 6, 5], dtype=torch.float64)


def unlike_one_process(task, names):
    expected = one_process(task, "sgd", None)
    found = {}
    for name in names:
        trainer = LAYOUTS[name](task.build(), task.loss_fn, OPTIMIZERS["sgd"])
        found[name] = differences(trained(trainer, task), expected)
        loss = trainer.evaluate([task.batch(0), task.batch(1)])
        model = task.build()
        model.load_state_dict(expected.weights)
        if abs(loss - whole_loss(task, model)) > CLOSE:
            found[name].append(f"evaluate: {loss}")
    return found


def whole_loss(task, model):
    """The mean over two batches, by samples or by the weights of the loss."""
    results = [
        (task.loss_fn(model(task.batch(i)[0]), task.batch(i)[1]), len(task.batch(i)[1]))
        for i in range(2)
    ]
    pairs = [
        loss if isinstance(loss, tuple) else (loss * samples, samples) for loss, samples in results
    ]
    return float(sum(total for total, _ in pairs) / sum(weight for _, weight in pairs))


# ── fewer samples than ranks ──


def few(step):
    samples = (6, 1, 3, 2, 5)[step]
    return randn(step, samples, 4), randn(100 + step, samples, 5)


FEW = Task(mlp, F.mse_loss, few)


@pytest.mark.parametrize(
    ("backend", "names"),
    [("sim", list(LAYOUTS)), ("gloo", ["overlapped", "ZeRO-3", "pipeline"])],
    ids=["sim", "gloo"],
)
def test_ranks_and_microbatches_without_samples(backend, names):
    results = p101.launch(unlike_one_process, FEW, names, world_size=4, backend=backend).results
    assert results == [{name: [] for name in names}] * 4


# ── sums and weights ──


def words(step):
    """Targets of which different ranks count differently many, and one rank none."""
    targets = torch.randint(5, (9,), generator=torch.Generator().manual_seed(step))
    targets[step : step + 3] = -100
    return randn(step, 9, 4), targets


def sum_and_weight(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize(
    ("backend", "names"),
    [("sim", list(LAYOUTS)), ("gloo", ["overlapped", "ZeRO-2", "tensor"])],
    ids=["sim", "gloo"],
)
@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["", "clipped"])
def test_a_mean_over_the_targets_that_count(backend, names, clip_norm):
    """One process has torch's own mean."""

    def run():
        expected = one_process(Task(mlp, F.cross_entropy, words), "sgd", clip_norm)
        found = {}
        for name in names:
            build = partial(LAYOUTS[name], mlp(), sum_and_weight, OPTIMIZERS["sgd"])
            if clip_norm is not None and name not in TRAINERS and name != "accumulated":
                continue
            trainer = build(clip_norm=clip_norm) if clip_norm is not None else build()
            found[name] = differences(trained(trainer, Task(mlp, sum_and_weight, words)), expected)
        return found

    for found in p101.launch(run, world_size=4, backend=backend).results:
        assert set(map(tuple, found.values())) == {()}


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
    build = LAYOUTS.get(layout, p101.DataParallelTrainer)
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
