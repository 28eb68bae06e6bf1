"""A rank dies in the middle of fit: the run ends at once with its name, nothing is left, and
the last save goes on with the curve.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from parallel101.trainers.support.checkpoint import read_checkpoint
from tests.ranks.test_left_behind import state
from tests.trainers.cases import TRAINERS

# steps in all, between two saves, and the one in which rank 1 dies
STEPS, EVERY, DIES_IN = 8, 2, 5
PLACES = {  # each trainer dies in two places; the run goes on from the last
    "overlapped": ("save", "backward"),
    "ZeRO-1": ("between steps", "save"),
    "ZeRO-2": ("between steps", "backward"),
    "ZeRO-3": ("backward", "save"),
}


def batch(step):
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.sin()


class Death:
    """Waits for its place and step, writes down when, and ends the process as a kill would."""

    def __init__(self, place, file):
        self.place, self.file = place, file

    def at(self, place, step):
        if (place, step, dist.get_rank()) == (self.place, DIES_IN, 1):
            self.file.write_text(str(time.time()))
            os._exit(7)


def run(kind, start=None, death=None, save_to=None):
    model = MLP([4, 8, 8, 4], dtype=torch.float64)
    trainer = TRAINERS[kind](
        model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), clip_norm=0.5
    )
    if start is not None:
        trainer.resume(start)
    if death is not None:
        model.layers[1].register_full_backward_hook(lambda *_: death.at("backward", trainer.steps))
        collect = trainer.state_dict
        trainer.state_dict = lambda: death.at("save", trainer.steps - 1) or collect()

    def batches(step):
        if death is not None:
            death.at("between steps", step)
        return batch(step)

    history = trainer.fit(
        batches, until=STEPS, save_to=save_to, save_every=EVERY if save_to else None, progress=False
    )
    return (
        history.losses,
        history.steps,
        {name: weight.tolist() for name, weight in trainer.state_dict().items()},
    )


@pytest.mark.parametrize(("kind", "places"), PLACES.items(), ids=list(PLACES))
def test_a_rank_that_dies_ends_fit_with_its_name_and_the_last_save_continues_the_curve(
    kind, places, tmp_path
):
    unbroken, steps, weights = run(kind)
    assert steps == list(range(STEPS))
    p101.launch(lambda: None, world_size=3)
    # processes, descriptors, threads; not what others write to the machine's folder for such
    before = state()[:3]
    for place in places:
        path, died = tmp_path / f"{place}.pt", tmp_path / "died"
        with pytest.raises(p101.RankFailed, match="rank 1") as failed:
            p101.launch(run, kind, death=Death(place, died), save_to=path, world_size=3)
        assert time.time() - float(died.read_text()) < 2.0, (
            "seconds: the others do not wait for the dead"
        )
        assert (failed.value.rank, failed.value.exitcode) == (1, 7)
        assert read_checkpoint(path)["steps"] in ((4, 6) if place == "save" else (4,)), (
            "the last save that was complete"
        )
        died.unlink()
    assert state()[:3] == before
    assert sorted(os.listdir(tmp_path)) == sorted(f"{place}.pt" for place in places)
    place, world_size = places[-1], 2 if kind in ("overlapped", "ZeRO-2") else 3
    for losses, resumed_steps, resumed_weights in p101.launch(
        run, kind, start=tmp_path / f"{place}.pt", world_size=world_size
    ).results:
        assert resumed_steps == steps
        torch.testing.assert_close(losses, unbroken, rtol=1e-10, atol=0)
        torch.testing.assert_close(resumed_weights, weights, rtol=1e-9, atol=1e-12)
    for place in places:
        assert run(kind, start=tmp_path / f"{place}.pt")[0] == pytest.approx(unbroken, rel=1e-10), (
            "and without a process group"
        )
