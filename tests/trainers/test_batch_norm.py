"""BatchNorm on every trainer: the statistics of the whole batch. (That trainers are equal to one
process: test_equality.py. What is refused: test_refused.py.)
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from tests.trainers.cases import OPTIMIZERS, TRAINERS, differing, on_ranks, raised, randn
from tests.trainers.models import Norms, images


def synchronized(model, loss_fn=F.mse_loss):
    return TRAINERS["naive"](model, loss_fn, OPTIMIZERS["sgd"], sync_batch_norm=True)


def spread():
    """The mean square of the normed samples, which is 1, of samples around 100 in bfloat16."""
    linear = nn.Linear(3, 3, bias=False)
    nn.init.eye_(linear.weight)
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), linear).bfloat16()
    trainer = synchronized(model, lambda y, _: y.float().square().mean())
    return trainer.step(*trainer.share(((100 + randn(0, 100, 3)).bfloat16(), randn(1, 100, 3))))


def test_statistics_are_computed_in_float32_at_least():
    for loss in on_ranks(2, spread):
        assert loss == pytest.approx(1, abs=0.1)


def class_and_copies():
    model, x = Norms(), images(0)[0]
    before, keys = copy.deepcopy(model), list(model.state_dict())
    trainer = synchronized(model)
    after = copy.deepcopy(trainer.model)  # as for an average of weights
    assert type(trainer.model.image[1]) is nn.BatchNorm2d
    assert list(trainer.model.state_dict()) == list(trainer.state_dict()) == keys
    trainer.step(*trainer.share(images(0)))
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    trainer.evaluate([images(1)])
    assert differing(dict(trainer.model.named_buffers()), buffers, 0) == []
    assert trainer.model.image[1].training
    counted = after.image[1].num_batches_tracked.item()
    return before, buffers, counted, after(trainer.share((x, x))[0])


def test_the_modules_stay_what_they_are_and_can_be_copied():
    x = images(0)[0]
    # results are pickled
    (before, buffers, *first), (_, same, *second) = p101.launch(
        class_and_copies, world_size=2, backend="gloo"
    ).results
    expected = before(x)  # alone: it talks to nobody
    assert first[0] == second[0] == 0, "a copy has statistics of its own"
    torch.testing.assert_close(torch.cat([first[1], second[1]]), expected, rtol=0, atol=1e-12)
    assert differing(buffers, same, 0) == [], "the same bits on all ranks"
    assert buffers["rest.4.num_batches_tracked"] == 1


def test_a_norm_of_the_batch_can_not_be_frozen_and_a_frozen_one_may_be_in_microbatches():
    def program():
        def build(model, **options):
            return raised(p101.DataParallelTrainer, model, F.mse_loss, OPTIMIZERS["sgd"], **options)

        frozen = Norms().eval()
        said = build(frozen)
        assert "'rest.1' is a BatchNorm1d" in said and "each rank has only its share" in said
        assert "eval()" not in said, "it has no statistics but the batch's"
        frozen.rest[1] = nn.Identity()
        assert build(frozen, accumulate=2) == "nothing"

    p101.launch(program, world_size=2, backend="sim")
