"""An error in a step is one on every rank, which names its rank, and no weight is changed: losses
that aren't finite, models that differ or raise, and what belongs to the trainer.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import DATA, TRAINERS, differing, on_mesh, on_ranks, raised, randn, sgd

X, Y = torch.ones(8, 4), torch.ones(8, 4)


def mlp():
    return MLP([4, 4, 4, 4], dtype=torch.float64)


# ── when a trainer is built ──


def changed(where):
    """A model that differs on rank 1 in what `where` names."""
    model = nn.Sequential(MLP([3, 4, 2]), nn.BatchNorm1d(2).eval())
    if dist.get_rank() == 1 and where:
        model.state_dict()[where].view(-1)[-1] += 1
    return model


def models_that_differ():
    rank = dist.get_rank()

    def build(model, **options):
        return p101.DataParallelTrainer(model, F.mse_loss, sgd, **options)

    names = ("", "0.layers.1.weight", "0.layers.0.bias", "1.running_mean")
    errors = {where: raised(build, changed(where)) for where in names}
    errors["width"] = raised(build, MLP([3, 4 + (rank == 2), 2]))
    errors["depth"] = raised(build, MLP([3, 4, 2] if rank else [3, 4, 2, 2]))
    of_rank = MLP([3, 4, 2], dtype=torch.float64 if rank == 1 else None)
    errors["dtype"] = raised(build, of_rank, sync=True)
    torch.manual_seed(rank)
    model = nn.Linear(3, 3)
    errors["unseeded"] = raised(build, model)
    return errors, build(model, sync=True).state_dict()["weight"].tolist()


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
    first, *others = on_ranks(3, models_that_differ)
    assert others == [first] * 2, "every rank is told the same"
    errors, weight = first
    for name, pattern in DIFFERENT.items():
        assert re.search(pattern, errors[name], re.DOTALL), errors[name]
    torch.manual_seed(0)
    assert weight == nn.Linear(3, 3).weight.tolist(), "with sync=True all have rank 0's weights"


def on_gpus_only():
    """A group that says of itself what NCCL's does."""
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    return [raised(build, mlp(), F.mse_loss, sgd) for build in TRAINERS.values()]


def test_a_model_that_the_group_has_no_messages_for():
    first, second = p101.launch(on_gpus_only, world_size=2).results
    assert first == second
    for said in first:
        assert re.search(r"is on cpu, but the group .* sends from cuda only: move it there", said)


# ── in a step: a batch or a loss of one rank ──

LAYOUTS = {  # on 4 ranks: options, and the ranks whose loss isn't finite
    "dp 4": ({}, "3"),
    "dp 4, pp 1": ({"zero_stage": 2}, "3"),
    "dp 4, tp 1": ({"zero_stage": 3, "accumulate": 2}, "3"),
    "dp 2, pp 2": ({"microbatches": 2, "zero_stage": 3}, "3"),
    "tp 2, pp 2": ({"schedule": "zb-h1", "microbatches": 2}, "1, nan on rank 3"),
}


def steps_that_fail(meshes):
    x, found = randn(0, 8, 4), {}
    for mesh in meshes:
        together = on_mesh(mesh)(mlp(), F.mse_loss, sgd, **LAYOUTS[mesh][0])
        share = together.share((x, x))
        together.step(*share)
        before = together.state_dict()
        targets = x.clone()
        targets[-1] = math.nan
        errors = [raised(together.step, *together.share((x, targets)))]
        if dist.get_rank() == 1:
            share = share[0], None
        errors.append(raised(together.step, *share))
        assert differing(together.state_dict(), before, 0) == []
        found[mesh] = errors, together.step(*together.share((x, x)))
    return found


@pytest.mark.parametrize(
    ("backend", "meshes"),
    [("sim", list(LAYOUTS)), ("gloo", ["dp 4", "dp 4, pp 1"])],
    ids=["sim", "gloo"],
)
def test_an_error_on_one_rank_is_one_on_all_and_changes_no_weight(backend, meshes):
    alone = TRAINERS["naive"](mlp(), F.mse_loss, sgd)
    _, expected = (alone.step(randn(0, 8, 4), randn(0, 8, 4)) for _ in range(2))
    results = p101.launch(steps_that_fail, meshes, world_size=4, backend=backend).results
    for rank, of_rank in enumerate(results):
        for mesh, ((not_finite, batch), after) in of_rank.items():
            ranks = LAYOUTS[mesh][1]
            assert not_finite.startswith(
                f"FloatingPointError: step 1: the loss is nan on rank {ranks}; no weight"
            )
            said = "a batch is None" if rank == 1 else "rank 1 could not take its batch in step 1"
            assert said in batch
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
    **{f"dp 3 {name}": ("dp 3", DATA[name]) for name in ("overlapped", "ZeRO-1", "ZeRO-3")},
    "pp 3": ("pp 3", {"microbatches": 4}),
    "tp 3": ("tp 3", {"plan": {"*.linear": "column_gather"}}),
    "norms": ("dp 3", {"sync_batch_norm": True}),
}


def nobody_catches_it(name, direction):
    norm = nn.BatchNorm1d(4) if name == "norms" else nn.Identity()
    model = nn.Sequential(*(Raises(direction) for _ in range(3)), norm.double())
    mesh, options = BUILDS[name]
    together, x = on_mesh(mesh)(model, F.mse_loss, sgd, **options), randn(0, 6, 4)
    for _ in range(2):
        together.step(*together.share((x, x)))


