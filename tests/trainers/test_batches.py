"""What a batch may be, a tree of tensors, and what an evaluation is: a mean over all that counts.
(Steps with fewer samples than ranks, or losses with weights: test_equality.py.)
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.trainers.batches import number_of_values
from tests.trainers.cases import CLOSE, OPTIMIZERS, on_mesh, on_ranks, randn, text
from tests.trainers.models import BALANCED, FOUR, mixture, one_sample, sum_and_weight, words

LAYOUTS = {  # on 4 ranks
    "overlapped": ("dp 4", {}),
    "ZeRO-3": ("dp 4", {"zero_stage": 3}),
    "accumulated": ("dp 4", {"accumulate": 2}),
    "tensor": ("dp 2, tp 2", {}),
    "pipeline": ("dp 2, pp 2", {"microbatches": 3, "zero_stage": 1}),
}
BATCHES = [words(0), tuple(t[:3] for t in words(2))]  # differently many targets count


def evaluated():
    found = []
    for mesh, options in LAYOUTS.values():
        trainer = on_mesh(mesh)(FOUR(), sum_and_weight, OPTIMIZERS["sgd"], **options)
        found.append(trainer.evaluate(BATCHES))
    return found


def test_an_evaluation_weighs_by_the_targets_that_count():
    inputs, targets = (torch.cat(parts) for parts in zip(*BATCHES))
    expected = F.cross_entropy(FOUR()(inputs), targets).item()
    for found in on_ranks(4, evaluated):
        assert found == pytest.approx([expected] * len(LAYOUTS), rel=CLOSE)


def with_experts():
    trainer = on_mesh("pp 2, ep 2")(mixture(), BALANCED, OPTIMIZERS["sgd"], microbatches=2)
    return trainer.evaluate([one_sample(0), text(1)])


def test_an_evaluation_with_experts_may_have_fewer_samples_than_places():
    found = on_ranks(4, with_experts)
    model, batches = mixture(), (one_sample(0), text(1))
    with torch.no_grad():
        losses = [BALANCED(model(x), y).item() * len(x) for x, y in batches]
    expected = sum(losses) / sum(len(x) for x, _ in batches)
    assert found == [pytest.approx(expected, rel=1e-12)] * 4


# ── trees ──


class Masked(nn.Module):
    """Takes keywords, and returns outputs as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.mlp = FOUR()

    def forward(self, x, mask=None, labels=None, scale=None):
        logits = self.mlp(x if mask is None else x * mask) * (1 if scale is None else scale)
        return {"logits": logits, "loss": None if labels is None else F.mse_loss(logits, labels)}


KINDS = ("keywords", "arguments", "model's loss")


def fitted(kind, layout):
    """Losses of three batches, given as this kind of tree."""
    batches = [(randn(i, 9, 4), randn(20 + i, 9, 4) > 0, randn(40 + i, 9, 5)) for i in range(3)]
    mesh, options = layout
    build = partial(on_mesh(mesh), optimizer=OPTIMIZERS["sgd"], **options)
    if kind == "model's loss":
        trainer = build(Masked(), None)
        trees = [{"x": x, "mask": mask, "labels": y, "scale": None} for x, mask, y in batches]
    else:
        trainer = build(Masked(), lambda outputs, y: F.mse_loss(outputs["logits"], y["y"]))
        trees = [
            ((x, mask) if kind == "arguments" else {"x": x, "mask": mask}, {"y": y})
            for x, mask, y in batches
        ]
    losses = trainer.fit(trees, progress=False).losses
    return [*losses, trainer.evaluate(trees)]


def test_batches_are_trees_of_tensors():
    def every_kind(*layouts):
        layouts = [LAYOUTS[name] for name in layouts] or [("dp 1", {})]
        return [fitted(*case) for case in itertools.product(KINDS, layouts)]

    where = {"backend": "sim"}
    first, *others = p101.launch(every_kind, world_size=1, **where).results[0]
    layouts = "overlapped", "ZeRO-3", "accumulated"
    for found in p101.launch(every_kind, *layouts, world_size=4, **where).results:
        assert [*others, *found] == [pytest.approx(first, rel=CLOSE)] * 11


class First(nn.Linear):
    """A stage that is called with two arguments."""

    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


def two_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(First(4, 6), nn.GELU(), nn.Linear(6, 5)).double()
    x, y, options = randn(0, 6, 4), randn(1, 6, 5), {"microbatches": 2, "verify": False}
    expected = F.mse_loss(model(x * (x > 0)), y).item()
    trainer = p101.PipelineTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options)
    return trainer.step((x, x > 0), y), expected


def test_only_the_first_stage_takes_several_inputs():
    for loss, expected in on_ranks(2, two_inputs):
        assert loss == pytest.approx(expected, rel=CLOSE)


def test_a_batch_may_be_a_list_or_one_tensor_of_two():
    trainer = p101.DataParallelTrainer(FOUR(), F.mse_loss, OPTIMIZERS["sgd"])
    x, y = randn(0, 6, 4), randn(1, 6, 4)
    for batch in ([x, y], torch.stack([x, y])):
        assert [torch.equal(a, b) for a, b in zip(trainer.share(batch), (x, y))] == [True, True]


def test_an_empty_tensor_leaves_a_batchs_checksum_as_it_is():
    ones, empty = torch.ones(3), torch.empty(0)
    assert number_of_values([ones, empty]) == number_of_values([ones]) != number_of_values([empty])
