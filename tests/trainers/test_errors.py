"""What can't be trained is an error on every rank, which names it, and no weight is changed."""

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
from tests.trainers.cases import TRAINERS, differing, on_mesh, raised, randn, sgd


def trainer(model=None, optimizer=sgd, loss_fn=F.mse_loss, **options):
    model = MLP([3, 4, 2]) if model is None else model
    return p101.DataParallelTrainer(model, loss_fn, optimizer, **options)


# ── when a trainer is built ──


def changed(where):
    """A model that differs on rank 1 in what `where` names."""
    model = nn.Sequential(MLP([3, 4, 2]), nn.BatchNorm1d(2).eval())
    if dist.get_rank() == 1 and where:
        model.state_dict()[where].view(-1)[-1] += 1
    return model


def models_that_differ():
    rank = dist.get_rank()
    errors = {
        where: raised(trainer, changed(where))
        for where in ("", "0.layers.1.weight", "0.layers.0.bias", "1.running_mean")
    }
    errors["width"] = raised(trainer, MLP([3, 4 + (rank == 2), 2]))
    errors["depth"] = raised(trainer, MLP([3, 4, 2] if rank else [3, 4, 2, 2]))
    of_rank = MLP([3, 4, 2], dtype=torch.float64 if rank == 1 else None)
    errors["dtype"] = raised(trainer, of_rank, sync=True)
    torch.manual_seed(rank)
    model = nn.Linear(3, 3)
    errors["unseeded"] = raised(trainer, model)
    return errors, trainer(model, sync=True).state_dict()["weight"].tolist()


DIFFERENT = {
    "": "nothing",
    "0.layers.1.weight": r"'0\.layers\.1\.weight' on rank 1 differs from rank 0",
    "0.layers.0.bias": r"'0\.layers\.0\.bias' on rank 1",
    "1.running_mean": r"'1\.running_mean' on rank 1",
    "width": r"'layers\.0\.weight' is \(4, 3\) .* on rank 0 and \(5, 3\) .* on rank 2",
    "depth": r"'layers\.2\.weight' .* absent on ranks 1, 2",
    "dtype": r"'layers\.0\.weight' .*float32 on rank 0 and .*float64 on rank 1",
    "unseeded": r"'weight' on ranks 1, 2.*torch\.manual_seed\(0\).*sync=True",
}


def test_models_that_differ_at_the_start_are_named_by_parameter():
    first, *others = p101.launch(models_that_differ, world_size=3, backend="sim").results
    assert others == [first] * 2, "every rank is told the same"
    errors, weight = first
    for name, pattern in DIFFERENT.items():
        assert re.search(pattern, errors[name], re.DOTALL), errors[name]
    torch.manual_seed(0)
    assert weight == nn.Linear(3, 3).weight.tolist(), "with sync=True all have rank 0's weights"


def test_an_optimizer_over_other_parameters():
    other = MLP([3, 4, 2])
    for optimizer, message in (
        (lambda p: sgd(other.parameters()), "has 4 others, and lacks layers.0.weight, "),
        (lambda p: sgd([*p, *other.parameters()]), "has 4 others, and lacks none"),
        (lambda p: sgd(p[1:]), "has 0 others, and lacks layers.0.weight. "),
        ("adam", "optimizer='adam': expected a function"),
        (lambda p: None, "optimizer returned a NoneType"),
    ):
        for build in (trainer, TRAINERS["ZeRO-3"]):
            with pytest.raises((TypeError, ValueError), match=message):
                build(MLP([3, 4, 2]), optimizer=optimizer, loss_fn=F.mse_loss)


# ── in a step, before the first message ──


