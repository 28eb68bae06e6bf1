"""Who holds what: bytes a rank fall to 1/n as each stage says, counted from live storages, so
that a layer that leaks is seen.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import parallel101 as p101
from parallel101 import ShardedTrainer
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.trainers.support.memory import readable
from parallel101.trainers.zero import saved_weights
from parallel101.trainers.zero.saved_weights import Place

WIDTH, DEPTH = 24, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
ALL = DEPTH * LAYER


def trainer(zero_stage, **options):
    return ShardedTrainer(
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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_weights_gradients_and_optimizer_state_fall_to_one_nth(n):
    """ZeRO's table 1 in float32: 4 + 4 + 8/n, 4 + 4/n + 8/n, 4/n + 4/n + 8/n bytes a parameter."""
    for found in p101.launch(held, world_size=n, bucket_bytes=LAYER).results:
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
    sharded = ShardedTrainer(model, next_token_loss, lambda p: torch.optim.AdamW(p))
    tokens = torch.randint(13, (4, 9), generator=torch.Generator().manual_seed(0))
    sharded.step(*sharded.share((tokens[:, :-1], tokens[:, 1:])))
    return sharded.describe().bytes["gathered (peak)"][0], 2 * block + tied


def test_tied_weights_are_whole_beside_two_layers():
    for most, expected in p101.launch(gpt_weights, world_size=2).results:
        assert most == expected


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_saved_weights_are_kept_as_places_also_in_autocasts_dtype(autocast):
    """Of two layers' weights the graph keeps places, and the values are those that were saved;
    an activation is kept as it is.
    """
    model = MLP([5, 4, 3])
    saved, whole = [], {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = ShardedTrainer(
        model, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), autocast=autocast
    )
    with (
        trainer.sync.forward(),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        pack, unpack = saved_weights.pack_and_unpack(trainer.sync.whole_now, autocast)

        def keep(tensor):
            saved.append((pack(tensor), tensor.detach().clone()))
            return saved[-1][0]

        with saved_tensors_hooks(keep, unpack):
            output = model(torch.randn(3, 5, requires_grad=True))
        assert trainer.sync.live.now("weights") == 0, (
            "every layer is freed, though the graph is alive"
        )
    assert output.grad_fn is not None
    places = [(place, values) for place, values in saved if isinstance(place, Place)]
    assert len(places) == 2
    assert len(saved) > 2
    for (place, values), name in zip(places, ("layers.0.weight", "layers.1.weight")):
        expected = whole[name].to(autocast or torch.float32)
        assert values.shape in (expected.shape, expected.t().shape)
        torch.testing.assert_close(unpack(place), values, rtol=0, atol=0)
        assert sorted(values.flatten().tolist()) == sorted(expected.flatten().tolist())
    trainer.sync.reset()


def test_bytes_as_papers_write_them():
    told = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        999_600: "1 MB",
        18_874_368: "18.9 MB",
        9_600_000_000: "9.6 GB",
    }
    assert {count: readable(count) for count in told} == told
