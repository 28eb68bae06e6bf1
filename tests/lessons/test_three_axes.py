"""Lesson 08: the reader's formula and those for published runs give the bytes and bubbles of a run,
and so do the answers to its exercises.
"""

from __future__ import annotations

import functools

import pytest
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.analysis.traffic import axis_traffic
from parallel101.models.gpt import GPT, GPTConfig
from parallel101.models.text import TextBatches
from tests.lessons.lesson import answer, definitions, source

VALUES = ("AXES", "text", "tokenizer", "batches", "sizes", "config", "small", "STAGES")
LESSON = definitions("08_three_axes", *VALUES)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_bytes_on_tp_that_the_reader_writes(tp):
    counted = LESSON["blocks_on_tp"](tp)
    A = 16 // (4 // tp) * LESSON["small"].context * LESSON["small"].width * 4
    assert answer("08_three_axes", "tp-answer", LESSON)(A, 1, tp) == counted
    assert (LESSON["tp_bytes"](A, 1, tp) == counted) is (tp == 2)


def middle_stage(config, **options):
    """How many weights this rank has, after two recorded steps with four stages."""
    trainer = LESSON["hybrid"](GPT(config), shape=(2, 4, 2), **options)
    for i in range(2):
        with p101.span("step"):
            trainer.step(*trainer.share(LESSON["batches"](i)))
    return sum(p.numel() for p in trainer.owned.values())


# ZeRO-2 sums the gradients of each of the four microbatches, and gathers the weights once
@pytest.mark.parametrize(("zero_stage", "dp_bytes"), [(0, 2 + 2), (1, 2 + 2), (2, 4 * 2 + 2)])
def test_the_bytes_of_published_runs_are_those_of_a_run(zero_stage, dp_bytes):
    """A middle stage of two blocks; the run sends 4 bytes where the lesson counts 2."""
    small = LESSON["small"]
    config = GPTConfig(**vars(small) | {"layers": 8})
    stages = {"layers_per_stage": (2, 2, 2, 5), "zero_stage": zero_stage, "verify": False}
    run = p101.launch(middle_stage, config, **stages, world_size=16, backend="sim")
    rank = 2  # on stage 1
    counted = {of.axis: of.sent(rank) for of in axis_traffic(run.trace, "step")[1]}
    weights, tokens = run.results[rank] * 8 * (1 + (zero_stage > 0)), 8 * small.context
    written = LESSON["Run"](2, 4, 2, weights, 8, small.width, tokens, 4, dp_bytes=dp_bytes)
    expected = LESSON["sent"](written)
    assert counted["tp"] == 2 * expected["tp"]
    assert counted["pp"] == 2 * 2 * expected["pp"], "and our tp ranks send all of it, not halves"
    assert counted["dp"] == pytest.approx(2 * expected["dp"], rel=0.02)


@pytest.mark.parametrize(("chunks", "m"), [(1, 16), (8, 16), (8, 32)])
def test_the_bubbles_of_published_runs_are_those_of_their_schedules(chunks, m):
    run = LESSON["Run"](128, 16, 8, 1, 126, 16384, 1, m, chunks=chunks)
    name = "interleaved" if chunks > 1 else "1f1b"
    times = p101.schedule(name, stages=16, microbatches=m, chunks=chunks).time()
    assert LESSON["bubble"](run) == pytest.approx(times.bubble_rate)


@functools.cache
def sent(samples=16, **options):
    """Bytes that rank 0 sends along each axis in a step of the lesson's GPT."""
    options["batches"] = TextBatches(LESSON["batches"].tokens, batch=samples, context=32)
    run = p101.launch(LESSON["paced_steps"], **options, world_size=8, backend="sim")
    return {of.axis: of.sent(0) for of in axis_traffic(run.trace, "step")[1]}


def test_exercise_1_twice_the_batch():
    small = LESSON["small"]
    table = 4 * p101.split_sizes(small.vocabulary, 2)[0] * small.width
    one, two = sent(16), sent(32)
    assert two["dp"] == one["dp"] and two["tp"] == 2 * one["tp"]
    assert two["pp"] - table == 2 * (one["pp"] - table)


def test_exercise_2_four_stages():
    for stages in (2, 4):
        idle = p101.schedule("1f1b", stages=stages, microbatches=4).time().bubble_rate
        assert f"= {100 * idle:.0f}\\,\\%$" in source("08_three_axes", "exercises")

    def weights_here():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
        call = GPT(LESSON["small"]), p101.vocabulary_cross_entropy, LESSON["adamw"]
        return set(p101.HybridTrainer(*call, mesh=mesh).local)

    assert {"norm.weight", "norm.bias"} in p101.launch(
        weights_here, world_size=8, backend="sim"
    ).results


def test_exercise_3_zero_3_with_four_microbatches():
    assert sent(zero_stage=3)["dp"] / sent()["dp"] == pytest.approx(6, rel=0.1)
