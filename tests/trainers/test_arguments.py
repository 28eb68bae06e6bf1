"""What makes no sense is an error at once, with every trainer, on every rank alike, that says
what was given and what was expected.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import TRAINERS, sgd

X, Y = torch.ones(6, 4), torch.ones(6, 4)


def model():
    return MLP([4, 8, 4])


def loss(of):
    """A step with this loss function."""
    return lambda build: build(model(), of, sgd).step(X, Y)


def fit(*args, **options):
    return lambda build: build(model(), F.mse_loss, sgd).fit(*args, progress=False, **options)


def option(**options):
    return lambda build: build(model(), F.mse_loss, sgd, **options)


def optimizer(of):
    return lambda build: build(model(), F.mse_loss, of)


def wraps(of):
    return lambda build: build(of(), F.mse_loss, sgd)


def sharded(zero_stage):
    return lambda build: p101.ShardedTrainer(model(), F.mse_loss, sgd, zero_stage=zero_stage)


CASES = [  # what is done with a trainer, and what the error says
    (wraps(lambda: MLP), TypeError, "MLP'>: expected an nn.Module that has been built"),
    (wraps(lambda: None), TypeError, "model=None: expected an nn.Module"),
    (wraps(lambda: MLP([4, 4], device="meta")), ValueError, "is on the meta device and has no"),
    (wraps(lambda: nn.Sequential(nn.LazyLinear(4))), ValueError, r"'0\.weight' has no shape yet"),
    (wraps(lambda: model().requires_grad_(False)), ValueError, "nothing to train"),
    (loss("mse"), TypeError, r"loss_fn='mse': expected a function of \(outputs, targets\)"),
    (loss(None), ValueError, r"loss_fn is None, .*: expected step\(inputs\)"),
    (loss(lambda y, t: (F.mse_loss(y, t), -1.0)), ValueError, r"the weight -1\.0: expected"),
    (loss(lambda y, t: (F.mse_loss(y, t), 0)), ValueError, "the weights of the loss add up to 0"),
    (loss(nn.MSELoss), TypeError, r"expected a function .* nn\.MSELoss\(\)"),
    (
        loss(lambda y, t: (y - t).square().mean(1)),
        ValueError,
        r"of shape \(6,\): expected the mean",
    ),
    (loss(lambda y, t: F.mse_loss(y, t).item()), ValueError, r"0\.\d+: expected the mean"),
    (
        loss(lambda y, t: F.mse_loss(y, t).detach()),
        ValueError,
        "depend on any trained weight",
    ),
    (loss(lambda y, t: (y.argmax(1) == 1).sum()), ValueError, "made of whole numbers"),
    (optimizer(sgd(model().parameters())), TypeError, "is a SGD that is already built"),
    (optimizer(lambda p: torch.optim.SGD(p, lr=-1.0)), ValueError, "Invalid learning rate: -1.0"),
    (optimizer(torch.optim.LBFGS), ValueError, r"LBFGS\.step\(\) without arguments, .*'closure'"),
    (sharded(0), ValueError, "zero_stage=0: expected 1"),
    (sharded("3"), ValueError, "zero_stage='3'"),
    (option(stage=3), TypeError, "Trainer has no option 'stage': expected some of"),
    (option(accumulate=0), ValueError, "accumulate=0: expected"),
    (option(accumulate=True), ValueError, "accumulate=True: expected the number of microbatches"),
    (option(bucket_bytes=-1), ValueError, "bucket_bytes=-1: expected a number of bytes"),
    (option(clip_norm=0.0), ValueError, "clip_norm=0.0: expected"),
    (option(clip_norm="1"), ValueError, "clip_norm='1': expected the largest norm"),
    (option(clip_norm=float("nan")), ValueError, "clip_norm=nan"),
    (option(autocast=True), ValueError, "autocast=True: expected a floating-point dtype"),
    (option(autocast=torch.int8), ValueError, r"autocast=torch\.int8"),
    (
        fit((X, Y)),
        TypeError,
        r"a batch is a tensor of shape \(6, 4\): expected \(inputs, targets\)",
    ),
    (fit([{"x": X, "y": Y}]), TypeError, "a batch is a dict"),
    (fit([(X, Y, Y)]), TypeError, r"a batch is a tuple of a tensor .*, a tensor .*, a tensor"),
    (fit([([[1.0] * 4] * 6, Y)]), TypeError, "a batch is a list of list, .*: expected tensors"),
    (fit([({"x": X, "m": X[:5]}, Y)]), ValueError, r"\(6, 4\), \(5, 4\): expected the same number"),
    (fit([({"x": X, "flags": 3}, Y)]), TypeError, "a batch is a dict of 'x', 'flags'"),
    (fit([(X, torch.tensor(1.0))]), TypeError, r"a tensor of shape \(\): expected"),
    (fit([(X, Y[:5])]), ValueError, "inputs have 6 samples along dim 0 and targets 5"),
    (fit(lambda step: None, until=3), TypeError, "a batch is None"),
    (fit(None), TypeError, "batches=None: expected batches"),
    (fit(lambda step: (X, Y)), ValueError, "would never end: pass until="),
    (
        fit(lambda step: (X, Y), until=-1),
        ValueError,
        "until=-1: expected the total number of steps",
    ),
    (fit(lambda step: (X, Y), until="3"), ValueError, "until='3'"),
    (fit([(X, Y)], save_every=5), ValueError, "save_to=None: expected a file, for save_every"),
    (fit([(X, Y)], save_every=0.5, save_to="run.pt"), ValueError, r"save_every=0\.5"),
    (fit([(X, Y)], save_to="no such folder/run.pt"), OSError, "there is no folder no such folder"),
    (fit([(X, Y)], save_to="."), OSError, r"\. is a folder: expected the name of a file"),
    (fit([(X, Y)], on_step=3), TypeError, "on_step=3: expected a function of a step"),
    (
        lambda build: torch.no_grad()(build(model(), F.mse_loss, sgd).step)(X, Y),
        ValueError,
        r"torch\.no_grad\(\)",
    ),
]


def said(names):
    """Of these trainers and every case."""
    errors = []
    for call, _, _ in CASES:
        for name in names:
            try:
                call(TRAINERS[name])
            except Exception as error:
                errors.append((type(error).__mro__, str(error)))
            else:
                errors.append(((), "nothing"))
    return errors


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, ["overlapped"]), (2, ["overlapped", "ZeRO-2", "ZeRO-3"])],
    ids=["1", "2"],
)
def test_what_makes_no_sense_is_an_error_on_every_rank(world_size, names):
    expected = [case for case in CASES for _ in names]
    for errors in p101.launch(said, names, world_size=world_size, backend="sim").results:
        for (kinds, message), (_, kind, pattern) in zip(errors, expected, strict=True):
            assert kind in kinds, message
            assert re.search(pattern, message), message


def on_gpus_only():
    """A group that says of itself what NCCL's does."""
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    return [raised(build) for build in TRAINERS.values()]


