"""regather=True: column layers keep their inputs cut along time, backward gathers them again, and
every number stays the same.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import OPTIMIZERS, WITHOUT_HEAD, gpt, mesh_of, text, world_size

LAYERS, HEADS, WIDTH = 2, 12, 24


def step(shape, options, regather):
    trainer = p101.HybridTrainer(
        gpt(tied=False),
        p101.vocabulary_cross_entropy,
        OPTIMIZERS["sgd"],
        mesh=mesh_of(shape),
        sequence_parallel=True,
        regather=regather,
        verify=False,
        **options,
    )
    batch = trainer.share(text(1))  # 12 samples of 5 times, which ranks share unevenly
    with p101.count_activations(trainer) as activations:
        loss = trainer.step(*batch)
    return loss, trainer.gradients(), activations.peak


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("tp 2", {}),
        ("tp 3", {"overlap": False}),
        ("tp 2", {"recompute": "full"}),
        ("tp 2, dp 2", {"zero_stage": 3, "accumulate": 2}),
        ("tp 2, pp 2", {"schedule": "zb-h1", "microbatches": 4}),
    ],
    ids=str,
)
def test_every_number_is_the_same_and_less_is_kept(shape, options):
    plain, again = (
        p101.launch(
            step, shape, options, regather, world_size=world_size(shape), backend="sim"
        ).results
        for regather in (False, True)
    )
    for (loss, gradients, peak), (same_loss, same, less) in zip(plain, again):
        assert loss == same_loss
        assert all(torch.equal(g, same[name]) for name, g in gradients.items())
        assert less < peak or options.get("recompute") == "full"


def bytes_sent(shape, regather):
    run = p101.launch(step, shape, {}, regather, world_size=world_size(shape), backend="sim")
    return sum(run.trace.bytes_sent)


@pytest.mark.parametrize("shape", ["tp 2", "tp 4"])
def test_each_gather_of_the_forward_is_sent_once_more(shape):
    samples, time = text(1)[0].shape
    gathered = 8 * samples * time * WIDTH  # in float64
    ranks = world_size(shape)
    # query, key and value together; the MLP's first layer; and the head
    inputs = 2 * LAYERS + 1
    extra = bytes_sent(shape, True) - bytes_sent(shape, False)
    assert extra == inputs * (ranks - 1) * gathered


def test_with_a_whole_head():
    def program(regather):
        trainer = p101.TensorParallelTrainer(
            gpt(),
            lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
            OPTIMIZERS["adamw"],
            plan=WITHOUT_HEAD,
            sequence_parallel=True,
            regather=regather,
        )
        return [trainer.step(*trainer.share(text(i))) for i in range(2)]

    plain, again = (
        p101.launch(program, way, world_size=2, backend="sim").results for way in (False, True)
    )
    assert plain == again


def test_without_sequence_parallel_there_is_nothing_to_gather():
    with pytest.raises(ValueError, match=r"regather=True.*expected sequence_parallel=True"):
        p101.TensorParallelTrainer(
            MLP([4, 4, 4]), F.mse_loss, OPTIMIZERS["sgd"], regather=True, verify=False
        )
