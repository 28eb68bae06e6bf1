"""A pipeline of n ranks is one process, to ten digits: losses, gradients, weights and evaluations,
with every schedule.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import OPTIMIZERS, TASKS, Case, Task, randn, rows, unlike_one_process

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = MLP([4, 3], seed=7, dtype=torch.float64)
        self.register_buffer("factor", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) * self.factor


def frozen() -> nn.Module:
    """The second layer is not trained, and a buffer scales the last one's output."""
    layers = [MLP([4, 4], seed=s, dtype=torch.float64) for s in range(6)]
    layers[1].requires_grad_(False)
    return nn.Sequential(*layers, nn.Tanh(), Scaled())


def activated() -> nn.Module:
    linears = [MLP([4, 4], seed=s, dtype=torch.float64) for s in range(4)]
    return nn.Sequential(
        linears[0], nn.Tanh(), nn.LeakyReLU(0.1), linears[1], nn.ReLU(), *linears[2:]
    )


def in_place(model, *args, **options):
    """One process could not do that: tanh needs its output in backward."""
    model[2].inplace = model[4].inplace = True
    return p101.PipelineTrainer(model, *args, **options)


DEEP = Task(lambda: MLP([4, 7, 5, 6, 5, 7, 5, 6, 3], dtype=torch.float64), F.mse_loss, rows(4, 3))
FROZEN = Task(frozen, F.mse_loss, rows(4, 3))
ACTIVATED = Task(activated, F.mse_loss, rows(4, 4))
TIED = TASKS["tied gpt"]  # with batches of other sizes and shapes


def case(task, optimizer="adamw", clip_norm=0.05, **options):
    options = {"verify": False, **options}
    return Case(task, p101.PipelineTrainer, optimizer, clip_norm, options)


def options_of(schedule, n):
    """Four microbatches (of 11 samples: they are uneven), or what the schedule takes."""
    if schedule == "interleaved":
        chunks = 2 if n < 4 else 1
        return {"schedule": schedule, "microbatches": n * chunks, "chunks": chunks}
    return {"schedule": schedule, "microbatches": 4 if n < 4 else 7}


@pytest.mark.parametrize(("n", "rules"), [(1, "gloo"), (2, "nccl"), (3, "gloo"), (4, "nccl")])
def test_every_schedule_equals_one_process(n, rules):
    """With tied and frozen weights, clipping, SGD with momentum and AdamW."""
    cases = [case(DEEP, **options_of(schedule, n)) for schedule in SCHEDULES]
    for schedule in {2: ("gpipe", "zb-h2", "interleaved"), 3: ("1f1b", "zb-h1")}.get(n, ()):
        cases.append(case(TIED, "sgd", **options_of(schedule, n)))
    cases += [case(FROZEN, "sgd", None, **options_of(name, n)) for name in ("1f1b", "zb-h1")]
    run = p101.launch(unlike_one_process, cases, world_size=n, backend="sim", rules=rules)
    assert run.results == [[]] * n


def test_on_real_ranks(backend):
    cases = [case(DEEP, **options_of(schedule, 3)) for schedule in SCHEDULES]
    cases += [case(TIED, "sgd", **options_of("1f1b", 3))]
    program = partial(unlike_one_process, device="cuda" if backend == "nccl" else "cpu")
    # on one shared GPU, ranks take turns: 60 s weren't enough
    run = p101.launch(program, cases, world_size=3, backend=backend, timeout=170)
    assert run.results == [[]] * 3


FIRST = "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 0F1 0SEND_F1 2RECV_F1 2F1 2SEND_F1 "
FIRST += "2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1"
SECOND = "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 1RECV_F1 1F1 1SEND_F1 3RECV_F1 3F1 "
SECOND += "3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0 3B1 3SEND_B1 1RECV_B1 1B1 1SEND_B1"
WITH_MESSAGES = p101.Schedule([FIRST.split(), SECOND.split()])
V = p101.Schedule.from_csv("0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1")
TWO_ON_RANK_0 = p101.Schedule.from_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1")


def test_lists_of_ones_own_and_stages_of_any_size():
    """With sends and receives, two stages on each rank; a V, where a tied weight is on two stages
    of one rank; stages that change in place what they receive, also from a stage on the same
    rank, whose backward needs its output as it was.
    """
    cases = [
        case(DEEP, schedule=WITH_MESSAGES),
        case(DEEP, schedule=WITH_MESSAGES, layers_per_stage=[1, 2, 10, 2]),
        case(TIED, schedule=V),
        case(ACTIVATED, schedule="1f1b", layers_per_stage=[2, 5])._replace(trainer=in_place),
        case(ACTIVATED, schedule="zb-h1", layers_per_stage=[2, 5])._replace(trainer=in_place),
        case(ACTIVATED, schedule=TWO_ON_RANK_0, layers_per_stage=[2, 2, 3])._replace(
            trainer=in_place
        ),
    ]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="sim").results == [[]] * 2


def on_three_of_four():
    if torch.distributed.get_rank() == 1:
        return []
    return unlike_one_process([case(DEEP, group=[3, 0, 2], microbatches=4)])


def test_some_ranks_train_and_the_others_do_not():
    assert p101.launch(on_three_of_four, world_size=4, backend="sim").results == [[]] * 4


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
        self.linear = MLP([4, 4], dtype=torch.float64)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, x):
        return Counted.apply(self.linear(x), self.weight)


def halves():
    Counted.runs = 0
    model = nn.Sequential(Scale(), Scale())
    options = {"schedule": "zb-h1", "microbatches": 4, "verify": False}
    trainer = p101.PipelineTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options)
    trainer.step(randn(0, 8, 4), randn(1, 8, 4))
    return Counted.runs


def test_a_split_backward_runs_each_half_once():
    """A custom backward runs once a microbatch, in the first half."""
    run = p101.launch(halves, world_size=2, trace=True)
    assert run.results == [4, 4]
    for rank in range(2):
        for half in ("input gradient", "weight gradient"):
            assert len([e for e in run.trace.spans(half) if e.rank == rank]) == 4


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x), x


def a_tuple_between_stages():
    options = {"verify": False, "microbatches": 2}
    model = nn.Sequential(Pair(), Pair())
    p101.PipelineTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options).step(*rows(4, 4)(0))


def test_what_is_no_tensor_cannot_go_to_the_next_stage():
    with pytest.raises(p101.RankFailed, match="stage 0 returned a tuple: expected one tensor"):
        p101.launch(a_tuple_between_stages, world_size=2, backend="sim")