def raised(build):
    with pytest.raises(
        ValueError, match=r"model\) is on cpu, but the group .* sends from cuda only: move it there"
    ) as error:
        build(model(), F.mse_loss, sgd)
    return str(error.value)


def test_a_model_that_the_group_has_no_messages_for():
    first, second = p101.launch(on_gpus_only, world_size=2).results
    assert first == second


def twice():
    kept = model()
    first = TRAINERS["ZeRO-3"](kept, F.mse_loss, sgd)
    for build in TRAINERS.values():
        for other in (kept, nn.Sequential(kept.layers[0])):
            with pytest.raises(ValueError, match="already cut up by another trainer"):
                build(other, F.mse_loss, sgd)
    again = model()
    again.load_state_dict(first.state_dict())
    return first.step(X, Y) == TRAINERS["naive"](again, F.mse_loss, sgd).step(X, Y)


def test_a_model_whose_weights_a_trainer_has_cut_up():
    assert p101.launch(twice, world_size=2, backend="sim").results == [True] * 2


@pytest.mark.parametrize("name", ["overlapped", "ZeRO-2", "ZeRO-3"])
def test_gradients_are_copies(name):
    trainer = TRAINERS[name](model(), F.mse_loss, sgd)
    trainer.step(X, Y)
    first = trainer.gradients()
    kept = {key: gradient.clone() for key, gradient in first.items()}
    trainer.step(X, -Y)
    assert all(torch.equal(first[key], kept[key]) for key in kept)
    assert not any(
        torch.equal(gradient, kept[key]) for key, gradient in trainer.gradients().items()
    )


def test_a_batch_may_be_a_list_or_one_tensor_of_two():
    trainer = TRAINERS["naive"](model(), F.mse_loss, sgd)
    for batch in ([X, Y], torch.stack([X, Y])):
        assert [torch.equal(a, b) for a, b in zip(trainer.share(batch), (X, Y))] == [True, True]
