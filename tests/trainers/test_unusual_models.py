"""Models that are not a row of layers: on every trainer they are equal to one process, or a
clear error on every rank.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    CLOSE,
    OPTIMIZERS,
    TRAINERS,
    Case,
    Task,
    differences,
    one_process,
    randn,
    rows,
    trained,
    unlike_one_process,
)


def dense(seed):
    return MLP([4, 4], seed=seed, dtype=torch.float64)


class Parts(nn.Module):
    """Layers a, b and c with what a test adds to them."""

    def __init__(self, **more):
        super().__init__()
        self.a, self.b, self.c = dense(1), dense(2), dense(3)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Tied(Parts):
    """Layer c is layer a, and b's matrix a's too, under its own name."""

    def __init__(self):
        super().__init__()
        self.c = self.a
        self.b.layers[0].weight = self.a.layers[0].weight


class OfNoElementsOrOne(Parts):
    """Weights without elements, and without dims."""

    def __init__(self):
        super().__init__(
            nothing=nn.Parameter(torch.empty(0, 3, dtype=torch.float64)),
            one=nn.Parameter(randn(9, 1)[0]),
        )

    def forward(self, x):
        return super().forward(x) * self.one + self.nothing.sum()


class SomeFrozen(Parts):
    """A whole layer, and of another the bias."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.b.layers[0].bias.requires_grad_(False)


class Buffers(Parts):
    """One that nobody changes, one that every forward changes alike, one that no checkpoint
    keeps; and a norm that is frozen.
    """

    def __init__(self):
        super().__init__(norm=nn.BatchNorm1d(4, dtype=torch.float64).eval())
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("passing", torch.ones(4, dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.count += 1
        return self.norm(super().forward(x * self.scale)) * self.passing


class Unordered(Parts):
    """Weights that lie column by column; in a list without forward; in complex numbers; two
    dtypes.
    """

    def __init__(self):
        super().__init__(
            columns=nn.Parameter(randn(5, 4, 4).t()),
            listed=nn.ParameterList([randn(6, 4, 4), randn(7, 4, 4)]),
        )
        self.turned = nn.Parameter(torch.complex(randn(8, 4, 4), randn(9, 4, 4)))

    def forward(self, x):
        for weight in (self.columns, *self.listed):
            x = torch.tanh(x @ weight)
        return super().forward((x.to(torch.complex128) @ self.turned).abs())


class Recurrent(Parts):
    """Weights used at every step of a sequence, in one call of torch's."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(lstm=nn.LSTM(4, 4, batch_first=True, dtype=torch.float64))

    def forward(self, x):
        return super().forward(self.lstm(torch.stack([x, x * x], dim=1))[0][:, -1])


class OutputsInADict(Parts):
    def forward(self, x):
        return {"y": super().forward(x), "not used": x.sum()}


class OutOfOrder(Parts):
    """Layers that run in another order than they were made, one of them again in backward; a
    weight beside them all.
    """

    def __init__(self):
        super().__init__(scale=nn.Parameter(randn(5, 4)))

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.c(x * self.scale))))
        x = checkpoint(lambda x: torch.tanh(self.b(x)), x, use_reentrant=False)
        return self.a(x)


KINDS = (Tied, OfNoElementsOrOne, SomeFrozen, Buffers, Unordered, Recurrent, OutOfOrder)
TASKS = [Task(kind, F.mse_loss, rows(4, 4)) for kind in KINDS]
TASKS.append(Task(OutputsInADict, lambda y, t: F.mse_loss(y["y"], t), rows(4, 4)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_models_are_equal_to_one_process(world_size):
    """Each model on each trainer, with one optimizer or the other."""
    of_each = itertools.product(enumerate(TRAINERS.values()), enumerate(TASKS))
    cases = [
        Case(task, trainer, ("sgd", "adamw")[i // 2 % 2], None)
        for (i, trainer), (k, task) in of_each
        if (i + k) % 2 == world_size % 2
    ]
    run = p101.launch(unlike_one_process, cases, world_size=world_size, backend="sim")
    assert run.results == [[]] * world_size


@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 0.02), (torch.bfloat16, 0.05)])
def test_half_precision(dtype, close):
    """The optimizer is SGD: AdamW's eps is 0 in float16."""
    task = Task(
        lambda: MLP([4, 8, 4], dtype=dtype),
        F.mse_loss,
        lambda step: tuple(t.to(dtype) for t in rows(4, 4)(step)),
    )
    cases = [Case(task, trainer, "sgd", None) for trainer in TRAINERS.values()]
    assert p101.launch(unlike_one_process, cases, close, world_size=2, backend="sim").results == [
        [],
        [],
    ]


class Twice(Parts):
    """Layer a runs twice, each time computed again in backward: its gradients are complete
    twice over.
    """

    def forward(self, x):
        for layer in (self.a, self.b, self.a):
            x = checkpoint(
                lambda x, layer=layer: torch.tanh(layer(x)), x.requires_grad_(), use_reentrant=True
            )
        return x


def twice():
    task, said = Task(Twice, F.mse_loss, rows(4, 4)), {}
    expected = one_process(task, "sgd", None)
    for name, build in TRAINERS.items():
        try:
            found = trained(build(task.build(), task.loss_fn, OPTIMIZERS["sgd"]), task)
            said[name] = differences(found, expected, CLOSE)
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_a_gradient_that_is_completed_twice_is_right_or_an_error():
    for said in p101.launch(twice, world_size=2, backend="sim").results:
        for name, what in said.items():
            if name in ("overlapped", "ZeRO-1", "ZeRO-2"):
                for word in ("'a.layers.0.", "completed twice in one backward", "overlap=False"):
                    assert word in what
            else:
                assert what == [], name
