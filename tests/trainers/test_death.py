"""A rank dies in the middle of a step or of a save: the run ends with its name, and the last save
that was complete continues the curve.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import OPTIMIZERS, TRAINERS, randn

STEPS, DIES_IN = 5, 3  # it saves after every second step


def run(kind, start=None, death=None, save_to=None):
    model = MLP([4, 8, 8, 4], dtype=torch.float64)
    build = TRAINERS.get(kind, p101.PipelineTrainer)
    trainer = build(model, F.mse_loss, OPTIMIZERS["adamw"], clip_norm=0.5)
    if start is not None:
        trainer.resume(start)
    collect = trainer.sharded_optimizer.state

    def die(place):
        if death == place and trainer.steps >= DIES_IN and dist.get_rank() == 1:
            os._exit(7)

    for layer in model.layers[1:]:
        layer.register_full_backward_hook(lambda *_: die("backward"))
    trainer.sharded_optimizer.state = lambda: die("save") or collect()
    saving = {} if save_to is None else {"save_to": save_to, "save_every": 2}
    return trainer.fit(
        lambda step: (randn(step, 10, 4), randn(step, 10, 4).sin()),
        until=STEPS,
        progress=False,
        **saving,
    ).losses


@pytest.mark.parametrize(("kind", "place"), [("ZeRO-3", "save"), ("pipeline", "backward")])
def test_a_rank_that_dies_ends_the_run_and_the_last_save_continues_the_curve(kind, place, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(p101.RankFailed, match="rank 1") as failed:
        p101.launch(run, kind, death=place, save_to=path, world_size=2)
    assert (failed.value.rank, failed.value.exitcode) == (1, 7)
    assert os.listdir(tmp_path) == ["run.pt"]
    assert torch.load(path)["steps"] == 2
    assert run("naive", start=path) == pytest.approx(run("naive"), rel=1e-10)