def batches_that_do_not_fit():
    rank, one = dist.get_rank(), trainer(verify=False)
    x, y = torch.ones(8, 3), torch.ones(8, 2)
    before = one.state_dict()
    errors = {
        "none": raised(one.step, x[:0], y[:0]),
        "targets": raised(one.step, x[:2], y[: 2 - (rank == 1)]),
        "no tensor": raised(one.step, x, None if rank == 1 else y),
        "evaluate": raised(one.evaluate, []),
    }
    assert differing(one.state_dict(), before, 0) == []
    return errors, one.step(x, y)


def test_a_batch_that_one_rank_can_not_take_is_an_error_on_all():
    results = p101.launch(batches_that_do_not_fit, world_size=3, backend="sim").results
    assert len({loss for _, loss in results}) == 1, "the next step is like any other"
    for rank, (of_rank, _) in enumerate(results):
        assert "the batch of step 0 has no samples" in of_rank["none"]
        assert "inputs have 2 samples along dim 0 and targets 1" in of_rank["targets"]
        for name in ("targets", "no tensor"):
            assert ("rank 1 could not take its batch in step 0" in of_rank[name]) == (rank != 1)
        assert "a batch is None" in of_rank["no tensor"]
        assert "no batches" in of_rank["evaluate"]


# ── at the end of a step: the loss ──

LAYOUTS = {  # on 4 ranks; and the ranks whose loss isn't finite
    "overlapped": (TRAINERS["overlapped"], "3"),
    "ZeRO-2": (TRAINERS["ZeRO-2"], "3"),
    "ZeRO-3, accumulated": (lambda *args: TRAINERS["ZeRO-3"](*args, accumulate=2), "3"),
    "pipeline": (lambda *args: on_mesh("dp 2, pp 2")(*args, microbatches=2, zero_stage=3), "3"),
    "zero bubble": (
        lambda *args: on_mesh("tp 2, pp 2")(*args, schedule="zb-h1", microbatches=2),
        "1, nan on rank 3",
    ),
}


def a_loss_that_is_not_finite(names):
    x, found = randn(0, 8, 4), {}
    for name in names:
        together = LAYOUTS[name][0](MLP([4, 4, 4, 4], dtype=torch.float64), F.mse_loss, sgd)
        together.step(*together.share((x, x)))
        before = together.state_dict()
        targets = x.clone()
        targets[-1] = math.nan
        error = raised(together.step, *together.share((x, targets)))
        assert differing(together.state_dict(), before, 0) == []
        found[name] = error, together.step(*together.share((x, x)))
    return found


@pytest.mark.parametrize(
    ("backend", "names"),
    [("sim", list(LAYOUTS)), ("gloo", ["overlapped", "ZeRO-2"])],
    ids=["sim", "gloo"],
)
def test_a_nan_on_one_rank_is_the_same_error_on_all_and_changes_no_weight(backend, names):
    alone = TRAINERS["naive"](MLP([4, 4, 4, 4], dtype=torch.float64), F.mse_loss, sgd)
    _, expected = (alone.step(randn(0, 8, 4), randn(0, 8, 4)) for _ in range(2))
    first, *others = p101.launch(
        a_loss_that_is_not_finite, names, world_size=4, backend=backend
    ).results
    assert others == [first] * 3
    for name, (error, after) in first.items():
        assert f"step 1: the loss is nan on rank {LAYOUTS[name][1]}; no weight" in error, name
        assert error.startswith("FloatingPointError")
        assert after == pytest.approx(expected, rel=1e-10), "the next step is like any other"


# ── a model that raises on one rank ──


class Raises(nn.Module):
    """On rank 1, from its second call on."""

    def __init__(self, direction):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.direction, self.calls = direction, 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        if self.calls > 1 and dist.get_rank() == 1:
            if self.direction == "forward":
                raise IndexError("no such row")
            y.register_hook(self.fail)
        return y

    def fail(self, gradient):
        raise IndexError("no such row")


