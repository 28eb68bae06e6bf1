"""Lesson 09: recomputation by hand, and the answers to its exercises."""

from __future__ import annotations

import math

import pytest
import torch

import parallel101 as p101
from parallel101.cost import LayerShape, first_stage_activations, layer_activations, model_states
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer_text, definitions

LESSON = definitions("09_memory", "SIZES", "LONG", "WAYS", "LLAMA")
exec(compile(answer_text("09_memory", "recompute-answer"), "recompute-answer", "exec"), LESSON)
forward_all = LESSON["forward_all"]
GB = 1e9


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_recomputed_blocks_have_the_same_gradients_and_keep_their_inputs(blocks: int) -> None:
    def run(forward):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(MLP([32, 128, 32]) for _ in range(blocks))
        x = torch.randn(16, 32, requires_grad=True)
        with p101.count_activations(model) as activations:
            forward(model, x).square().mean().backward()
        return [p.grad for p in (x, *model.parameters())], activations

    plain, most = run(lambda model, x: torch.nn.Sequential(*model)(x))
    mine, found = run(forward_all)
    assert all(map(torch.equal, plain, mine))
    assert found.peak < most.peak if blocks > 1 else found.peak <= most.peak + 16 * 32 * 4


def test_exercise_1_fits_one_sequence_and_eight_with_recomputation() -> None:
    states = model_states(7_000_000_000, 8, zero_stage=3, precision="mixed").total
    fused = {
        name: nbytes
        for name, nbytes in layer_activations(LESSON["LLAMA"]).items()
        if "softmax" not in name
    }
    layer = sum(fused.values())
    assert states == pytest.approx(14 * GB)
    assert layer == pytest.approx(0.537 * GB, rel=1e-2)
    assert states + 32 * layer < 80 * GB < states + 8 * 32 * layer
    kept = 32 * sum(layer_activations(LESSON["LLAMA"]._replace(batch=8, recompute="full")).values())
    assert kept == pytest.approx(8.6 * GB, rel=1e-2)
    assert 8 * layer == pytest.approx(4.3 * GB, rel=1e-2)
    assert states + kept + 8 * layer < 80 * GB


def test_attention_and_logits_of_the_text() -> None:
    of_layer = layer_activations(LESSON["LLAMA"])
    assert 32 * of_layer["attention weights: softmax"] == pytest.approx(34.4 * GB, rel=1e-2)
    assert math.isclose(8192 * 128256 * 4, 4.2 * GB, rel_tol=1e-2)
    assert math.isclose(2**-8 * math.sqrt((1024 + 3) / 12), 0.036, rel_tol=1e-2)


@pytest.mark.parametrize("block", [32, 64])
def test_a_packed_block_is_off_by_a_sixteenth_at_most_and_costs_a_byte_for_its_scale(block) -> None:
    x = torch.randn(40 * block, generator=torch.Generator().manual_seed(0))
    x *= 10.0 ** torch.arange(-20, 20).repeat_interleave(block)
    message = LESSON["pack"](x, block)
    far = (LESSON["unpack"](message, block) - x).abs() / x.abs()
    largest = x.view(-1, block).abs().amax(dim=1).repeat_interleave(block)
    assert len(message) == len(x) * (block + 1) // block
    assert far[x.abs() > 2**-12 * largest].max() <= 1 / 16


def test_nvfp4_is_exact_for_its_own_numbers() -> None:
    x = torch.tensor([0.0, 0.5, -1, 1.5, 2, -3, 4, 6] * 2 + [448.0 * 6] + [0.0] * 15)
    assert torch.equal(LESSON["nvfp4"](x), x)


def test_the_first_stage_holds_as_much_as_all_layers_of_one_microbatch() -> None:
    shape = LayerShape(width=64, heads=4, time=64, batch=4, dropout=False)
    whole = 8 * sum(layer_activations(shape).values())
    assert first_stage_activations(shape, 8, 4) == whole
