"""Users' own models with experts along ep are one process, too: experts that skip what has no rows,
samples on different ways through the model, outputs that the loss ignores.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.experts import Experts
from tests.trainers.cases import OPTIMIZERS, Case, Task, on_mesh, randn, seeded, unlike_one_process
from tests.trainers.test_experts_axis import LOSS, mixture, one_sample, text

WIDTH = 4


class Loop(nn.Module):
    """As in Mixtral: a loop over the experts that have rows. Without rows the result has no graph,
    and an expert without rows has no gradient.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, WIDTH, WIDTH))

    def forward(self, rows, choice):
        out = torch.zeros_like(rows)
        for expert, weight in enumerate(self.weight):
            mine = (choice == expert).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, rows[mine] @ weight)
        return out


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Loop()

    def forward(self, rows, choice):
        return self.experts(rows, choice)


class Model(nn.Module):
    """Some samples take a way of their own behind the experts; `value` is ignored by the loss."""

    def __init__(self, experts):
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), experts()
        self.out, self.sometimes = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x):
        special, h = (x[:, 0] > 0).nonzero()[:, 0], self.first(x)
        h = h + self.experts(h, (x[:, 1] > 0).long())
        y = self.out(h)
        if len(special):
            y = y.index_add(0, special, self.sometimes(h[special]))
        return y, self.value(h)


def batch(step):
    """In step 1 all rows are for expert 0, and only the first rank's samples are special."""
    x = randn(step, 11, WIDTH)
    x[:, 0] = -1
    x[1, 0] = 1
    if step == 1:
        x[:, 1] = -1
    return x, randn(100 + step, 11, 2)


def loss(outputs, targets):
    return F.mse_loss(outputs[0], targets)


def case(experts, mesh="ep 2", **options):
    task = Task(lambda: seeded(Model(experts)), loss, batch)
    return Case(task, on_mesh(mesh), "adamw", 0.05, {"bucket_bytes": 64, **options})


def test_each_is_one_process():
    stacked = partial(Experts, 2, WIDTH, 5)
    cases = [
        case(stacked, verify=True),
        case(Loop),
        case(Nested, accumulate=8),  # more microbatches than samples on a rank
        case(Loop, zero_stage=1),
        case(stacked, zero_stage=2, accumulate=2),
    ]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="sim").results == [[]] * 2


def test_an_evaluation_may_have_fewer_samples_than_places():
    def program():
        trainer = on_mesh("pp 2, ep 2")(mixture(), LOSS, OPTIMIZERS["sgd"], microbatches=2)
        return trainer.evaluate([one_sample(0), text(1)])

    found = p101.launch(program, world_size=4, backend="sim").results
    model = mixture()
    with torch.no_grad():
        of_batches = [(LOSS(model(x), y).item(), len(x)) for x, y in (one_sample(0), text(1))]
    expected = sum(loss * n for loss, n in of_batches) / sum(n for _, n in of_batches)
    assert found == [pytest.approx(expected, rel=1e-12)] * 4


def test_an_expert_that_is_unfrozen_later_is_refused():
    def program():
        model = mixture()
        model.blocks[0].mlp.experts.up_bias.requires_grad_(False)
        trainer = on_mesh("ep 2")(model, LOSS, OPTIMIZERS["sgd"])
        trainer.step(*trainer.share(text(0)))
        trainer.model.blocks[0].mlp.experts.up_bias.requires_grad_(True)
        with pytest.raises(ValueError, match="was frozen when the trainer was built"):
            trainer.step(*trainer.share(text(1)))

    p101.launch(program, world_size=2, backend="sim")
