"""Lesson 11: the formulas and numbers of the text and of the exercises follow from the package.
What the lesson prints is in test_run.py.
"""

from __future__ import annotations

import pytest

import parallel101 as p101
from parallel101 import cost

H100, B200, GB200 = (cost.CHIPS[name] for name in ("H100", "B200", "GB200"))
WIDTH, HIDDEN, KV = 8192, 28_672, 1024
BLOCK = 2 * WIDTH**2 + 2 * WIDTH * KV + 3 * WIDTH * HIDDEN
WEIGHTS = 80 * BLOCK + 2 * 128_256 * WIDTH + (2 * 80 + 1) * WIDTH  # with the norms


def test_the_model_of_the_lesson_is_llama_3_70b():
    shape = p101.shape_of_model("llama-3-70b")
    assert shape.parameters == WEIGHTS and round(WEIGHTS / 1e9, 1) == 70.6
    assert (shape.layers, shape.width, shape.kv_heads, shape.time) == (80, WIDTH, 8, 8192)
    assert round(BLOCK / 1e6, 1) == 855.6


def tp_limit(chip):
    """By the text's formula."""
    return 3 * BLOCK / (8 * WIDTH) * chip.links[0].bandwidth / chip.flops


@pytest.mark.parametrize("t", [2, 4, 8])
def test_messages_of_tp_against_arithmetic_of_a_block(t):
    sent = 4 * cost.closed_form("all_reduce", "ring", t, 2 * 8192 * WIDTH).sent
    ratio = sent / 450e9 / (6 * BLOCK * 8192 / t / H100.flops)
    assert ratio == pytest.approx((t - 1) / tp_limit(H100), rel=1e-6)


def test_numbers_by_hand():
    sent = cost.closed_form("all_reduce", "ring", 8, 2 * 8192 * 8192).sent / 450e9
    for number, said in (
        (H100.flops / H100.hbm_bandwidth, 296),
        (H100.flops / 450e9, 2200),  # tokens per GPU that dp needs
        (tp_limit(GB200), 14.1),
        (sent, 0.52e-3),  # an all-reduce of activations
        (sent / H100.kernels.nvlink_reached, 0.68e-3),
        (14 * H100.kernels.nvlink_step, 0.07e-3),
        (B200.flops / B200.hbm_bandwidth, 281),  # exercise 1
        (tp_limit(B200), 15.7),
        (B200.flops / B200.links[1].bandwidth, 5625),
    ):
        assert number == pytest.approx(said, rel=0.01)


def test_what_recomputation_and_narrower_products_cost():
    shape, cluster = p101.shape_of_model("llama-3-70b"), cost.Cluster("H100", 1024)

    def products(**layout):
        return cost.step_time(shape, cost.ParallelLayout(**layout), cluster).parts["matmul"]

    ours = products(tp=8, pp=4, dp=32, microbatch=1, microbatches=16, zero_stage=1)
    planned = {"tp": 4, "pp": 1, "dp": 256, "microbatch": 2, "microbatches": 1, "zero_stage": 3}
    assert ours - products(**planned) == pytest.approx(0.2, abs=0.05)
    recomputed = products(**planned, recompute="full")
    assert recomputed - products(**planned) == pytest.approx(0.7, abs=0.05)
