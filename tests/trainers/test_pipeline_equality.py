"""A pipeline of n ranks is one process, to ten digits: losses, gradients and weights after five
steps, with every schedule.
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
    OPTIMIZERS,
    TASKS,
    Task,
    differences,
    one_process,
    randn,
    text,
    trained,
)

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved")


class Frozen(nn.Sequential):
    """The second layer is not trained, and a buffer scales the last one's output."""

    def __init__(self) -> None:
        layers = [MLP([4, 4], seed=s, dtype=torch.float64) for s in range(6)]
        super().__init__(*layers, nn.Tanh(), Scaled())
        self[1].requires_grad_(False)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = MLP([4, 3], seed=7, dtype=torch.float64)
        self.register_buffer("factor", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) * self.factor


def rows(step):
    return randn(step, 11, 4), randn(100 + step, 11, 3)


DEEP = Task(lambda: MLP([4, 7, 5, 6, 5, 7, 5, 6, 3], dtype=torch.float64), F.mse_loss, rows)
FROZEN = Task(Frozen, F.mse_loss, rows)


def activated(in_place: bool) -> nn.Sequential:
    """A stage of two modules begins with the activation."""
    linears = [MLP([4, 4], seed=s, dtype=torch.float64) for s in range(4)]
    return nn.Sequential(
        linears[0],
        nn.Tanh(),
        nn.LeakyReLU(0.1, in_place),
        linears[1],
        nn.ReLU(in_place),
        linears[2],
        linears[3],
    )


ACTIVATED = Task(
    lambda: activated(in_place=False),
    F.mse_loss,
    lambda step: (randn(step, 11, 4), randn(100 + step, 11, 4)),
)
MODELS = {
    "mlp": DEEP,
    "tied gpt": TASKS["tied gpt"],
    "untied gpt": TASKS["untied gpt"],
    "frozen": FROZEN,
}


def unlike_one_process(cases):
    """The cases that differ, with how.

    A case: model, optimizer, clip_norm, the trainer's options.
    """
    wrong = []
    for name, optimizer, clip_norm, options in cases:
        task = MODELS[name]
        trainer = p101.PipelineTrainer(
            task.build(), task.loss_fn, OPTIMIZERS[optimizer], clip_norm=clip_norm, **options
        )
        found = trained(trainer, task)
        expected = one_process(task, optimizer, clip_norm)
        gradients = [
            {key: g for key, g in of_step.items() if key in trainer.trained}
            for of_step in expected.gradients
        ]
        wrong += [
            (name, options, what)
            for what in differences(found, expected._replace(gradients=gradients))
        ]
        whole = task.build()
        whole.load_state_dict(found.weights)
        with torch.no_grad():
            loss = task.loss_fn(whole(task.batch(9)[0]), task.batch(9)[1]).item()
        if trainer.evaluate([task.batch(9)]) != pytest.approx(loss, rel=1e-12):
            wrong.append((name, options, "evaluate"))
    return wrong


def options_of(schedule, n):
    """Four microbatches (of 11 samples: they are uneven), or what the schedule takes."""
    if schedule == "interleaved":
        return {
            "schedule": schedule,
            "microbatches": 2 * n if n < 4 else n,
            "chunks": 2 if n < 4 else 1,
        }
    return {"schedule": schedule, "microbatches": 4 if n < 4 else 7}


@pytest.mark.parametrize(("n", "rules"), [(1, "gloo"), (2, "nccl"), (3, "gloo"), (4, "nccl")])
def test_every_schedule_equals_one_process(n, rules):
    """With tied and frozen weights, clipping, SGD with momentum and AdamW."""
    cases = [("mlp", "adamw", 0.05, options_of(schedule, n)) for schedule in SCHEDULES]
    # four blocks with weights
    fit = [schedule for schedule in SCHEDULES if n < 3 or (n == 3 and schedule != "interleaved")]
    cases += [("tied gpt", "sgd", 0.05, options_of(schedule, n)) for schedule in fit]
    cases += [("frozen", "sgd", None, options_of(schedule, n)) for schedule in ("1f1b", "zb-h1")]
    cases += [("untied gpt", "adamw", None, options_of("zb-h1", n))]
    assert (
        p101.launch(unlike_one_process, cases, world_size=n, backend="sim", rules=rules).results
        == [[]] * n
    )


def test_on_real_ranks(backend):
    cases = [("mlp", "adamw", 0.05, options_of(schedule, 3)) for schedule in SCHEDULES]
    cases += [("tied gpt", "sgd", 0.05, options_of("1f1b", 3))]
    assert p101.launch(unlike_one_process, cases, world_size=3, backend=backend).results == [[]] * 3


