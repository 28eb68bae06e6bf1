"""Who holds what: bytes a rank fall to 1/n as each stage says, counted from live storages, so
that a layer that leaks is seen.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import text
from tests.trainers.models import BALANCED, mixture

WIDTH, DEPTH = 24, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
ALL = DEPTH * LAYER
ALL_WEIGHTS = DEPTH * 4 * WIDTH * WIDTH  # without biases


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
    for holdings in p101.launch(one_at_a_time, world_size=2, backend="sim").results[0]:
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
    for figures in p101.launch(leaking, world_size=2, backend="sim").results:
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
    for most, expected in p101.launch(gpt_weights, world_size=2, backend="sim").results:
        assert most == expected


def experts_weights():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = mixture()
    whole = sum(p.nbytes for p in model.parameters())
    away = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) // 2
    trained = p101.HybridTrainer(model, BALANCED, torch.optim.AdamW, mesh=mesh, zero_stage=1)
    trained.step(*trained.share(text(0)))
    return trained.describe().bytes["weights"], [whole - away] * 4


def test_along_ep_a_rank_holds_its_experts_only():
    for weights, expected in p101.launch(experts_weights, world_size=4, backend="sim").results:
        assert weights == expected


def numbered(names, zero_stage, model):
    """Each rank's parts, and the numbers of the elements that it holds: no two are equal."""
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    trainer = p101.HybridTrainer(
        model(),
        p101.vocabulary_cross_entropy,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        mesh=mesh,
        zero_stage=zero_stage,
        verify=False,
    )
    whole, first = {}, 0
    for name in trainer.trained:
        shape = trainer.layout.entries[name].shape
        whole[name] = torch.arange(first, first + shape.numel()).view(shape)
        first += shape.numel()
    mine = [trainer.layout.cut(name, whole[name]).reshape(-1).tolist() for name in trainer.trained]
    assert [len(of) for of in mine if of] == [
        trainer.owned[name].numel() for name in trainer.trained if name in trainer.owned
    ]
    return trainer.describe().parts["optimizer state"], set().union(*mine), first


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("names", [("dp", "pp", "tp"), ("tp", "dp"), ("pp", "dp")], ids="-".join)
def test_two_ranks_have_as_many_elements_in_common_as_their_parts(names, zero_stage):
    """A tied GPT: what is replicated along tp, and on two stages, is at one place for all."""

    def model():
        return GPT(GPTConfig(vocabulary=11, context=4, layers=2, heads=2, width=8))

    run = p101.launch(numbered, names, zero_stage, model, world_size=2 ** len(names), backend="sim")
    parts, _, total = run.results[0]
    held = [elements for _, elements, _ in run.results]
    for a in range(len(held)):
        for b in range(len(held)):
            both = sum(
                max(min(high, to) - max(low, start), 0.0)
                for low, high in parts[a]
                for start, to in parts[b]
            )
            assert both * total == pytest.approx(len(held[a] & held[b]), abs=1e-6)
    assert len(set().union(*held)) == total


def hybrid(zero_stage):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    return p101.HybridTrainer(
        MLP([WIDTH] * (DEPTH + 1), bias=False),
        F.mse_loss,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        mesh=mesh,
        zero_stage=zero_stage,
    )


def test_parts_on_a_mesh_follow_the_order_of_the_cuts():
    """Stages, then shards, then pieces. dp cuts only what the ZeRO stage says."""
    quarters = [[(i / 4, i / 4 + 1 / 4)] for i in (0, 1, 2, 3)] * 2
    eighths = [[(i / 8, i / 8 + 1 / 8)] for i in (0, 2, 4, 6, 1, 3, 5, 7)]

    def described():
        return [step(hybrid(zero_stage)) for zero_stage in (0, 1, 2, 3)]

    for zero_stage, found in enumerate(
        p101.launch(described, world_size=8, backend="sim").results[0]
    ):
        for kind, first in (("weights", 3), ("gradients", 2), ("optimizer state", 1)):
            assert found.parts[kind] == (eighths if zero_stage >= first else quarters), kind
            whole = ALL_WEIGHTS * (2 if kind == "optimizer state" else 1)
            for (low, high), count in zip((of[0] for of in found.parts[kind]), found.bytes[kind]):
                assert count == pytest.approx((high - low) * whole, rel=0.02)
