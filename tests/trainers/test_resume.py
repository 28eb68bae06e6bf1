"""A run goes on where it was saved, by whatever trainer on whatever mesh: its losses are those of
one process that was never interrupted. A resume that can't be is an error on every rank and
changes nothing.
"""

from __future__ import annotations

import os
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    OPTIMIZERS,
    TASKS,
    TRAINERS,
    Task,
    adamw_by_shape,
    differing,
    gpt,
    on_mesh,
    on_ranks,
    rows,
    seeded,
    text,
    world_size,
)

# ── from one trainer to the next ──


class Affine(nn.Module):
    """A weight that is not trained, a buffer that a checkpoint has, and one that it lacks."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.9), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("ones", torch.ones(width), persistent=False)

    def forward(self, x):
        return x * self.scale + self.shift * self.ones


def partly_frozen():
    """Two stages are cut between layers 3 and 4, a column and a row layer; the bias of 3 is not
    trained, and is cut along tp.
    """
    first = nn.Linear(4, 8), Affine(8), nn.GELU(), nn.Linear(8, 6)
    model = seeded(nn.Sequential(*first, nn.Linear(6, 8), Affine(8), nn.Linear(8, 3)))
    model[3].bias.requires_grad_(False)
    return model


def without_balance(outputs, targets):
    """A balancing loss would count the positions of one rank alone along cp."""
    return next_token_loss(outputs[0], targets)


CHAIN = [  # each takes over what the one before has saved; None is one process
    ("dp 4", {}),
    ("tp 2, pp 2", {"microbatches": 3}),
    ("dp 3", {"zero_stage": 1}),
    ("dp 2, pp 2", {"microbatches": 2, "zero_stage": 3, "schedule": "zb-h1"}),
    (None, {}),
    ("pp 2, tp 2, dp 2", {"microbatches": 2, "zero_stage": 2}),
    ("pp 2", {"microbatches": 4, "schedule": "interleaved", "chunks": 2}),
    ("dp 4", {"zero_stage": 3}),
    (None, {}),
]
CHAIN_OF_EXPERTS = [
    ("dp 2, ep 2", {"zero_stage": 3}),
    ("ep 3", {}),
    ("cp 2, pp 2", {"microbatches": 3, "zero_stage": 1}),
    (None, {}),
    ("pp 2, ep 2, cp 2", {"microbatches": 2, "zero_stage": 2}),
    ("dp 2", {"zero_stage": 1}),
    ("ep 4", {}),
]
RUNS = {
    "tied gpt": (TASKS["tied gpt"], "auto", CHAIN),
    "partly frozen": (
        Task(partly_frozen, F.mse_loss, rows(4, 3)),
        {"3": "column", "4": "row"},
        CHAIN,
    ),
    "experts": (
        Task(partial(gpt, experts=5), without_balance, text),
        "auto",
        CHAIN_OF_EXPERTS,
    ),
}


def go_on(name, mesh, options, path, until):
    task, plan, _ = RUNS[name]
    if "tp" in (mesh or ""):
        options = {**options, "plan": plan}
    build = TRAINERS["naive"] if mesh is None else on_mesh(mesh)
    trainer = build(task.build(), task.loss_fn, adamw_by_shape, **options)
    if path.exists():
        trainer.resume(path)
        # an option that only the checkpoint can tell the next
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
    history = trainer.fit(task.batch, until=until, save_to=path, progress=False)
    return history.losses, trainer.state_dict()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_moves_between_meshes_has_the_losses_of_one_process(name, tmp_path):
    chain, alone = tmp_path / "chain.pt", tmp_path / "alone.pt"
    for i, (mesh, options) in enumerate(RUNS[name][2]):
        here = name, mesh, options, chain, i + 1
        n = world_size(mesh or "dp 1")
        results = on_ranks(n, go_on, *here)
        losses, weights = go_on(name, None, {}, alone, i + 1)
        for other_losses, other_weights in results:
            assert other_losses == pytest.approx(losses, rel=1e-10), (mesh, options)
            assert differing(other_weights, weights, 1e-10) == [], (mesh, options)
    saved, expected = torch.load(chain)["optimizer"], torch.load(alone)["optimizer"]
    assert saved["groups"] == expected["groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert differing(saved["state"][key], state, 1e-10) == []


def empty_group(parameters):
    groups = [{"params": list(parameters)}, {"params": [], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=1e-2)


def saved_and_resumed(place):
    """Two weights on three ranks: with ZeRO the last has nothing to update, and takes part all
    the same. A group has no parameters.
    """
    batch = torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    for name, build in TRAINERS.items():
        first, second = (
            build(MLP([1, 1], dtype=torch.float64), F.mse_loss, empty_group, clip_norm=0.5)
            for _ in range(2)
        )
        first.fit([batch] * 2, save_to=place / name, progress=False)
        assert second.resume(place / name) == 2
        assert second.optimizer.param_groups[1]["lr"] == 0.5
        assert first.step(*first.share(batch)) == second.step(*second.share(batch))
    return first.describe().bytes["optimizer state"]


def test_a_group_without_parameters_and_a_rank_without_weights(tmp_path):
    for state in on_ranks(3, saved_and_resumed, tmp_path):
        assert state[0] == state[1] > state[2] == 0


# ── what can't be resumed ──

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def build(kind="naive", optimizer=OPTIMIZERS["adamw"], model=None):
    model = MLP([4, 5, 4], dtype=torch.float64) if model is None else model
    return TRAINERS[kind](model, F.mse_loss, optimizer)


def steps(trainer, count):
    trainer.fit([(X, X.sin())] * count, progress=False)
    return trainer


def content_of(trainer, path):
    """All that a checkpoint of it tells."""
    trainer.save(path)
    p101.barrier()
    return torch.load(path)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def mlp(*widths, frozen=False, buffer=False):
    model = MLP([4, *widths], dtype=torch.float64)
    model.layers[0].bias.requires_grad_(not frozen)
    if buffer:
        model.register_buffer("scale", torch.ones(1))
    return build(model=model)


OTHERS = {  # what was saved, and why it is not for the trainer that `build()` gives
    "wider": (lambda: mlp(6, 4), r"'layers\.0\.weight' has shape \(6, 4\) there and \(5, 4\) here"),
    "deeper": (lambda: mlp(5, 4, 4), r"'layers\.2\.weight' has shape \(4, 4\) there and none here"),
    "shallower": (lambda: mlp(5), r"'layers\.1\.weight' has shape none there"),
    "a buffer more": (lambda: mlp(5, 4, buffer=True), r"'scale' has shape \(1,\) there and none"),
    "frozen there": (
        lambda: mlp(5, 4, frozen=True),
        r"AdamW with the groups \[.*, but this .* with the groups \[.*: expected",
    ),
    "sgd": (
        lambda: build(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        "the state of SGD .* this trainer's optimizer is AdamW",
    ),
    "other groups": (
        lambda: build(optimizer=adamw_by_shape),
        r"AdamW with the groups \[.*'layers\.0\.weight'.*: expected the same",
    ),
}


@pytest.fixture
def files(tmp_path):
    """Checkpoints of others, files that are none, and no file; with what is said of each."""
    found = []
    for name, (other, message) in OTHERS.items():
        other().save(tmp_path / name)
        found.append((tmp_path / name, message))
    steps(build(), 1).save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    contents = [whole[:cut] for cut in (0, len(whole) // 3, len(whole) - 1)] + [b"something else"]
    for i, content in enumerate(contents):
        (tmp_path / f"not whole {i}").write_bytes(content)
    torch.save({"format": "another"}, tmp_path / f"not whole {len(contents)}")
    for i in range(len(contents) + 1):
        message = r"is not a checkpoint that Trainer\.save wrote"
        found.append((tmp_path / f"not whole {i}", message))
    return [*found, (tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")]


def refused(files, place):
    """Each of these files, tried by a trainer that has taken two steps and then takes a third."""
    for kind in ("naive", "ZeRO-1", "ZeRO-3"):
        trainer, untouched = steps(build(kind), 2), steps(build(kind), 2)
        before = content_of(trainer, place / "now.pt")
        for path, message in files:
            with pytest.raises((ValueError, OSError), match=message):
                trainer.resume(path)
        assert same(content_of(trainer, place / "now.pt"), before)
        assert steps(trainer, 1).history.losses == steps(untouched, 1).history.losses


def test_a_resume_that_fails_changes_nothing(files, tmp_path):
    refused(files, tmp_path)
    p101.launch(refused, files, tmp_path, world_size=2, backend="sim")


DIFFERENT = {  # what rank 1 reads, and what rank 0 is told
    "nowhere": "rank 1 could not resume from .*good: FileNotFoundError",
    "cut": "rank 1 could not resume from .*good: ValueError: .*cut is not a checkpoint",
    "later": r"different contents from .*good: 'layers\.0\.weight' on rank 1 differs from rank 0",
    "earlier": "different contents from .*good: 'steps' on rank 1 differs from rank 0",
}


def on_disks_of_their_own(place):
    said = []
    for kind in ("naive", "ZeRO-3"):
        trainer = steps(build(kind), 2)
        for second in DIFFERENT:
            before = content_of(trainer, place / "now")
            with pytest.raises((ValueError, OSError)) as error:
                trainer.resume(place / ("good" if trainer.position == 0 else second))
            assert same(content_of(trainer, place / "now"), before)
            said.append((isinstance(error.value, OSError), str(error.value)))
    return said


def test_ranks_that_do_not_read_the_same_are_told_so(tmp_path):
    steps(build(), 1).save(tmp_path / "good")
    steps(build(), 2).save(tmp_path / "later")
    torch.save({**torch.load(tmp_path / "good"), "steps": 0}, tmp_path / "earlier")
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:999])
    first, second = on_ranks(2, on_disks_of_their_own, tmp_path)
    for (name, words), (missing, message), (also, _) in zip(
        [*DIFFERENT.items()] * 2, first, second
    ):
        assert missing == also == (name == "nowhere")
        assert re.search(words, message)


# ── a save ──


def raises(error):
    def call(*args):
        raise error

    return call


def test_a_write_that_fails_leaves_the_last_save(tmp_path, monkeypatch):
    trainer = steps(build(), 1)
    trainer.save(tmp_path / "run.pt")
    for module, name, error in (
        (os, "fsync", OSError("no space left")),
        (os, "replace", PermissionError("not now")),
        (torch, "save", RuntimeError("unexpected pos 64 vs 0")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, raises(error))
            with pytest.raises(OSError, match=str(error)):
                steps(trainer, 1).save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
    assert torch.load(tmp_path / "run.pt")["steps"] == 1


def killed_in(name, path):
    trainer = build()
    setattr(os, name, lambda *args: os._exit(9))
    steps(trainer, 1).save(path)


def test_a_save_that_is_killed_leaves_the_last_one(tmp_path):
    """While it writes, and when all is written but not yet in its place."""
    path = tmp_path / "run.pt"
    steps(build(), 3).save(path)
    for name in ("fsync", "replace"):
        with pytest.raises(p101.RankFailed) as failed:
            p101.launch(killed_in, name, path, world_size=1)
        assert failed.value.exitcode == 9
        assert torch.load(path)["steps"] == 3
    steps(build(), 1).save(path)
    assert os.listdir(tmp_path) == ["run.pt"], "and nothing lies about"


def where_nobody_can_write(path):
    with pytest.raises(OSError, match="there is no folder") as error:
        build().save(path)
    return str(error.value)


def test_a_save_that_fails_is_an_error_on_every_rank(tmp_path):
    path = tmp_path / "no folder" / "run.pt"
    first, second = on_ranks(2, where_nobody_can_write, path)
    assert "rank 0 could not save to" in second and first in second