@pytest.mark.parametrize(
    ("name", "direction", "backend"),
    [
        *((name, ("forward", "backward")[i % 2], "sim") for i, name in enumerate(BUILDS)),
        ("dp 3 ZeRO-3", "backward", "gloo"),
        ("pp 3", "forward", "gloo"),
        ("norms", "forward", "sim"),
    ],
)
def test_the_launch_ends_and_names_the_rank_whose_model_raised(name, direction, backend):
    with pytest.raises(p101.RankFailed, match="no such row") as failed:
        p101.launch(nobody_catches_it, name, direction, world_size=3, backend=backend)
    assert failed.value.rank == 1
    assert isinstance(failed.value.__cause__, IndexError)


def a_tuple_between_stages():
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    on_mesh("pp 2")(model, F.mse_loss, sgd, microbatches=2).step(X, Y)


def test_what_is_no_tensor_cannot_go_to_the_next_stage():
    with pytest.raises(p101.RankFailed, match="stage 0 returned a tuple: expected one tensor"):
        p101.launch(a_tuple_between_stages, world_size=2, backend="sim")


# ── what belongs to the trainer, and what may not change ──


class Elsewhere(nn.Module):
    """A head that takes the first layer's weight without asking that layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return F.linear(self.middle(self.first(x)), self.first.weight)


def test_a_weight_that_is_used_outside_of_its_module():
    said = raised(TRAINERS["ZeRO-3"](Elsewhere(), F.mse_loss, sgd).step, X, Y)
    assert "whole only in the forward of a module that has it" in said


def thawed(mesh, options):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.GELU(), nn.Linear(8, 4)
    model = nn.Sequential(*layers).double()
    model[0].requires_grad_(False)
    together = on_mesh(mesh)(model, F.mse_loss, sgd, **options)
    share = together.share((randn(0, 8, 4), randn(1, 8, 4)))
    losses, errors = [together.step(*share)], []
    for change in (together.model[1].train, together.model[0].weight.requires_grad_):
        change(True)
        errors.append(raised(together.step, *share))
        change(False)
    return [*losses, together.step(*share)], errors


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp 2", {"zero_stage": 1}), ("pp 2", {"microbatches": 2})], ids=str
)
def test_what_was_frozen_stays_so(mesh, options):
    for losses, (norm, weight) in on_ranks(2, thawed, mesh, options):
        assert losses[1] < losses[0]
        assert "'1' is a BatchNorm1d, which looks at the whole batch" in norm
        assert "'0.weight' was frozen when the trainer was built" in weight


CUT = {"tp 2": {}, "pp 2": {}, "dp 2": {"zero_stage": 3}, "dp 2, pp 1": {}}  # the last is whole


def state_and_copies():
    said = {}
    for mesh, options in CUT.items():
        trainer = on_mesh(mesh)(mlp(), F.mse_loss, sgd, **options)
        mlp().load_state_dict(trainer.state_dict())
        average = torch.optim.swa_utils.AveragedModel
        again = raised(on_mesh("dp 2"), trainer.model, F.mse_loss, sgd)
        said[mesh] = again, raised(trainer.model.state_dict), raised(average, trainer.model)
    return said


def test_a_model_that_is_cut_has_no_state_of_its_own_and_no_second_trainer():
    for said in on_ranks(2, state_and_copies):
        for mesh, (again, *errors) in said.items():
            cut = mesh != "dp 2, pp 1"
            assert ("already cut up by another trainer" in again) == cut
            assert all(("expected trainer.state_dict()" in error) == cut for error in errors)


@pytest.mark.parametrize("name", ["overlapped", "ZeRO-2", "ZeRO-3"])
def test_gradients_are_copies(name):
    trainer = TRAINERS[name](mlp(), F.mse_loss, sgd)
    x = randn(0, 8, 4)
    trainer.step(x, x)
    first = trainer.gradients()
    kept = {key: gradient.clone() for key, gradient in first.items()}
    trainer.step(x, -x)
    assert all(torch.equal(first[key], kept[key]) for key in kept)
    assert not any(torch.equal(g, kept[key]) for key, g in trainer.gradients().items())


class Twice(nn.Module):
    """Layer a runs twice, each time computed again in backward: its gradients are complete twice
    over. Layer c does not run.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in "abc")

    def forward(self, x):
        for layer in (self.a, self.b, self.a):
            x = checkpoint(
                lambda x, layer=layer: torch.tanh(layer(x)), x.requires_grad_(), use_reentrant=True
            )
        return x


def twice():
    said = {}
    for name, build in TRAINERS.items():
        torch.manual_seed(0)
        trainer = build(Twice(), F.mse_loss, sgd)
        said[name] = what = raised(trainer.step, randn(0, 8, 4), randn(1, 8, 4))
        if what == "nothing":
            said[name] = trainer.gradients()
    return said


def test_a_gradient_that_is_completed_twice_is_right_or_an_error():
    torch.manual_seed(0)
    model = Twice()
    F.mse_loss(model(randn(0, 8, 4)), randn(1, 8, 4)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for said in on_ranks(2, twice):
        for name, what in said.items():
            if name in ("overlapped", "ZeRO-1", "ZeRO-2"):
                assert re.search("'a.*completed twice in one backward.*overlap=False", what)
            else:
                assert differing(what, expected, 1e-10) == [], name
