"""A Llama on any layout is one process, to ten digits: with fewer heads of keys and values than of
queries, rotary positions on every pipeline stage and in every part of the time, norms that see
some of the time, and three matrices in an MLP.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from parallel101.models.llama import Llama, LlamaConfig
from parallel101.models.plans import GPT_PLAN, LLAMA_PLAN
from tests.trainers.cases import (
    OPTIMIZERS,
    Case,
    Task,
    on_mesh,
    seeded,
    text,
    unlike_one_process,
    world_size,
)
from tests.trainers.test_hybrid import BY_SHAPE, INTERLEAVED, TIME, V_SHAPED


def llama(tied=False, **options):
    sizes = {"context": 7, "layers": 2, "heads": 8, "kv_heads": 4, "width": 32, "hidden": 20}
    return seeded(Llama(LlamaConfig(13, **{**sizes, **options}, tied=tied)))


UNTIED = Task(llama, next_token_loss, text)
TIED = Task(partial(llama, tied=True), next_token_loss, text)
AGAIN = {"sequence_parallel": True, "regather": True}


def case(mesh, optimizer="adamw", task=UNTIED, **options):
    if "tp" in mesh and "plan" not in options:
        options["loss_fn"] = p101.vocabulary_cross_entropy
    return mesh, Case(task, on_mesh(mesh), optimizer, 0.05, options)


CASES = [
    case("dp 2", accumulate=2, recompute="selective"),
    case("dp 2", BY_SHAPE, zero_stage=3, task=TIED, recompute="full"),
    case("tp 2", task=TIED),
    case("tp 2", BY_SHAPE, accumulate=2, recompute="full", **TIME),
    case("tp 2", plan={n: s for n, s in LLAMA_PLAN.items() if s != "vocabulary"}, **AGAIN),
    case("pp 2", **INTERLEAVED),
    case("pp 2", "sgd", microbatches=5, schedule="gpipe", recompute="full"),
    case("cp 2"),
    case("cp 2", context="ulysses", zero_stage=2, accumulate=2, recompute="selective"),
    case("dp 3", zero_stage=1),
    case("pp 3", microbatches=3, schedule="zb-h1", task=TIED),
    case("cp 3", context="contiguous", recompute="full"),
    case("tp 4", recompute="selective", **AGAIN),
    case("pp 2, dp 2", schedule=V_SHAPED, zero_stage=2),
    case("pp 2, tp 2", BY_SHAPE, microbatches=3, task=TIED, **TIME),
    case("cp 2, pp 2", microbatches=3, schedule="zb-h1", recompute="selective"),
    case("cp 2, pp 2", **INTERLEAVED, context="ulysses", recompute="full", task=TIED),
    case("tp 2, cp 2", zero_stage=3, recompute="full", context="contiguous", **TIME),
    case("tp 2, cp 2", context="ulysses", **AGAIN),
    case("cp 2, tp 2, pp 2", microbatches=2, zero_stage=3, recompute="full", **AGAIN),
    case("dp 2, cp 2, pp 2", microbatches=3, zero_stage=2, schedule="zb-h1", task=TIED),
]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_each_layout_is_one_process(n):
    cases = [of_mesh for mesh, of_mesh in CASES if world_size(mesh) == n]
    program = partial(unlike_one_process, steps=3 if n == 3 else 2)
    assert p101.launch(program, cases, world_size=n, backend="sim").results == [[]] * n


def verified(precision, cases):
    """What verify says of each; in 32 bits, or less."""
    found = []
    for of in cases:
        options = {"loss_fn": of.task.loss_fn, "precision": precision, **of.options}
        trainer = of.trainer(
            of.task.build().float(), optimizer=OPTIMIZERS[of.optimizer], verify=True, **options
        )
        batch = trainer.share(text(0))
        found.append(str(trainer.verify(*batch)).splitlines()[0])
        trainer.step(*batch)
    return found


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_verify_accepts_it_in_all_precisions(precision):
    cases = [
        case("cp 2, pp 2", microbatches=2, recompute="full")[1],
        case("tp 2, dp 2", zero_stage=2, **TIME)[1],
    ]
    for words in p101.launch(verified, precision, cases, world_size=4, backend="sim").results:
        assert words == ["equal to one process"] * 2


# ── the plan ──


def plan_of(plan, loss_fn):
    trainer = p101.TensorParallelTrainer(
        llama(), loss_fn, OPTIMIZERS["sgd"], plan=plan, verify=False
    )
    text = str(trainer.describe())
    return [line.strip() for line in text.splitlines() if re.search(": (column|row|voc)", line)]


def test_auto_finds_the_plan():
    def both(loss_fn):
        return [plan_of(plan, loss_fn) for plan in (LLAMA_PLAN, "auto")]

    loss_fn = p101.vocabulary_cross_entropy
    by_hand, auto = p101.launch(both, loss_fn, world_size=2, backend="sim").results[0]
    assert len(by_hand) == len(LLAMA_PLAN) == 9
    assert [re.sub(r"\(heads=\d\)$", "", line) for line in auto] == by_hand
    assert [line for line in auto if "heads=4" in line] == [
        "blocks.*.attention.key (2 modules): column(heads=4)",
        "blocks.*.attention.value (2 modules): column(heads=4)",
    ]


# ── what is refused, and what to do ──

CUT = {"loss_fn": p101.vocabulary_cross_entropy}
REFUSED = {
    "more ranks than heads of keys": (
        "tp 4",
        {"kv_heads": 2},
        CUT,
        r"'blocks\.0\.attention\.key' has 2 heads, which 4 ranks cannot share equally: expected a "
        "tensor axis that divides 2, or a plan without",
    ),
    "heads of keys on each rank": (
        "tp 2, cp 2",
        {"kv_heads": 2},
        {**CUT, "context": "ulysses"},
        "4 heads of q and 1 of k and v over 2 ranks: .* Use fewer ranks, or ring_attention",
    ),
    "the plan of another model": (
        "tp 4",
        {},
        {**CUT, "plan": GPT_PLAN, "verify": True},
        "cut over 4 ranks RuntimeError was raised: The size of tensor a",
    ),
    "and along time": (
        "tp 4",
        {},
        {**CUT, **TIME, "plan": GPT_PLAN, "verify": True},
        "cut over 4 ranks RuntimeError was raised: The size of tensor a",
    ),
}


def errors():
    found = {}
    for name, (mesh, sizes, options, _) in REFUSED.items():
        try:
            trainer = on_mesh(mesh)(llama(**sizes), optimizer=torch.optim.SGD, **options)
            trainer.step(*trainer.share(text(0)))
        except (ValueError, p101.NotEqualError) as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_trained_is_refused_in_the_same_words_on_every_rank():
    first, *others = p101.launch(errors, world_size=4, backend="sim").results
    assert others == [first] * 3
    for name, (*_, words) in REFUSED.items():
        assert re.search(words, first[name]), (name, first.get(name))
