"""What is wrong with a tensor-parallel, pipeline or hybrid run is an error at once, the same on
every rank, and no weight is changed.
"""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def mlp(layers: int = 4) -> MLP:
    return MLP([4, *[6] * (layers - 1), 2], dtype=torch.float64)


def gpt(heads: int) -> GPT:
    return GPT(
        GPTConfig(vocabulary=13, context=6, layers=2, heads=heads, width=8), dtype=torch.float64
    )


def mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def tensor(model, loss_fn=F.mse_loss, **options):
    return p101.TensorParallelTrainer(model, loss_fn, sgd, verify=False, **options)


def pipeline(model, loss_fn=F.mse_loss, **options):
    return p101.PipelineTrainer(model, loss_fn, sgd, verify=False, **options)


def hybrid(model, loss_fn=F.mse_loss, *, axes, **options):
    return p101.HybridTrainer(model, loss_fn, sgd, mesh=mesh(**axes), verify=False, **options)


def small_step(trainer, samples: int) -> float:
    return trainer.step(
        torch.ones(samples, 4, dtype=torch.float64), torch.ones(samples, 2, dtype=torch.float64)
    )


class WithFunction(nn.Module):
    """A function among the modules of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def sequence(self):
        return [self.first, F.relu, self.second]


class Called(nn.Module):
    """A module of the name `sequence` tells no order."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = mlp()

    def forward(self, x):
        return self.sequence(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x), x


FUNCTION = "WithFunction.sequence() has a function at place 1 (relu): expected modules only"
WAITING = p101.Schedule(
    [
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F1", "1B1", "1F0", "1B0"],
        ["2F0", "2B0", "2F1", "2B1"],
        ["3F0", "3B0", "3F1", "3B1"],
    ]
)
PATTERN = {"blocks.*.up": "column"}
FAULTS = {  # on 4 ranks, and the words that name it
    "fewer layers than stages": (
        lambda: pipeline(mlp(3)),
        "the model has 3 modules with parameters, too few for 4 pipeline stages",
    ),
    "fewer layers than stages, interleaved": (
        lambda: pipeline(mlp(5), schedule="interleaved", chunks=2, microbatches=4),
        "the model has 5 modules with parameters, too few for 8 pipeline stages",
    ),
    "fewer layers than stages, hybrid": (
        lambda: hybrid(mlp(2), axes={"pp": 4}),
        "too few for 4 pipeline stages",
    ),
    "a plan that matches no module": (
        lambda: tensor(mlp(), plan=PATTERN),
        "plan: 'blocks.*.up' matches no module",
    ),
    "a plan that matches no module, hybrid": (
        lambda: hybrid(mlp(), axes={"tp": 2, "pp": 2}, plan=PATTERN),
        "plan: 'blocks.*.up' matches no module",
    ),
    "heads": (
        lambda: tensor(gpt(2), next_token_loss),
        "'blocks.0.attention.query' has 2 heads, which 4 ranks cannot share equally",
    ),
    "heads, hybrid": (
        lambda: hybrid(gpt(1), next_token_loss, axes={"pp": 2, "tp": 2}),
        "which 2 ranks cannot share equally",
    ),
    "a mesh larger than the world": (
        lambda: hybrid(mlp(), axes={"dp": 2, "tp": 2, "pp": 2}),
        "Mesh should not be bigger than default world size 4, but found 8 ranks",  # torch's
    ),
    "a schedule that would deadlock": (
        lambda: pipeline(mlp(), schedule=WAITING),
        (
            "wait for each other forever: rank 0's 0B0 waits for 1B0 of rank 1; rank 1's 1F1 waits "
            "for 0F1 of rank 0"
        ),
    ),
    "a schedule for other ranks": (
        lambda: hybrid(mlp(), axes={"dp": 2, "pp": 2}, schedule=WAITING),
        "expected one for the 2 ranks",
    ),
    "a function in the sequence, pipeline": (lambda: pipeline(WithFunction()), FUNCTION),
    "a function in the sequence, tensor": (lambda: tensor(WithFunction()), FUNCTION),
    "a function in the sequence, ZeRO-3": (
        lambda: p101.ShardedTrainer(WithFunction(), F.mse_loss, sgd, zero_stage=3),
        FUNCTION,
    ),
    "a module called sequence, pipeline": (
        lambda: pipeline(Called()),
        "a Called can't be cut into pipeline stages",
    ),
    "an axis of another name": (
        lambda: hybrid(mlp(), axes={"dp": 2, "ep": 2}),
        "expected names out of dp, tp, pp",
    ),
}


