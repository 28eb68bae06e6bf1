"""Who holds what: bytes a rank fall to 1/n as each stage says, counted from live storages, so
that a layer that leaks is seen.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP

WIDTH, DEPTH = 24, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
ALL = DEPTH * LAYER


def trainer(zero_stage, **options):
    return p101.ShardedTrainer(
        MLP([WIDTH] * (DEPTH + 1)),
        F.mse_loss,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        zero_stage=zero_stage,
        **options,
    )


def step(trainer):
    x = torch.ones(8, WIDTH)
    trainer.step(*trainer.share((x, x)))
    return trainer.describe()


def held(**options):
    return {zero_stage: step(trainer(zero_stage, **options)) for zero_stage in (1, 2, 3)}


@pytest.mark.parametrize("n", [1, 3, 4])
def test_weights_gradients_and_optimizer_state_fall_to_one_nth(n):
    """ZeRO's table 1 in float32: 4 + 4 + 8/n, 4 + 4/n + 8/n, 4/n + 4/n + 8/n bytes a parameter."""
    for found in p101.launch(held, world_size=n, backend="sim", bucket_bytes=LAYER).results:
        for zero_stage, holdings in found.items():
            share = {
                kind: [count / ALL for count in counts] for kind, counts in holdings.bytes.items()
            }
            assert share["weights"] == pytest.approx([1 if zero_stage < 3 else 1 / n] * n, rel=1e-3)
            assert share["gradients"] == pytest.approx(
                [1 if zero_stage < 2 else 1 / n] * n, rel=1e-3
            )
            assert share["optimizer state"] == pytest.approx([2 / n] * n, rel=0.01), (
                "and a few counts of steps"
            )
            assert holdings.bytes["gathered (peak)"] == [0 if zero_stage < 3 else 2 * LAYER] * n, (
                "two layers at a time"
            )
            in_flight = holdings.bytes["gradients in flight (peak)"]
            assert all(0 < most <= 3.2 * LAYER for most in in_flight), (
                "two layers' that leave and one's that is packed"
            )
        assert f"{found[3].bytes['weights'][0] / 1000:.1f} kB" in str(found[3])
        assert "stage 3" in str(found[3])
        assert "6 layers" in str(found[3])


def one_at_a_time():
    sharded = trainer(3, overlap=False)
    first = step(sharded)
    x = torch.ones(8, WIDTH)
    sharded.evaluate([(x, x)])
    sharded.state_dict()
    return first, step(sharded), sharded.describe()


def test_without_overlap_one_layer_is_whole_at_a_time_and_afterwards_none():
    for holdings in p101.launch(one_at_a_time, world_size=2).results[0]:
        assert holdings.bytes["gathered (peak)"] == [LAYER] * 2
        assert holdings.bytes["weights"] == [ALL // 2] * 2


def leaking():
    """A hook that keeps the weight of some layers, as a careless logger would."""
    sharded, kept, figures = trainer(3), [], [0]
    figures[0] = step(sharded).bytes["gathered (peak)"][0]
    for layer in list(sharded.model.layers)[:3]:
        layer.register_forward_hook(lambda layer, inputs, output: kept.append(layer.weight.data[0]))
        figures.append(step(sharded).bytes["gathered (peak)"][0])
        kept.clear()
    return figures


def test_a_leaked_layer_raises_the_figure():
    for figures in p101.launch(leaking, world_size=2).results:
        assert figures == [(2 + leaked) * LAYER for leaked in range(4)]


def gpt_weights():
    model = GPT(GPTConfig(13, context=8, layers=3, heads=2, width=16))
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    tied = model.head.weight.nbytes
    sharded = p101.ShardedTrainer(model, next_token_loss, lambda p: torch.optim.AdamW(p))
    tokens = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(0))
    sharded.step(*sharded.share((tokens[:, :-1], tokens[:, 1:])))
    return sharded.describe().bytes["gathered (peak)"][0], 2 * block + tied


def test_tied_weights_are_whole_beside_two_layers():
    for most, expected in p101.launch(gpt_weights, world_size=2).results:
        assert most == expected
