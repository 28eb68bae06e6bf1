"""A run goes on where it was saved, by whatever trainer on however many ranks: the curve is the
one of a single run.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101 import DataParallelTrainer, ShardedTrainer
from parallel101.models.mlp import MLP
from tests.trainers.cases import TASKS, differing

TASK = TASKS["tied gpt"]
STEPS = 9


def groups(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.3}], lr=1e-2
    )


def trainer_of(zero_stage):
    if zero_stage is None:
        return DataParallelTrainer(TASK.build(), TASK.loss_fn, groups)
    return ShardedTrainer(TASK.build(), TASK.loss_fn, groups, zero_stage=zero_stage)


def go_on(zero_stage, path, until):
    trainer = trainer_of(zero_stage)
    if path.exists():
        trainer.resume(path)
        # an option that only the checkpoint can tell the next
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
    history = trainer.fit(TASK.batch, until=until, save_to=path, progress=False)
    return history.losses, trainer.state_dict()


LAYOUTS = [(3, 2), (1, 3), (None, 2), (2, 4), (3, 1), (3, 3), (None, None)]  # (zero_stage, ranks)


def test_any_trainer_goes_on_with_the_same_curve(tmp_path):
    """A chain of trainers, each of which takes over what the one before has saved; beside it
    one process that does all steps alone.
    """
    for i, (zero_stage, ranks) in enumerate(LAYOUTS):
        chain, alone = tmp_path / "chain.pt", tmp_path / "alone.pt"
        results = (
            [go_on(zero_stage, chain, i + 1)]
            if ranks is None
            else p101.launch(go_on, zero_stage, chain, i + 1, world_size=ranks).results
        )
        losses, weights = go_on(None, alone, i + 1)
        for other_losses, other_weights in results:
            assert other_losses == pytest.approx(losses, rel=1e-10)
            assert differing(other_weights, weights, 1e-10) == []
    saved, expected = (torch.load(path)["optimizer"] for path in (chain, alone))
    assert saved["groups"] == expected["groups"]
    for name, state in expected["state"].items():
        assert differing(saved["state"][name], state, 1e-10) == []


def wrong_checkpoints(path):
    trainer = trainer_of(3)
    trainer.step(*trainer.share(TASK.batch(0)))
    content = torch.load(path)
    content["optimizer"]["groups"] = []
    torch.save(content, f"{path}.{trainer.position}")
    with pytest.raises(ValueError, match=r"knows no optimizer state of 'embedding\.token\.weight'"):
        trainer.resume(f"{path}.{trainer.position}")
    content["model"].pop("norm.bias")
    torch.save(content, f"{path}.{trainer.position}")
    with pytest.raises(ValueError, match=r"has no 'norm\.bias'"):
        trainer.resume(f"{path}.{trainer.position}")


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path):
    path = tmp_path / "run.pt"
    go_on(None, path, 1)
    p101.launch(wrong_checkpoints, path, world_size=2)


def smaller_than_the_ranks(path):
    """Two weights on three ranks: the last has nothing to update, and takes part all the same."""

    def trainer():
        return ShardedTrainer(
            MLP([1, 1]),
            F.mse_loss,
            lambda p: torch.optim.AdamW(p, lr=0.1),
            zero_stage=3,
            clip_norm=0.5,
        )

    batch = torch.ones(3, 1), torch.zeros(3, 1)
    first, second = trainer(), trainer()
    first.fit([batch] * 2, save_to=path, progress=False)
    second.resume(path)
    return [
        first.step(*first.share(batch)),
        second.step(*second.share(batch)),
    ], first.describe().bytes["optimizer state"]


def test_a_rank_without_weights_saves_and_goes_on(tmp_path):
    for (alone, resumed), state in p101.launch(
        smaller_than_the_ranks, tmp_path / "run.pt", world_size=3
    ).results:
        assert alone == resumed
        assert state[0] == state[1] > state[2] == 0