BUILDS = {
    "overlapped": TRAINERS["overlapped"],
    "ZeRO-1": TRAINERS["ZeRO-1"],
    "ZeRO-3": TRAINERS["ZeRO-3"],
    "pipeline": lambda *args: p101.PipelineTrainer(*args, microbatches=4, verify=False),
    "tensor": lambda *args: p101.TensorParallelTrainer(
        *args, plan={"*.linear": "column_gather"}, verify=False
    ),
    "norms": lambda *args: TRAINERS["overlapped"](*args, sync_batch_norm=True),
}


def nobody_catches_it(name, direction):
    norm = nn.BatchNorm1d(4) if name == "norms" else nn.Identity()
    model = nn.Sequential(*(Raises(direction) for _ in range(3)), norm.double())
    together, x = BUILDS[name](model, F.mse_loss, sgd), randn(0, 6, 4)
    for _ in range(2):
        together.step(*together.share((x, x)))


@pytest.mark.parametrize(
    ("name", "direction", "backend"),
    [
        *((name, ("forward", "backward")[i % 2], "sim") for i, name in enumerate(BUILDS)),
        ("ZeRO-3", "backward", "gloo"),
        ("pipeline", "forward", "gloo"),
        ("norms", "forward", "sim"),
    ],
)
def test_the_launch_ends_and_names_the_rank_whose_model_raised(name, direction, backend):
    with pytest.raises(p101.RankFailed, match="no such row") as failed:
        p101.launch(nobody_catches_it, name, direction, world_size=3, backend=backend)
    assert failed.value.rank == 1
    assert isinstance(failed.value.__cause__, IndexError)


# ── what is not supported, and what may not change ──


def step_of_a_sparse_embedding(name):
    embedding = nn.Embedding(5, 2, sparse=True)
    built = TRAINERS[name](embedding, lambda y, _: y.square().mean(), sgd)
    built.step(torch.ones(2, 1).long(), torch.ones(2, 2))


@pytest.mark.parametrize("name", ["overlapped", "ZeRO-3"])
def test_a_sparse_gradient(name):
    with pytest.raises(p101.RankFailed, match="'weight' is sparse: expected dense"):
        p101.launch(step_of_a_sparse_embedding, name, world_size=2, backend="sim")


class Elsewhere(nn.Module):
    """A head that takes the first layer's weight without asking that layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return F.linear(self.middle(self.first(x)), self.first.weight)


def test_a_weight_that_is_used_outside_of_its_module():
    x = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="whole only in the forward of a module that has it"):
        TRAINERS["ZeRO-3"](Elsewhere(), F.mse_loss, sgd).step(x, x)
    whole = TRAINERS["ZeRO-3"](Elsewhere(), F.mse_loss, sgd, layers=(nn.GELU,))
    whole.step(x, x)  # without layers, everything is whole while the model runs
    assert whole.describe().bytes["gathered (peak)"] == [2 * 4 * 4 * 4]


class Thawed(nn.Sequential):
    """Its first layer is frozen, and so is its norm."""

    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.GELU(), nn.Linear(8, 4))
        self.double()[0].requires_grad_(False)


def thawed(mesh, options):
    torch.manual_seed(0)
    model, batch = Thawed(), (randn(0, 8, 4), randn(1, 8, 4))
    together = on_mesh(mesh)(model, F.mse_loss, sgd, **options)
    losses, errors = [together.step(*together.share(batch))], []
    for change in (together.model[1].train, together.model[0].weight.requires_grad_):
        change(True)
        errors.append(raised(together.step, *together.share(batch)))
        change(False)
    return [*losses, together.step(*together.share(batch))], errors


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp 2", {"zero_stage": 1}), ("pp 2", {"microbatches": 2})], ids=str
)
def test_what_was_frozen_stays_so(mesh, options):
    for losses, (norm, weight) in p101.launch(
        thawed, mesh, options, world_size=2, backend="sim"
    ).results:
        assert losses[1] < losses[0]
        assert "'1' is a BatchNorm1d, which looks at the whole batch" in norm
        assert "'0.weight' was frozen when the trainer was built" in weight
