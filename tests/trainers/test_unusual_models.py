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
from parallel101 import ShardedTrainer
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


def regression(build, dtype=torch.float64, loss_fn=F.mse_loss):
    return Task(
        build,
        loss_fn,
        lambda step: (randn(step, 11, 4).to(dtype), randn(100 + step, 11, 4).to(dtype)),
    )


TASKS = {
    kind.__name__: regression(kind)
    for kind in (Tied, OfNoElementsOrOne, SomeFrozen, Buffers, Unordered, Recurrent)
}
TASKS["OutputsInADict"] = regression(
    OutputsInADict, loss_fn=lambda outputs, y: F.mse_loss(outputs["y"], y)
)
TASKS["float16"] = regression(lambda: MLP([4, 8, 4], dtype=torch.float16), torch.float16)
TASKS["bfloat16"] = regression(lambda: MLP([4, 8, 4], dtype=torch.bfloat16), torch.bfloat16)
HALF = {"float16": 0.02, "bfloat16": 0.05}  #  rounding, of 11 and 8 bits, in five steps


def cases(world_size, trainers):
    """Each trainer with each model; on an even number of ranks with one optimizer and on an odd
    one with the other.
    """
    of_each = itertools.product(enumerate(TRAINERS), enumerate(TASKS))
    chosen = [
        (trainer, name, ("sgd", "adamw")[(i + k + world_size) % 2])
        for (i, trainer), (k, name) in of_each
        if trainer in trainers
    ]
    return [case for case in chosen if case[1:] != ("float16", "adamw")]  #  its eps is 0 in float16


def unlike_one_process(cases):
    wrong = []
    for trainer, name, optimizer in cases:
        task = TASKS[name]
        learned = {name for name, p in task.build().named_parameters() if p.requires_grad}
        expected = one_process(task, optimizer, None)
        expected = expected._replace(
            gradients=[{name: of_step[name] for name in learned} for of_step in expected.gradients]
        )
        found = trained(TRAINERS[trainer](task.build(), task.loss_fn, OPTIMIZERS[optimizer]), task)
        wrong += [
            (trainer, name, optimizer, what)
            for what in differences(found, expected, HALF.get(name, CLOSE))
        ]
    return wrong


@pytest.mark.parametrize(
    ("world_size", "backend", "trainers"),
    [(2, "sim", TRAINERS), (3, "gloo", ("overlapped", "ZeRO-2", "ZeRO-3"))],
    ids=["sim", "gloo"],
)
def test_unusual_models_are_equal_to_one_process(world_size, backend, trainers):
    run = p101.launch(
        unlike_one_process, cases(world_size, trainers), world_size=world_size, backend=backend
    )
    assert run.results == [[]] * world_size


def test_unusual_models_without_a_process_group():
    assert unlike_one_process(cases(1, TRAINERS)) == []


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
    task, said = regression(Twice), {}
    expected = one_process(task, "sgd", None)
    for name, build in TRAINERS.items():
        try:
            said[name] = differences(
                trained(build(task.build(), task.loss_fn, OPTIMIZERS["sgd"]), task), expected
            )
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_a_gradient_that_is_completed_twice_is_right_or_an_error():
    for said in [twice(), *p101.launch(twice, world_size=2).results]:
        for name, what in said.items():
            if name in ("overlapped", "ZeRO-1", "ZeRO-2"):
                assert "'a.layers.0." in what
                assert "was completed twice in one backward" in what
                assert "overlap=False" in what
            else:
                assert what == [], name


class Gathers(Parts):
    """A buffer that follows the samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


def statistics_of_the_batch():
    x, said = randn(0, 6, 4), []
    for build in TRAINERS.values():
        for model in (
            Gathers(),
            Parts(norm=nn.BatchNorm1d(4)),
            Parts(norm=nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False))),
        ):
            try:
                trainer = build(model, F.mse_loss, OPTIMIZERS["sgd"], verify=True)
                before = trainer.state_dict()
                trainer.step(*trainer.share((x, x)))
            except ValueError as error:
                said.append(str(error))
                if isinstance(model, Gathers):
                    after = trainer.state_dict()
                    assert all(
                        torch.equal(before[name], after[name]) for name in before if name != "mean"
                    ), "no weight was changed"
    return said


def test_statistics_of_a_share_are_not_those_of_the_batch():
    first, second = p101.launch(statistics_of_the_batch, world_size=2).results
    assert first == second
    assert len(first) == 3 * len(TRAINERS)
    for gathers, norm, inside in zip(first[::3], first[1::3], first[2::3]):
        assert "the buffer of 'mean' differs" in gathers
        assert (
            "'norm' is a BatchNorm1d, which looks at the whole batch, and each rank has only "
            "its share"
        ) in norm
        assert "model.get_submodule('norm').eval()" in norm
        assert "sync_batch_norm=True" in inside
    assert statistics_of_the_batch() == [], "one rank has the whole batch"


def penalty(zero_stage, **options):
    model, x = Parts(), randn(0, 6, 4)
    trainer = ShardedTrainer(
        model,
        lambda y, t: F.mse_loss(y, t) + sum(p.square().sum() for p in model.parameters()),
        OPTIMIZERS["sgd"],
        zero_stage=zero_stage,
        **options,
    )
    return trainer.step(*trainer.share((x, x)))


def penalties():
    with pytest.raises(
        (RuntimeError, p101.NotEqualError),
        match=r"was empty where it was used \(a penalty in the loss, for example\)",
    ):
        penalty(3)
    return penalty(1), penalty(2)


def test_a_penalty_in_the_loss_is_right_or_explained():
    losses = [
        loss
        for of_rank in [penalties(), *p101.launch(penalties, world_size=2).results]
        for loss in of_rank
    ]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=CLOSE)
