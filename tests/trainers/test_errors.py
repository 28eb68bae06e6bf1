"""What is wrong with a trainer, or with what it is given, is said at once, on every rank, and by name."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from parallel101.trainers.data_parallel import DataParallelTrainer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model=None, optimizer=sgd, loss_fn=F.mse_loss, **options):
    return DataParallelTrainer(MLP([3, 4, 2]) if model is None else model, loss_fn, optimizer, **options)


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
            model.get_submodule(where.rpartition(".")[0]).__getattr__(where.rpartition(".")[2]).view(-1)[-1] += 1
    return model


def models_that_differ():
    rank = dist.get_rank()
    errors = {where: raised(trainer, changed(where)) for where in ("", "0.layers.1.weight", "0.layers.0.bias", "1.running_mean")}
    errors["width"] = raised(trainer, MLP([3, 4 + (rank == 2), 2]))
    errors["depth"] = raised(trainer, MLP([3, 4, 2] if rank else [3, 4, 2, 2]))
    errors["dtype"] = raised(trainer, MLP([3, 4, 2], dtype=torch.float64 if rank == 1 else None), sync=True)
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
        assert f"the models differ at the start: '{where}' on rank 1 has other values than on rank 0" in errors.pop(where)
    assert "'layers.0.weight' is (4, 3) torch.float32 on rank 0 and (5, 3) torch.float32 on rank 2" in errors.pop("width")
    assert "'layers.2.weight' is (2, 2) torch.float32 on rank 0 and absent on ranks 1, 2" in errors.pop("depth")
    assert "'layers.0.weight' is (4, 3) torch.float32 on rank 0 and (4, 3) torch.float64 on rank 1" in errors.pop("dtype")
    assert "'0.weight' on ranks 1, 2" in errors["unseeded"]
    assert "torch.manual_seed(0)" in errors["unseeded"]
    assert "sync=True" in errors["unseeded"]


def batches_that_do_not_fit():
    rank = dist.get_rank()
    one, two = trainer(), trainer(accumulate=2)
    x, y = torch.ones(8, 3), torch.ones(8, 2)
    before = [p.tolist() for p in one.model.parameters()]
    errors = {
        "share": raised(one.share, (x[:2], y[:2])),
        "fit": raised(one.fit, [(x[:2], y[:2])], progress=False),
        "step": raised(one.step, x[:rank], y[:rank]),
        "accumulate": raised(two.step, x[: 3 - rank], y[: 3 - rank]),
        "evaluate": raised(one.evaluate, []),
    }
    assert before == [p.tolist() for p in one.model.parameters()]
    return errors


def test_a_batch_smaller_than_the_ranks():
    first, *others = p101.launch(batches_that_do_not_fit, world_size=3).results
    assert all(other == first for other in others)
    assert "a batch of 2 samples can't be shared by 3 ranks" in first["share"]
    assert first["fit"] == first["share"]
    assert "the batch is too small: rank 0 has 0 of its 3 samples, and 3 ranks train; expected at least one sample a rank" in first["step"]
    assert "rank 2 has 1 of its 6 samples" in first["accumulate"]
    assert "at least accumulate=2 samples a rank" in first["accumulate"]
    assert "no batches" in first["evaluate"]


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
    for number, shown in ((math.nan, "nan"), (math.inf, "(nan|inf)"))[: 2 if backend == "sim" else 1]:
        results = p101.launch(a_loss_that_is_not_finite, number, world_size=3, backend=backend).results
        assert len(set(results)) == 1, "the same on every rank"
        error, goes_on = results[0]
        assert re.search(f"FloatingPointError: step 1: the loss is {shown} on rank 1; no weight was changed", error)
        assert goes_on


def test_an_optimizer_over_other_parameters():
    other = MLP([3, 4, 2])
    for optimizer, message in (
        (lambda p: sgd(other.parameters()), r"built over other parameters: 4 of its 4 \(the first of shape \(4, 3\)\)"),
        (lambda p: sgd([*p, *other.parameters()]), r"built over other parameters: 4 of its 8"),
        (lambda p: sgd(p[1:]), r"leaves out 1 of the parameters that it was given, 'layers.0.weight' first"),
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
        trainer(nn.Embedding(5, 2, sparse=True), loss_fn=lambda out, y: out.square().mean()).step(torch.ones(2, 1).long(), torch.ones(2, 2))
