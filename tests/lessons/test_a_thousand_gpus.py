"""Lesson 11: the formulas and numbers of the text and of the exercises follow from the package."""

from __future__ import annotations

import math
import re

import pytest

import parallel101 as p101
from parallel101 import cost
from tests.lessons.lesson import prose, read

NAME = "11_a_thousand_gpus"
H100 = cost.CHIPS["H100"]
WIDTH, HIDDEN, KV = 8192, 28_672, 1024
BLOCK = 2 * WIDTH**2 + 2 * WIDTH * KV + 3 * WIDTH * HIDDEN
WEIGHTS = 80 * BLOCK + 2 * 128_256 * WIDTH + (2 * 80 + 1) * WIDTH  # with the norms


def test_the_model_of_the_lesson_is_llama_3_70b():
    shape = p101.shape_of_model("llama-3-70b")
    assert shape.parameters == WEIGHTS and round(WEIGHTS / 1e9, 1) == 70.6
    assert (shape.layers, shape.width, shape.kv_heads, shape.time) == (80, WIDTH, 8, 8192)
    assert round(BLOCK / 1e6, 1) == 855.6


def test_when_a_product_is_bound_by_memory():
    assert H100.flops / H100.hbm_bandwidth == pytest.approx(296, abs=0.5)
    assert cost.matmul(309, WIDTH, HIDDEN, "H100").bound == "memory"
    assert cost.matmul(310, WIDTH, HIDDEN, "H100").bound == "flops"


@pytest.mark.parametrize("t", [2, 4, 8])
def test_messages_of_tp_against_arithmetic_of_a_block(t):
    tokens = 8192
    sent = 4 * cost.closed_form("all_reduce", "ring", t, 2 * tokens * WIDTH).sent
    ratio = sent / 450e9 / (6 * BLOCK * tokens / t / H100.flops)
    limit = 3 * BLOCK / (8 * WIDTH) * 450e9 / H100.flops
    assert ratio == pytest.approx((t - 1) / limit, rel=1e-6)
    assert limit == pytest.approx(17.8, abs=0.05)


def test_tokens_per_gpu_that_dp_needs():
    weights = 10**9
    for bandwidth, needed in ((450e9, 2200), (400e9, 2475)):
        seconds = 2 * 2 * weights / bandwidth
        assert 4 * weights * needed / H100.flops == pytest.approx(seconds)


def test_mfu_of_llama_3_70b_by_palms_formula():
    step = p101.plan(
        "llama-3-70b",
        gpus=1024,
        batch_tokens=2**22,
        layout={"tp": 8, "pp": 4, "dp": 32, "cp": 1, "microbatch": 1, "chunks": 1}
        | {"recompute": "none", "zero_stage": 1, "sequence_parallel": True},
        simulate=0,
        progress=False,
    ).best
    per_token = 6 * WEIGHTS + 12 * 80 * WIDTH * 8192
    assert step.time.model_flops / 2**22 == pytest.approx(per_token, rel=0.02)
    share = 15e12 * per_token / (6.4e6 * 3600 * H100.flops)
    assert share == pytest.approx(0.32, abs=0.005)


def test_exercise_1_a_b200():
    chip = cost.CHIPS["B200"]
    assert chip.flops / chip.hbm_bandwidth == pytest.approx(281, abs=0.5)
    ratio = chip.flops / chip.links[0].bandwidth
    assert ratio == 2500
    assert 3 * BLOCK / (8 * WIDTH) / ratio == pytest.approx(15.7, abs=0.05)
    assert chip.flops / chip.links[1].bandwidth == 5625
    gb200 = cost.CHIPS["GB200"]
    ratio = gb200.flops / gb200.links[0].bandwidth
    assert 3 * BLOCK / (8 * WIDTH) / ratio == pytest.approx(14.1, abs=0.05)


def test_what_recomputation_and_narrower_products_cost():
    seconds = {
        (tp, recompute): p101.plan(
            "llama-3-70b",
            gpus=1024,
            batch_tokens=2**22,
            layout=layout | {"tp": tp, "cp": 1, "chunks": 1, "recompute": recompute},
            simulate=0,
            progress=False,
        ).best.parts["matmul"]
        for tp, layout, recompute in (
            (8, {"pp": 4, "dp": 32, "microbatch": 1, "zero_stage": 1}, "none"),
            (4, {"pp": 1, "dp": 256, "microbatch": 2, "zero_stage": 3}, "full"),
        )
    }
    shape, cluster = p101.shape_of_model("llama-3-70b"), cost.Cluster("H100", 1024)
    kept = cost.ParallelLayout(dp=256, tp=4, pp=1, microbatch=2, microbatches=1, zero_stage=3)
    without = cost.step_time(shape, kept, cluster).parts["matmul"]
    assert seconds[8, "none"] - without == pytest.approx(0.2, abs=0.05)
    assert seconds[4, "full"] - without == pytest.approx(0.7, abs=0.05)


def test_an_all_reduce_by_hand_and_on_virtual_gpus():
    nbytes, has = 2 * 8192 * 8192, H100.kernels
    sent = cost.closed_form("all_reduce", "ring", 8, nbytes).sent
    assert sent / 450e9 == pytest.approx(0.52e-3, abs=5e-6)
    assert sent / 450e9 / has.nvlink_reached == pytest.approx(0.68e-3, abs=5e-6)
    assert 14 * has.nvlink_step == pytest.approx(0.07e-3)


def test_exercise_2_the_part_of_attention():
    attention, rest = 12 * 126 * 16_384 * 8192, 6 * 405e9
    assert attention / rest == pytest.approx(0.08, abs=0.005)
    assert 16 * attention / rest == pytest.approx(1.34, abs=0.005)


def test_every_number_of_gpus_in_the_text_is_a_product_of_its_axes():
    for cell in read(NAME).cells:
        for axes in re.findall(r'\{"tp": (\d+), "pp": (\d+), "dp": (\d+)', cell.source):
            assert math.prod(map(int, axes)) == 1024, cell.id
    assert "1,024" in prose(NAME)
