"""What is wrong with a trainer, or with what it is given, is said at once, on every rank, and
by name.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101 import DataParallelTrainer
from parallel101.models.mlp import MLP
from tests.trainers.cases import TRAINERS


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model=None, optimizer=sgd, loss_fn=F.mse_loss, **options):
    return DataParallelTrainer(
        MLP([3, 4, 2]) if model is None else model, loss_fn, optimizer, **options
    )


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def changed(where):
    """A model that differs on rank 1 in what `where` names."""
    model = nn.Sequential(MLP([3, 4, 2]), nn.BatchNorm1d(2).eval())
    if dist.get_rank() == 1 and where:
        with torch.no_grad():
            model.get_submodule(where.rpartition(".")[0]).__getattr__(
                where.rpartition(".")[2]
            ).view(-1)[-1] += 1
    return model


def models_that_differ():
    rank = dist.get_rank()
    errors = {
        where: raised(trainer, changed(where))
        for where in ("", "0.layers.1.weight", "0.layers.0.bias", "1.running_mean")
    }
    errors["width"] = raised(trainer, MLP([3, 4 + (rank == 2), 2]))
    errors["depth"] = raised(trainer, MLP([3, 4, 2] if rank else [3, 4, 2, 2]))
    errors["dtype"] = raised(
        trainer, MLP([3, 4, 2], dtype=torch.float64 if rank == 1 else None), sync=True
    )
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    errors["unseeded"] = raised(trainer, model)
    together = trainer(model, sync=True)
    return errors, [weight.tolist() for weight in together.state_dict().values()]


def test_models_that_differ_at_the_start_are_named_by_parameter():
    (errors, weights), *others = p101.launch(models_that_differ, world_size=3).results
    for other_errors, other_weights in others:
        assert other_errors == errors, "every rank is told the same"
        assert other_weights == weights, "with sync=True all have rank 0's weights"
    torch.manual_seed(0)
    assert weights[0] == nn.Linear(3, 3).weight.tolist()
    assert errors.pop("") == "nothing"
    for where in ("0.layers.1.weight", "0.layers.0.bias", "1.running_mean"):
        assert (
            f"the models differ at the start: '{where}' on rank 1 differs from rank 0"
            in errors.pop(where)
        )
    assert (
        "'layers.0.weight' is (4, 3) torch.float32 on rank 0 and (5, 3) torch.float32 on rank 2"
        in errors.pop("width")
    )
    assert (
        "'layers.2.weight' is (2, 2) torch.float32 on rank 0 and absent on ranks 1, 2"
        in errors.pop("depth")
    )
    assert (
        "'layers.0.weight' is (4, 3) torch.float32 on rank 0 and (4, 3) torch.float64 on rank 1"
        in errors.pop("dtype")
    )
    assert "'0.weight' on ranks 1, 2" in errors["unseeded"]
    assert "torch.manual_seed(0)" in errors["unseeded"]
    assert "sync=True" in errors["unseeded"]


def batches_that_do_not_fit():
    rank = dist.get_rank()
    one = trainer()
    x, y = torch.ones(8, 3), torch.ones(8, 2)
    before = [p.tolist() for p in one.model.parameters()]
    errors = {
        "none": raised(one.step, x[:0], y[:0]),
        "targets": raised(one.step, x[:2], y[: 2 - (rank == 1)]),
        "evaluate": raised(one.evaluate, []),
    }
    assert before == [p.tolist() for p in one.model.parameters()]
    return errors


def test_batches_without_samples_or_with_too_few_targets():
    errors = p101.launch(batches_that_do_not_fit, world_size=3).results
    for rank, of_rank in enumerate(errors):
        assert "the batch of step 0 has no samples" in of_rank["none"]
        assert "inputs have 2 samples along dim 0 and targets 1" in of_rank["targets"]
        assert ("rank 1 could not take its batch in step 0" in of_rank["targets"]) == (rank != 1)
        assert "no batches" in of_rank["evaluate"]


def a_loss_that_is_not_finite(number):
    rank = dist.get_rank()
    together = trainer(bucket_bytes=16)
    x = torch.ones(2, 3)
    together.step(x, torch.ones(2, 2))
    before = [p.tolist() for p in together.model.parameters()]
    error = raised(together.step, x * number if rank == 1 else x, torch.ones(2, 2))
    assert before == [p.tolist() for p in together.model.parameters()]
    again = together.step(x, torch.ones(2, 2))
    return error, math.isfinite(again)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_loss_on_one_rank_that_is_not_a_number_is_named_everywhere_and_changes_no_weight(backend):
    for number, shown in ((math.nan, "nan"), (math.inf, "(nan|inf)"))[
        : 2 if backend == "sim" else 1
    ]:
        results = p101.launch(
            a_loss_that_is_not_finite, number, world_size=3, backend=backend
        ).results
        assert len(set(results)) == 1, "the same on every rank"
        error, goes_on = results[0]
        assert re.search(
            f"FloatingPointError: step 1: the loss is {shown} on rank 1; no weight was changed",
            error,
        )
        assert goes_on


class Fails(MLP):
    """Raises on rank 1, in the place that it is told."""

    def __init__(self):
        super().__init__([3, 4, 4, 2], dtype=torch.float64)
        self.place = None
        self.layers[1].register_forward_hook(lambda *_: self.at("forward"))
        self.layers[1].register_full_backward_hook(lambda *_: self.at("backward"))

    def at(self, place):
        if place == self.place and dist.get_rank() == 1:
            raise IndexError(f"in the middle of {place}")


def one_rank_fails(accumulate):
    """With each trainer, in four places of a step and two of an evaluation; and what a step
    makes of it afterwards.
    """
    return {name: errors_and_a_step(build, accumulate) for name, build in TRAINERS.items()}


def errors_and_a_step(build, accumulate):
    model, losses, said = Fails(), [], []

    def loss_fn(outputs, targets):
        model.at("loss")
        return F.mse_loss(outputs, targets)

    together = build(model, loss_fn, lambda p: torch.optim.AdamW(p, lr=0.01), accumulate=accumulate)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
    inputs, targets = together.share((x, x[:, :2]))
    losses.append(together.step(inputs, targets))
    before = together.state_dict()
    for model.place in ("forward", "loss", "backward"):
        said.append(raised(together.step, inputs, targets))
    said.append(raised(together.step, inputs, None if together.position == 1 else targets))
    for model.place in ("forward", "loss"):
        said.append(raised(together.evaluate, [(x, x[:, :2])] * 2))
    model.place = None
    after = together.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    losses.append(together.step(inputs, targets))
    return said, losses, {name: weight.tolist() for name, weight in together.state_dict().items()}


@pytest.mark.parametrize(
    ("backend", "world_size", "accumulate"),
    [("gloo", 2, 2), ("gloo", 3, 1), ("sim", 2, 2), ("sim", 4, 1)],
)
def test_an_error_on_one_rank_is_an_error_on_all_and_training_can_continue(
    backend, world_size, accumulate
):
    """No rank continues alone, none waits for ever, no weight is changed, and the next step is
    that of a run without the error.
    """
    expected = two_steps_alone()
    for rank, by_trainer in enumerate(
        p101.launch(one_rank_fails, accumulate, world_size=world_size, backend=backend).results
    ):
        for name, (said, losses, weights) in by_trainer.items():
            could_not = "" if rank == 1 else "RuntimeError: rank 1 could not "
            finish = could_not and f"{could_not}finish step 1, and no weight was changed: "
            assert said[:3] == [
                f"{finish}IndexError: in the middle of {place}"
                for place in ("forward", "loss", "backward")
            ], name
            assert said[3].startswith(
                (could_not and f"{could_not}take its batch in step 1: ")
                + "TypeError: a batch is None"
            ), name
            evaluate = could_not and f"{could_not}evaluate: "
            assert said[4:] == [
                f"{evaluate}IndexError: in the middle of {place}" for place in ("forward", "loss")
            ], name
            torch.testing.assert_close(losses, expected[0], rtol=1e-12, atol=0)
            torch.testing.assert_close(weights, expected[1], rtol=1e-10, atol=1e-12)


def nobody_catches_it(name):
    model = Fails()
    together = TRAINERS[name](model, F.mse_loss, sgd)
    model.place, x = "forward", torch.ones(6, 3, dtype=torch.float64)
    together.step(*together.share((x, x[:, :2])))


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("name", ["overlapped", "ZeRO-3"])
def test_the_launch_reports_the_rank_that_failed(name, backend):
    with pytest.raises(p101.RankFailed) as failed:
        p101.launch(nobody_catches_it, name, world_size=3, backend=backend)
    assert failed.value.rank == 1
    assert isinstance(failed.value.__cause__, IndexError)


def two_steps_alone():
    model, losses = MLP([3, 4, 4, 2], dtype=torch.float64), []
    optimizer, x = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3),
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.tolist() for name, weight in model.state_dict().items()}


def test_an_optimizer_over_other_parameters():
    other = MLP([3, 4, 2])
    for optimizer, message in (
        (
            lambda p: sgd(other.parameters()),
            r"built over other parameters: 4 of its 4 \(the first of shape \(4, 3\)\)",
        ),
        (lambda p: sgd([*p, *other.parameters()]), r"built over other parameters: 4 of its 8"),
        (
            lambda p: sgd(p[1:]),
            r"leaves out 1 of the parameters that it was given, 'layers.0.weight' first",
        ),
        ("adam", r"optimizer='adam': expected a function"),
        (lambda p: None, r"optimizer gave a NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trainer(optimizer=optimizer)


def test_frozen_parameters_are_left_alone():
    model = MLP([3, 4, 2])
    model.layers[0].requires_grad_(False)
    before = model.layers[0].weight.clone()
    trainer(model).step(torch.ones(2, 3), torch.ones(2, 2))
    assert torch.equal(model.layers[0].weight, before)
    assert model.layers[0].weight.grad is None


def test_a_sparse_gradient():
    with pytest.raises(TypeError, match="the gradient of 'weight' is sparse: expected dense"):
        trainer(nn.Embedding(5, 2, sparse=True), loss_fn=lambda out, y: out.square().mean()).step(
            torch.ones(2, 1).long(), torch.ones(2, 2)
        )
