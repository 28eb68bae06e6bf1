"""Who holds what: bytes a rank fall to 1/n as each stage says, counted from live storages, so
that a layer that leaks is seen.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import TRAINERS, gpt, on_mesh, on_ranks, text
from tests.trainers.models import BALANCED, mixture

WIDTH, DEPTH = 24, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
ALL = DEPTH * LAYER
ALL_WEIGHTS = DEPTH * 4 * WIDTH * WIDTH  # without biases


def trainer(zero_stage, **options):
    model = MLP([WIDTH] * (DEPTH + 1))
    ranks = dist.get_world_size()
    return on_mesh(f"dp {ranks}")(
        *(model, F.mse_loss, torch.optim.AdamW), zero_stage=zero_stage, **options
    )


X = torch.ones(8, WIDTH)


def step(trainer, batch=(X, X)):
    trainer.step(*trainer.share(batch))
    return trainer.describe()


def test_weights_gradients_and_optimizer_state_fall_to_one_nth():
    """ZeRO's table 1 in float32: 4 + 4 + 8/n, 4 + 4/n + 8/n, 4/n + 4/n + 8/n bytes a parameter."""
    n, kinds = 3, {"weights": (1, 3), "gradients": (1, 2), "optimizer state": (2, 1)}

    def held():
        before = trainer(0).describe().bytes
        return before, [step(trainer(stage, bucket_bytes=LAYER)) for stage in range(4)]

    for before, by_stage in on_ranks(n, held):
        assert before == {"weights": [ALL] * n, "gradients": [0] * n, "optimizer state": [0] * n}
        for stage, holdings in enumerate(by_stage):
            for kind, (whole, least) in kinds.items():
                share = whole if stage < least else whole / n
                # and a few counts of steps
                assert holdings.bytes[kind] == pytest.approx([share * ALL] * n, rel=0.01)
        for stage, holdings in enumerate(by_stage[1:], 1):
            two_layers = 0 if stage < 3 else 2 * LAYER
            assert holdings.bytes["gathered (peak)"] == [two_layers] * n
            # two layers' that leave and one's that is packed
            for most in holdings.bytes["gradients in flight (peak)"]:
                assert 0 < most <= 3.2 * LAYER
        words = "rank 1", "12 gradients, all-reduced in buckets during backward"
        assert all(word in str(by_stage[0]) for word in words)
        table = str(by_stage[3])
        assert f"{by_stage[3].bytes['weights'][0] / 1000:.1f} kB" in table
        assert "stage 3, in 6 layers" in table


def gathered(*args):
    """The most bytes of gathered weights in a step."""
    return step(*args).bytes["gathered (peak)"][0]


def peaks():
    """Of gathered weights, measured and expected: layer by layer; with hooks that keep the weights
    of some layers, as a careless logger would; of a GPT, whose tied weights are whole throughout.
    """
    found = []
    one_by_one = trainer(3, overlap=False)
    found.append((gathered(one_by_one), LAYER))
    one_by_one.evaluate([(X, X)])
    one_by_one.state_dict()
    held = one_by_one.describe().bytes
    found += [(held["gathered (peak)"][0], LAYER), (held["weights"][0], ALL // 2)]

    leaking, kept = trainer(3), []
    found.append((gathered(leaking), 2 * LAYER))
    for leaked, layer in enumerate(list(leaking.model.layers)[:3], 1):
        layer.register_forward_hook(lambda layer, inputs, output: kept.append(layer.weight.data[0]))
        found.append((gathered(leaking), (2 + leaked) * LAYER))
        kept.clear()

    model = gpt()
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    expected = 2 * block + model.head.weight.nbytes
    sharded = p101.ShardedTrainer(model, next_token_loss, torch.optim.AdamW, verify=False)
    return [*found, (gathered(sharded, text(0)), expected)]


def test_two_layers_are_whole_at_a_time_and_a_leaked_one_raises_the_figure():
    for found in on_ranks(2, peaks):
        assert [measured for measured, _ in found] == [expected for _, expected in found]


def left_over():
    """What is alive of trainers that nobody holds any more."""
    pipeline = partial(p101.PipelineTrainer, verify=False)
    builds = {**TRAINERS, "pipeline": pipeline, "verified": p101.DataParallelTrainer}
    alive = []
    gc.disable()
    try:
        for name, build in builds.items():
            model = MLP([WIDTH] * 3)
            built = build(model, F.mse_loss, torch.optim.AdamW)
            step(built)
            refs = weakref.ref(built), weakref.ref(model.layers[0].weight)
            del model, built
            alive += [name for ref in refs if ref() is not None]
    finally:
        gc.enable()
    return alive


def test_a_trainer_that_nobody_holds_is_freed_without_the_garbage_collector():
    """It doesn't see the hooks of weights, and would never free them."""
    assert on_ranks(2, left_over) == [[]] * 2


def experts_weights():
    model = mixture()
    whole = sum(p.nbytes for p in model.parameters())
    away = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) // 2
    trained = on_mesh("dp 2, ep 2")(model, BALANCED, torch.optim.AdamW, zero_stage=1)
    return trained.describe().bytes["weights"], [whole - away] * 4


def test_along_ep_a_rank_holds_its_experts_only():
    for weights, expected in on_ranks(4, experts_weights):
        assert weights == expected


def on_three_axes():
    """Without biases, which one rank along tp would have more of."""
    model = MLP([WIDTH] * (DEPTH + 1), bias=False)
    for stage in (0, 1, 2, 3):
        trained = on_mesh("dp 2, pp 2, tp 2")(
            *(copy.deepcopy(model), F.mse_loss, torch.optim.AdamW), zero_stage=stage
        )
        yield step(trained)


def test_parts_on_a_mesh_follow_the_order_of_the_cuts():
    """Stages, then shards, then pieces. dp cuts only what the ZeRO stage says."""
    quarters = [[(i / 4, i / 4 + 1 / 4)] for i in (0, 1, 2, 3)] * 2
    eighths = [[(i / 8, i / 8 + 1 / 8)] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    results = on_ranks(8, lambda: [*on_three_axes()])
    for stage, found in enumerate(results[0]):
        for kind, first in (("weights", 3), ("gradients", 2), ("optimizer state", 1)):
            assert found.parts[kind] == (eighths if stage >= first else quarters), kind
            whole = ALL_WEIGHTS * (2 if kind == "optimizer state" else 1)
            for (low, high), count in zip((of[0] for of in found.parts[kind]), found.bytes[kind]):
                assert count == pytest.approx((high - low) * whole, rel=0.02)