def test_the_schedule_may_be_a_list_of_ones_own():
    """The first stage has one entry, and each rank does what its list says: here with sends and
    receives, and two stages on each rank.
    """
    first = "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 0F1 0SEND_F1 2RECV_F1 2F1 2SEND_F1"
    second = "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 1RECV_F1 1F1 1SEND_F1 3RECV_F1 3F1"
    first += " 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1"
    second += " 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0 3B1 3SEND_B1 1RECV_B1 1B1 1SEND_B1"
    own = p101.Schedule([first.split(), second.split()])
    options = [{"schedule": own}, {"schedule": own, "layers_per_stage": [1, 2, 10, 2]}]
    cases = [("mlp", "adamw", 0.05, option) for option in options]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="sim").results == [[]] * 2


def test_a_tied_weight_on_two_stages_of_one_rank():
    """A V: the first and the last stage are on rank 0."""
    lists = [
        ["0F0", "3F0", "3B0", "0B0", "0F1", "3F1", "3B1", "0B1"],
        ["1F0", "2F0", "2B0", "1B0", "1F1", "2F1", "2B1", "1B1"],
    ]
    cases = [("tied gpt", "adamw", 0.05, {"schedule": p101.Schedule(lists)})]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="sim").results == [[]] * 2


def test_some_ranks_train_and_the_others_do_not():
    def on_three_of_four():
        return (
            unlike_one_process([("mlp", "adamw", None, {"group": [3, 0, 2], "microbatches": 4})])
            if torch.distributed.get_rank() != 1
            else []
        )

    assert p101.launch(on_three_of_four, world_size=4, backend="sim").results == [[]] * 4


def shapes_change():
    """Batches of other sizes and of shorter texts: shapes are announced again."""
    task, sizes = TASKS["tied gpt"], [(11, 6), (5, 6), (8, 3), (11, 6)]
    trainer = p101.PipelineTrainer(task.build(), task.loss_fn, OPTIMIZERS["sgd"], microbatches=3)
    alone, losses = task.build(), []
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    for step, (samples, time) in enumerate(sizes):
        x, y = (t[:samples, :time] for t in text(step))
        optimizer.zero_grad()
        loss = task.loss_fn(alone(x), y)
        loss.backward()
        optimizer.step()
        losses.append((trainer.step(x, y), loss.item()))
    return losses


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_shapes_may_change_from_step_to_step(backend):
    for losses in p101.launch(shapes_change, world_size=2, backend=backend).results:
        for found, expected in losses:
            assert found == pytest.approx(expected, rel=1e-10)


class Counted(torch.autograd.Function):
    """An operation with weights of its own, which counts its backwards."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        Counted.runs += 1
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, x):
        return Counted.apply(x, self.weight)


def halves(schedule):
    Counted.runs = 0
    model = nn.Sequential(
        *(
            module
            for s in range(2)
            for module in (MLP([4, 4], seed=s, dtype=torch.float64), Scale())
        )
    )
    done = []
    trainer = p101.PipelineTrainer(
        model, F.mse_loss, OPTIMIZERS["sgd"], schedule=schedule, microbatches=4, verify=False
    )
    inner = trainer.executor.run
    mine = model[2 * trainer.position]

    def run(action):
        before = None if (g := mine.layers[0].weight.grad) is None else g.clone()
        inner(action)
        after = mine.layers[0].weight.grad
        done.append(
            (action.kind, after is not None and (before is None or not torch.equal(before, after)))
        )

    trainer.executor.run = run
    trainer.step(randn(0, 8, 4), randn(1, 8, 4))
    return done, Counted.runs


def test_a_split_backward_runs_each_half_once():
    """I leaves the gradient of a linear layer's weight to W, and a custom backward runs once."""
    for done, runs in p101.launch(partial(halves, "zb-h1"), world_size=2, backend="gloo").results:
        assert runs == 4, "once a microbatch"
        changed = {kind for kind, changes in done if changes}
        assert changed == {"W"}


def in_place(schedule, layers_per_stage):
    trainer = p101.PipelineTrainer(
        activated(in_place=True),
        F.mse_loss,
        OPTIMIZERS["adamw"],
        schedule=schedule,
        layers_per_stage=layers_per_stage,
    )
    return differences(trained(trainer, ACTIVATED), one_process(ACTIVATED, "adamw", None))


TWO_ON_RANK_0 = p101.Schedule(
    [["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"], ["2F0", "2B0", "2F1", "2B1"]]
)


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage"),
    [("1f1b", [2, 5]), ("zb-h1", [2, 5]), (TWO_ON_RANK_0, [2, 2, 3])],
    ids=str,
)
def test_a_stage_may_change_in_place_what_it_receives(schedule, layers_per_stage):
    """Also where it comes from a stage on the same rank, whose backward needs its output as it
    was.
    """
    assert (
        p101.launch(in_place, schedule, layers_per_stage, world_size=2, backend="sim").results
        == [[]] * 2
    )
