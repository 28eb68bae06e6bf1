"""Lesson 09: recomputation and packing by hand, numbers of the text, and the answers to its
exercises.
"""

from __future__ import annotations

import pytest
import torch

import parallel101 as p101
from parallel101.cost import layer_activations, model_states
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer_text, definitions

LESSON = definitions("09_memory", "SIZES", "LONG", "WAYS", "LLAMA")
exec(answer_text("09_memory", "recompute-answer"), LESSON)
OF_LAYER = layer_activations(LESSON["LLAMA"])
GB = 1e9


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_recomputed_blocks_have_the_same_gradients_and_keep_their_inputs(blocks):
    def run(forward):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(MLP([32, 128, 32]) for _ in range(blocks))
        x = torch.randn(16, 32, requires_grad=True)
        with p101.count_activations(model) as activations:
            forward(model, x).square().mean().backward()
        return [p.grad for p in (x, *model.parameters())], activations

    plain, most = run(lambda model, x: torch.nn.Sequential(*model)(x))
    mine, found = run(LESSON["forward_all"])
    assert all(map(torch.equal, plain, mine))
    assert found.peak < most.peak if blocks > 1 else found.peak <= most.peak + 16 * 32 * 4


def test_numbers_of_the_text():
    assert 32 * OF_LAYER["attention weights: softmax"] == pytest.approx(34.4 * GB, rel=1e-2)


@pytest.mark.parametrize("block", [32, 64])
def test_a_packed_number_is_off_by_a_sixteenth_at_most_and_a_block_costs_a_byte_for_its_scale(
    block,
):
    x = torch.randn(40 * block, generator=torch.Generator().manual_seed(0))
    x *= 10.0 ** torch.arange(-20, 20).repeat_interleave(block)
    message = LESSON["pack"](x, block)
    far = (LESSON["unpack"](message, block) - x).abs() / x.abs()
    largest = x.view(-1, block).abs().amax(dim=1).repeat_interleave(block)
    assert len(message) == len(x) * (block + 1) // block
    assert far[x.abs() > 2**-12 * largest].max() <= 1 / 16


def test_nvfp4_is_exact_for_its_own_numbers():
    x = torch.tensor([0.0, 0.5, -1, 1.5, 2, -3, 4, 6] * 2 + [448.0 * 6] + [0.0] * 15)
    assert torch.equal(LESSON["nvfp4"](x), x)


def test_exercise_1_fits_one_sequence_and_eight_with_recomputation():
    states = model_states(7_000_000_000, 8, zero_stage=3, precision="mixed").total
    layer = sum(nbytes for name, nbytes in OF_LAYER.items() if "softmax" not in name)
    recomputed = layer_activations(LESSON["LLAMA"]._replace(batch=8, recompute="full"))
    kept = 32 * sum(recomputed.values())
    for nbytes, said in ((states, 14), (layer, 0.537), (kept, 8.6), (8 * layer, 4.3)):
        assert nbytes == pytest.approx(said * GB, rel=1e-2)
    assert states + 32 * layer < 80 * GB < states + 8 * 32 * layer
    assert states + kept + 8 * layer < 80 * GB
