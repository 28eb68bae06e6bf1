"""Fit and what it tells: losses, histories, progress; evaluations; learning-rate schedulers;
batches that differ between ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    CLOSE,
    OPTIMIZERS,
    TRAINERS,
    gpt,
    next_token_loss,
    on_ranks,
    randn,
    text,
)

STEPS = 8


def batch(step):
    x = randn(step, 10, 4)
    return x, x.sin()


def build():
    model = MLP([4, 8, 4], dtype=torch.float64)
    return TRAINERS["overlapped"](model, F.mse_loss, OPTIMIZERS["adamw"], clip_norm=0.5)


def evaluate():
    """Of batches of different sizes; and what it does to the modules."""
    trainer, modes = build(), []
    frozen = trainer.model.layers[0].eval()
    trainer.model.layers[1].register_forward_pre_hook(
        lambda layer, inputs: modes.append(layer.training)
    )
    batches = [batch(0), (torch.ones(3, 4).double(), torch.zeros(3, 4).double())]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches))
    whole = F.mse_loss(MLP([4, 8, 4], dtype=torch.float64)(inputs), targets)
    assert trainer.evaluate(batches) == pytest.approx(whole.item(), rel=CLOSE)
    with pytest.raises((TypeError, RuntimeError), match="a batch is None"):
        trainer.evaluate([None])
    trainer.step(*trainer.share(batch(0)))
    return modes, trainer.model.training, frozen.training


def test_an_evaluation_is_the_mean_over_samples_and_leaves_every_module_as_it_was():
    for modes, training, frozen in on_ranks(3, evaluate):
        assert modes == [False, False, True]
        assert training and not frozen


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
    of_text = TRAINERS["naive"](gpt(), next_token_loss, OPTIMIZERS["adamw"])
    assert "tokens/s" in repr(of_text.fit([text(0)], progress=False))


def told():
    """What on_step hears, and when: after the step, before the save."""
    heard, trainer = [], build()

    def hear(step):
        heard.append((step._asdict(), trainer.steps))

    history = trainer.fit(batch, until=3, on_step=hear, progress=False)
    return *zip(*heard), history.as_dict()


def test_on_step_hears_of_every_step_on_every_rank():
    for steps, taken, history in on_ranks(2, told):
        assert taken == (1, 2, 3)
        assert list(steps[0]) == ["step", "loss", "seconds", "samples", "tokens"]
        columns = zip(*(step.values() for step in steps))
        assert list(map(list, columns)) == list(history.values())
        assert history["steps"] == [0, 1, 2]


def scheduled(until, save_to=None, start=None):
    """A learning rate that changes in each step, and a MultiStepLR."""
    trainer, rates = build(), torch.optim.lr_scheduler
    warm_up = rates.LambdaLR(trainer.optimizer, lambda step: step / 4)
    falling = rates.MultiStepLR(trainer.optimizer, [2, 3])
    scheduler = rates.SequentialLR(trainer.optimizer, [warm_up, falling], milestones=[3])
    if start is not None:
        trainer.resume(start, scheduler=scheduler)
    options = {"until": until, "save_to": save_to, "scheduler": scheduler, "progress": False}
    return trainer.fit(batch, **options).losses, scheduler.get_last_lr()


def test_a_scheduler_is_saved_and_resumed(tmp_path):
    path, where = tmp_path / "run.pt", {"world_size": 2, "backend": "sim"}
    expected = p101.launch(scheduled, STEPS, **where).results
    p101.launch(scheduled, 4, save_to=path, **where)
    assert p101.launch(scheduled, STEPS, start=path, **where).results == expected
    build().save(tmp_path / "without.pt")
    with pytest.raises(ValueError, match="has no scheduler's state"):
        scheduled(STEPS, start=tmp_path / "without.pt")


def different_batches():
    own = torch.utils.data.TensorDataset(*batch(0))
    loader = torch.utils.data.DataLoader(
        own, batch_size=4, sampler=torch.utils.data.DistributedSampler(own)
    )
    with pytest.raises(
        ValueError, match=r"ranks? .* different batch .*DistributedSampler"
    ) as error:
        build().fit(loader, progress=False)
    return str(error.value)


def test_fit_refuses_batches_that_differ_between_ranks():
    run = p101.launch(different_batches, world_size=2, backend="sim")
    assert len(set(run.results)) == 1