def raised(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    """By rank, the error of each fault.

    In one launch, since an error leaves the ranks able to go on.
    """
    faults = {name: call for name, (call, _) in FAULTS.items()}
    return p101.launch(
        lambda: {name: raised(call) for name, call in faults.items()}, world_size=4, backend="sim"
    ).results


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_cannot_be_trained_is_named_on_every_rank(fault, found):
    first, *others = [of_rank[fault] for of_rank in found]
    assert FAULTS[fault][1] in first
    assert others == [first] * 3


def test_a_module_called_sequence_is_cut_by_its_plan():
    def program():
        return small_step(tensor(Called(), plan={"sequence.layers.0": "column_gather"}), 4)

    expected = F.mse_loss(
        mlp()(torch.ones(4, 4, dtype=torch.float64)), torch.ones(4, 2, dtype=torch.float64)
    ).item()
    assert (
        p101.launch(program, world_size=2, backend="sim").results == [pytest.approx(expected)] * 2
    )


# ── in the middle of a step ──


def test_what_is_no_tensor_cannot_go_to_the_next_stage():
    found = p101.launch(
        lambda: raised(lambda: small_step(pipeline(nn.Sequential(Pair(), Pair())), 4)),
        world_size=2,
        backend="sim",
    ).results
    assert found[0].startswith(
        "ScheduleError: stage 0 gave a tuple: expected one tensor between two stages"
    )
    assert found[1].startswith(
        "ValueError: rank 0 could not finish step 0, and no weight was changed: ScheduleError: "
        "stage 0 gave a tuple"
    )


class Faulty(nn.Module):
    """A layer that fails, if it was armed, in a forward or a backward: raises an error, or
    writes down the time and ends its process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.arm(None)

    def arm(self, fault: str | None, call: int = 2, dies: Path | None = None) -> None:
        self.fault, self.call, self.dies, self.calls = (
            fault,
            call,
            dies,
            {"forward": 0, "backward": 0},
        )

    def forward(self, x):
        self.count("forward")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.count("backward"))
        return y

    def count(self, what: str) -> None:
        self.calls[what] += 1
        if what == self.fault and self.calls[what] == self.call:
            if self.dies is not None:
                self.dies.write_text(str(time.time()))
                os._exit(7)
            raise ArithmeticError(f"a fault in {what}")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Faulty() for _ in range(8)))


KINDS = {
    "gpipe": lambda model: pipeline(model, schedule="gpipe", microbatches=4),
    "1f1b": lambda model: pipeline(model, schedule="1f1b", microbatches=4),
    "interleaved": lambda model: pipeline(model, schedule="interleaved", chunks=2, microbatches=4),
    "zb-h1": lambda model: pipeline(model, schedule="zb-h1", microbatches=4),
    "zb-h2": lambda model: pipeline(model, schedule="zb-h2", microbatches=7),
    "dp x pp": lambda model: hybrid(model, axes={"dp": 2, "pp": 2}, microbatches=4),
    "ZeRO-1 x pp": lambda model: hybrid(
        model, axes={"dp": 2, "pp": 2}, microbatches=4, zero_stage=1
    ),
    "ZeRO-2 x pp": lambda model: hybrid(
        model, axes={"dp": 2, "pp": 2}, microbatches=4, zero_stage=2
    ),
    "ZeRO-3 x pp": lambda model: hybrid(
        model, axes={"dp": 2, "pp": 2}, microbatches=4, zero_stage=3
    ),
    "tp x pp": lambda model: hybrid(
        model, axes={"tp": 2, "pp": 2}, microbatches=4, plan={"*.linear": "column_gather"}
    ),
    "tensor": lambda model: tensor(model, plan={"*.linear": "column_gather"}),
}


# a rank that fails in the middle of a layer can't go on there: its error ends the run
WITH_TP = ("tp x pp", "tensor")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fails_and_goes_on(kind: str, fault: str) -> tuple[str, bool, float, float]:
    """The error, whether all weights are as they were, and the losses of a step after it and of
    the same step without it.
    """
    x, y = (torch.ones(8, 4, dtype=torch.float64) for _ in range(2))
    losses = []
    for failing in (True, False):
        model = layers()
        trainer, armed = KINDS[kind](model), model[5]
        if fault != "forward":  # which comes in the first step, and in an evaluation before it
            trainer.step(x, y)
        elif failing:
            armed.arm(fault)
            assert "a fault in forward" in raised(lambda: trainer.evaluate([(x, y), (x, y)]))  # noqa: B023
        if failing:
            before = trainer.state_dict()
            nan_here = fault == "nan" and trainer.axes.here["dp"] == trainer.axes.sizes["dp"] - 1
            armed.arm(fault)
            error = raised(lambda: trainer.step(x, y * math.nan if nan_here else y))  # noqa: B023
            armed.arm(None)
            unchanged = equal(before, trainer.state_dict())
        losses.append(trainer.step(x, y))
    return error, unchanged, *losses


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_fault_on_one_stage_is_told_on_every_rank_and_changes_no_weight(kind):
    """Faults that ranks survive: one after the other, in one launch."""
    faults = ("nan",) if kind in WITH_TP else ("nan", "forward", "backward")
    by_rank = p101.launch(
        lambda: [fails_and_goes_on(kind, fault) for fault in faults], world_size=4, backend="sim"
    ).results
    for fault, *results in zip(faults, *by_rank):
        for error, unchanged, after, without in results:
            assert unchanged
            assert after == without
            if fault == "nan":
                assert re.match(
                    "FloatingPointError: step 1: the loss is (nan on rank ., )*nan on rank 3; "
                    "no weight was changed",
                    error,
                )
            elif error != f"ArithmeticError: a fault in {fault}":  # on the rank that has that layer
                assert re.fullmatch(
                    "RuntimeError: rank [12] could not finish step [01], and no weight was "
                    f"changed: .*: a fault in {fault}",
                    error,
                )
        assert len({result[0] for result in results}) == (1 if fault == "nan" else 2)


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("kind", WITH_TP)
def test_a_fault_in_the_middle_of_a_cut_layer_ends_the_run(kind, fault):
    with pytest.raises(p101.RankFailed, match="ArithmeticError: a fault in") as failed:
        p101.launch(ends_the_run, kind, fault, world_size=4, backend="sim")
    assert isinstance(failed.value.__cause__, ArithmeticError)


def ends_the_run(kind: str, fault: str) -> None:
    x, y = (torch.ones(8, 4, dtype=torch.float64) for _ in range(2))
    model = layers()
    trainer = KINDS[kind](model)
    trainer.step(x, y)
    model[5].arm(fault, call=1)
    trainer.step(x, y)


def dies(kind: str, fault: str, file) -> None:
    x, y = (torch.ones(8, 4, dtype=torch.float64) for _ in range(2))
    model = layers()
    trainer = KINDS[kind](model)
    trainer.step(x, y)
    model[5].arm(fault, dies=file)
    trainer.step(x, y)


@pytest.mark.parametrize(
    ("kind", "fault"), [("1f1b", "backward"), ("zb-h1", "forward"), ("dp x pp", "forward")]
)
def test_a_rank_that_dies_in_the_middle_of_a_pipeline_ends_the_run_with_its_name(
    kind, fault, tmp_path
):
    died = tmp_path / "died"
    with pytest.raises(p101.RankFailed, match=r"rank [123]") as failed:
        p101.launch(dies, kind, fault, died, world_size=4)
    assert time.time() - float(died.read_text()) < 2.0, (
        "seconds: the others do not wait for the dead"
    )
    assert failed.value.exitcode == 7
    assert failed.value.rank in ((1, 3) if kind == "dp x pp" else (2,))
