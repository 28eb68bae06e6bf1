"""Fit, evaluation, saving and going on: the curve of an interrupted run is that of one that was
not, whatever the number of ranks.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101 import DataParallelTrainer
from parallel101.models.mlp import MLP
from parallel101.trainers.support.checkpoint import read_checkpoint, write_checkpoint
from parallel101.trainers.support.history import StepResult
from parallel101.viz.loss_curves import LiveLoss

STEPS = 8


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    return x, x.sin()


def build():
    return DataParallelTrainer(
        MLP([4, 8, 4], dtype=torch.float64),
        F.mse_loss,
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        clip_norm=0.5,
        bucket_bytes=200,
    )


def run(until=STEPS, start=None, **saving):
    trainer = build()
    if start is not None:
        trainer.resume(start)
    return trainer.fit(batch, until=until, progress=False, **saving).losses


def test_a_save_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    run(until=3, save_to=path)
    # killed while it writes, and when all is written but not yet in its place
    for name in ("fsync", "replace"):
        with pytest.raises(p101.RankFailed) as failed:
            p101.launch(killed_in, name, path, world_size=1)
        assert failed.value.exitcode == 9
        assert read_checkpoint(path)["steps"] == 3
    assert run(start=path, save_to=path) == run()
    assert read_checkpoint(path)["steps"] == STEPS
    assert os.listdir(tmp_path) == ["run.pt"], "and nothing lies about"


def killed_in(name, path):
    setattr(os, name, lambda *args: os._exit(9))
    run(until=STEPS, start=path, save_to=path)


def test_a_file_that_is_no_checkpoint(tmp_path):
    for number, content in enumerate((b"", b"something else", None)):
        path = tmp_path / str(number)
        if content is None:
            torch.save({"format": "another"}, path)
        else:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a checkpoint that Trainer\.save wrote"):
            build().resume(path)
    with pytest.raises(FileNotFoundError):
        build().resume(tmp_path / "nowhere.pt")
    path = tmp_path / "other.pt"
    other = DataParallelTrainer(MLP([4, 9, 4]), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
    other.save(path)
    with pytest.raises(
        ValueError,
        match=r"another model's: 'layers\.0\.weight' is \(9, 4\) there and \(8, 4\) here",
    ):
        build().resume(path)


def where_nobody_can_write(path):
    try:
        build().save(path)
    except OSError as error:
        return str(error)


def test_a_save_that_fails_is_an_error_on_every_rank(tmp_path):
    first, second = p101.launch(
        where_nobody_can_write, tmp_path / "no folder" / "run.pt", world_size=2
    ).results
    assert "there is no folder" in first
    assert "rank 0 could not save to" in second
    assert first in second
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "no folder" / "x", {})


def evaluate():
    trainer = build()
    model = MLP([4, 8, 4], dtype=torch.float64)
    batches = [batch(0), (torch.ones(3, 4).double(), torch.zeros(3, 4).double())]
    whole = F.mse_loss(
        model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
    )
    return trainer.evaluate(batches) / whole.item() - 1, trainer.model.training


def test_evaluation_is_the_mean_over_samples():
    for error, training in p101.launch(evaluate, world_size=3).results:
        assert abs(error) < 1e-12
        assert training


def test_history_tells_and_plots(capsys):
    trainer = build()
    assert repr(trainer.history) == "<History: no steps yet>"
    history = trainer.fit([batch(step) for step in range(3)])
    assert history.samples == [10, 10, 10]
    assert history.tokens == [0, 0, 0]
    assert "samples/s" in repr(history)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert f"loss {history.losses[-1]:.4f}" in shown
    assert "samples/s" in shown
    line = history.plot(label="mine").lines[0]
    assert list(line.get_ydata()) == history.losses
    assert trainer.fit(map(batch, [3]), progress=False) is history
    assert len(history) == 4
    assert "3/3" not in capsys.readouterr().err
    trainer.history.add(StepResult(4, 1.0, 0.5, 10, 640))
    assert "tokens/s" in trainer.history.rate(last=1)


def holdings():
    trainer = build()
    empty = trainer.describe()
    trainer.step(*trainer.share(batch(0)))
    return empty.bytes, trainer.describe().bytes, str(trainer.describe())


def test_describe_says_who_holds_what():
    weights = 8 * (4 * 8 + 8 + 8 * 4 + 4)
    for empty, held, table in p101.launch(holdings, world_size=2).results:
        assert empty == {"weights": [weights] * 2, "gradients": [0, 0], "optimizer state": [0, 0]}
        assert held == {
            "weights": [weights] * 2,
            "gradients": [weights] * 2,
            "optimizer state": [2 * weights + 4 * 4] * 2,
        }
        assert "rank 1" in table
        assert "4 gradients in" in table


def told():
    """What on_step hears, and when: after the step, before the save."""
    heard, trainer = [], build()
    history = trainer.fit(
        batch, until=3, on_step=lambda step: heard.append((step, trainer.steps)), progress=False
    )
    return [step._asdict() for step, _ in heard], [taken for _, taken in heard], history.as_dict()


def test_on_step_hears_of_every_step_on_every_rank():
    for steps, taken, history in [told(), *p101.launch(told, world_size=2).results]:
        assert taken == [1, 2, 3]
        assert list(steps[0]) == ["step", "loss", "seconds", "samples", "tokens"]
        assert [list(column) for column in zip(*(step.values() for step in steps))] == list(
            history.values()
        )
        assert history["steps"] == [0, 1, 2]


def shown(live, rank):
    return (
        build()
        .fit(batch, until=4, on_step=live.curve(f"rank {rank}", rank=rank), progress=False)
        .losses
    )


def test_a_live_picture_follows_fit():
    with LiveLoss(until=4) as live:
        alone = shown(live, 0)
        first = p101.launch(shown, live, 1, world_size=2).results[0]
    assert live.curves == {"rank 0": list(enumerate(alone)), "rank 1": list(enumerate(first))}, (
        "one rank writes, each step once"
    )


def test_an_evaluation_leaves_every_module_as_it_was():
    trainer = build()
    frozen = trainer.model.layers[0].eval()
    modes = []
    trainer.model.layers[1].register_forward_pre_hook(
        lambda layer, inputs: modes.append(layer.training)
    )
    trainer.evaluate([batch(0)])
    trainer.step(*batch(0))
    with pytest.raises(TypeError):
        trainer.evaluate([batch(0), None])
    assert modes == [False, True, False]
    assert trainer.model.training
    assert not frozen.training


def scheduled(until, save_to=None, start=None, named=True):
    """A learning rate that changes in each step, and a MultiStepLR."""
    trainer = build()
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        trainer.optimizer,
        [
            torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: step / 4),
            torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [2, 3]),
        ],
        milestones=[3],
    )
    if start is not None:
        trainer.resume(start, **({"scheduler": scheduler} if named else {}))
    losses = trainer.fit(
        batch, until=until, save_to=save_to, scheduler=scheduler, progress=False
    ).losses
    return losses, scheduler.get_last_lr()


def test_a_scheduler_is_saved_and_resumed(tmp_path):
    path = tmp_path / "run.pt"
    expected = p101.launch(scheduled, STEPS, world_size=2, backend="sim").results
    p101.launch(scheduled, 4, save_to=path, world_size=2, backend="sim")
    assert (
        p101.launch(scheduled, STEPS, start=path, world_size=2, backend="sim").results == expected
    )
    run(until=2, save_to=tmp_path / "without.pt")
    with pytest.raises(
        ValueError,
        match=r"has no scheduler's state: expected a file that save\(…, scheduler=…\) wrote",
    ):
        scheduled(STEPS, start=tmp_path / "without.pt")


def different_batches():
    own = torch.utils.data.TensorDataset(*batch(0))
    loader = torch.utils.data.DataLoader(
        own, batch_size=4, sampler=torch.utils.data.DistributedSampler(own)
    )
    with pytest.raises(ValueError, match=r"ranks? .* other batches .*DistributedSampler") as error:
        build().fit(loader, progress=False)
    return str(error.value)


def test_fit_refuses_batches_that_differ_between_ranks():
    assert len(set(p101.launch(different_batches, world_size=2).results)) == 1
