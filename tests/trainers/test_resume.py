"""A resume that can't be is an error on every rank, and changes nothing: weights, optimizer
state, steps and history are what they were.
"""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parallel101 as p101
from parallel101 import DataParallelTrainer, ShardedTrainer
from parallel101.models.mlp import MLP
from parallel101.trainers.support.checkpoint import read_checkpoint, write_checkpoint
from tests.trainers.cases import adamw_by_shape

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(zero_stage=None, optimizer=adamw, model=None):
    model = MLP([4, 5, 4], dtype=torch.float64) if model is None else model
    return (
        DataParallelTrainer(model, F.mse_loss, optimizer)
        if zero_stage is None
        else ShardedTrainer(model, F.mse_loss, optimizer, zero_stage=zero_stage)
    )


def steps(trainer, count):
    trainer.fit([(X, X.sin())] * count, progress=False)
    return trainer


def content_of(trainer, path):
    """All that a checkpoint of it tells."""
    trainer.save(path)
    p101.barrier()
    return read_checkpoint(path)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def frozen_bias():
    model = MLP([4, 5, 4], dtype=torch.float64)
    model.layers[0].bias.requires_grad_(False)
    return model


class WithBuffer(MLP):
    def __init__(self):
        super().__init__([4, 5, 4], dtype=torch.float64)
        self.register_buffer("scale", torch.ones(1))


OTHERS = {  # what was saved, and why it is not for the trainer that `build()` gives
    "wider": (
        lambda: build(model=MLP([4, 6, 4], dtype=torch.float64)),
        r"'layers\.0\.weight' is \(6, 4\) there and \(5, 4\) here",
    ),
    "deeper": (
        lambda: build(model=MLP([4, 5, 4, 4], dtype=torch.float64)),
        r"it has 'layers\.2\.weight', which this model lacks",
    ),
    "shallower": (
        lambda: build(model=MLP([4, 5], dtype=torch.float64)),
        r"it has no 'layers\.1\.weight'",
    ),
    "a buffer more": (lambda: build(model=WithBuffer()), "it has 'scale', which this model lacks"),
    "frozen there": (
        lambda: build(model=frozen_bias()),
        r"knows no optimizer state of 'layers\.0\.bias'",
    ),
    "sgd": (
        lambda: build(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        "has the state of SGD, and this trainer's optimizer is AdamW",
    ),
    "other groups": (
        lambda: build(optimizer=adamw_by_shape),
        r"'layers\.0\.weight' and 'layers\.0\.bias' are together in group 0 .* different options",
    ),
}


def refused(zero_stage, files, place):
    """Every one of these files, tried by a trainer that has taken two steps and then takes a
    third.
    """
    trainer, untouched = steps(build(zero_stage), 2), steps(build(zero_stage), 2)
    before = content_of(trainer, place / f"{zero_stage}.pt")
    for path, message in files:
        with pytest.raises((ValueError, OSError), match=message):
            trainer.resume(path)
    assert same(content_of(trainer, place / f"{zero_stage}.pt"), before)
    assert steps(trainer, 1).history.losses == steps(untouched, 1).history.losses


def all_refused(files, place):
    for zero_stage in (None, 1, 2, 3):
        refused(zero_stage, files, place)


@pytest.fixture
def files(tmp_path):
    """Checkpoints of others, one that was cut off anywhere, and none at all; with what is said
    of each.
    """
    paths = []
    for name, (other, message) in OTHERS.items():
        other().save(tmp_path / name)
        paths.append((tmp_path / name, message))
    steps(build(), 1).save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for cut in [*range(0, len(whole), len(whole) // 12), len(whole) - 1]:
        (tmp_path / f"cut at {cut}").write_bytes(whole[:cut])
        paths.append((tmp_path / f"cut at {cut}", r"is not a checkpoint that Trainer\.save wrote"))
    return [*paths, (tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")]


def test_a_resume_that_fails_changes_nothing(files, tmp_path):
    all_refused(files, tmp_path)
    p101.launch(all_refused, files, tmp_path, world_size=2)


def on_disks_of_their_own(place, second):
    """Rank 0 has a good checkpoint, and rank 1 something else."""
    said = []
    for zero_stage in (None, 1, 3):
        trainer = steps(build(zero_stage), 2)
        before = content_of(trainer, place / "now")
        with pytest.raises((ValueError, OSError)) as error:
            trainer.resume(place / ("good" if trainer.position == 0 else second))
        assert same(content_of(trainer, place / "now"), before)
        said.append((isinstance(error.value, OSError), str(error.value)))
    return said


def test_ranks_that_do_not_read_the_same_are_told_so(tmp_path):
    steps(build(), 1).save(tmp_path / "good")
    steps(build(), 2).save(tmp_path / "later")
    content = read_checkpoint(tmp_path / "good")
    write_checkpoint(tmp_path / "earlier", {**content, "steps": 0})
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:999])
    for second, first_hears, missing in (
        ("nowhere", "rank 1 could not resume from .*good: FileNotFoundError", True),
        (
            "cut",
            "rank 1 could not resume from .*good: ValueError: .*cut is not a checkpoint",
            False,
        ),
        (
            "later",
            (
                r"the ranks read different contents from .*good: 'layers\.0\.weight' on rank 1 "
                r"differs from rank 0"
            ),
            False,
        ),
        (
            "earlier",
            "read different contents from .*good: 'steps' on rank 1 differs from rank 0",
            False,
        ),
    ):
        first, other = p101.launch(on_disks_of_their_own, tmp_path, second, world_size=2).results
        for (is_os_error, message), (other_is_os_error, _) in zip(first, other):
            assert is_os_error == other_is_os_error == missing
            assert re.search(first_hears, message)


def empty_group(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters}, {"params": [], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=1e-2)


def saved_and_resumed(zero_stage, path):
    trainer = steps(build(zero_stage, empty_group), 1)
    trainer.save(path)
    again = build(zero_stage, empty_group)
    p101.barrier()
    assert again.resume(path) == 1
    assert again.optimizer.param_groups[1]["lr"] == 0.5
    return steps(trainer, 2).history.losses == steps(again, 2).history.losses


def test_a_group_without_parameters(tmp_path):
    for zero_stage in (None, 1, 2, 3):
        assert saved_and_resumed(zero_stage, tmp_path / "alone.pt")
        assert (
            p101.launch(saved_and_resumed, zero_stage, tmp_path / "two.pt", world_size=2).results
            == [True] * 2
        )


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    trainer = steps(build(), 1)
    trainer.save(tmp_path / "run.pt")
    for name, error in (
        ("fsync", OSError("no space left")),
        ("replace", PermissionError("not now")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *args, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(OSError, match=str(error)):
                steps(trainer, 1).save(tmp_path / "run.pt")
    with monkeypatch.context() as patched:
        patched.setattr(
            torch,
            "save",
            lambda *args: (_ for _ in ()).throw(RuntimeError("unexpected pos 64 vs 0")),
        )
        with pytest.raises(OSError, match="could not be written: unexpected pos"):
            trainer.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
    assert read_checkpoint(tmp_path / "run.pt")["steps"] == 1
