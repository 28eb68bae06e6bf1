"""Lesson 08: a step by hand on three axes equals one process, its mistakes do not, and the
answers to its exercises are right.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.analysis.axis_traffic import axis_traffic
from parallel101.models.gpt import GPT
from parallel101.models.text import TextBatches
from tests.lessons.lesson import answer, definitions, read

LESSON = definitions(
    "08_three_axes", "AXES", "RANKS", "text", "tokenizer", "batches", "small", "STAGES"
)


def batch(samples=16):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True)


def by_hand(**options):
    return p101.launch(LESSON["by_hand"], batch(), world_size=8, backend="sim", **options)


def far(run, norm=None):
    return max(LESSON["distance"](run, LESSON["one_process"](batch(), norm)))


def test_by_hand_equals_one_process():
    assert far(by_hand()) < 1e-12


def over_dp_pp(weights, mesh):
    return float(p101.all_reduce(LESSON["squares"](weights), group=mesh["dp", "pp"]).sqrt())


NORMS = {
    "the answer": (answer("08_three_axes", "clip-answer", LESSON), True),
    "as it is given": (LESSON["whole_norm"], False),
    "of all ranks": (LESSON["over_all"], False),
    "of other groups": (over_dp_pp, False),
}


@pytest.mark.parametrize(("norm", "right"), NORMS.values(), ids=list(NORMS))
def test_clipping_by_the_norm_that_the_reader_writes(norm, right):
    apart = far(by_hand(norm=norm), LESSON["own"])
    assert apart < 1e-12 if right else apart > 1e-3


def test_a_share_for_every_rank_differs_and_one_seed_makes_equal_halves():
    assert far(by_hand(share=LESSON["along_all"])) > 1e-3
    results = by_hand(blocks=LESSON["same_seed"], steps=5).results
    assert all(
        torch.equal(a, b) for rank in (0, 2, 4, 6) for a, b in zip(results[rank], results[rank + 1])
    )


@functools.cache
def sent(samples=16, **options):
    """Bytes that rank 0 sends along each axis in a step of the lesson's GPT."""
    batches = TextBatches(LESSON["batches"].tokens, batch=samples, context=32)
    run = p101.launch(
        LESSON["paced_steps"], batches=batches, world_size=8, backend="sim", **options
    )
    return {of.axis: of.sent(0) for of in axis_traffic(run.trace, "step")[1]}


def test_exercise_1_twice_the_batch():
    small = LESSON["small"]
    table = 4 * p101.split_sizes(small.vocabulary, 2)[0] * small.width
    one, two = sent(16), sent(32)
    assert (
        two["dp"] == one["dp"]
        and two["tp"] == 2 * one["tp"]
        and two["pp"] - table == 2 * (one["pp"] - table)
    )


def test_exercise_2_four_stages():
    (answers,) = (cell.source for cell in read("08_three_axes").cells if cell.id == "exercises")
    for stages in (2, 4):
        idle = p101.schedule("1f1b", stages=stages, microbatches=4).time().bubble_rate
        assert f"= {100 * idle:.0f}\\,\\%$" in answers

    def stages_of():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
        trainer = p101.HybridTrainer(
            GPT(LESSON["small"]), p101.vocabulary_cross_entropy, LESSON["adamw"], mesh=mesh
        )
        return set(trainer.local)

    results = p101.launch(stages_of, world_size=8, backend="sim").results
    assert {"norm.weight", "norm.bias"} in results


def test_exercise_3_zero_3_with_four_microbatches():
    assert sent(zero_stage=3)["dp"] / sent()["dp"] == pytest.approx(6, rel=0.1)
