"""The axis cp: with each sequence cut along time, a trainer is one process, to ten digits. It sends
what ring attention should, and refuses what it can't cut.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from tests.trainers.cases import (
    OPTIMIZERS,
    TASKS,
    Task,
    gpt,
    mesh_of,
    on_mesh,
    seeded,
    text,
    unlike_one_process,
    world_size,
)
from tests.trainers.test_hybrid import BY_SHAPE, TIME, case

CASES = [
    case("cp 1, dp 1"),
    case("cp 2"),
    case("cp 2", context="ulysses", task="untied gpt"),
    case("cp 3", context="contiguous", accumulate=2),
    case("cp 4", BY_SHAPE),
    case("dp 2, cp 2", accumulate=2),
    case("cp 2, dp 2", zero_stage=1, context="ulysses"),
    case("dp 2, cp 2", zero_stage=2, accumulate=2),
    case("cp 2, dp 2", BY_SHAPE, zero_stage=3),
    case("tp 2, cp 2", zero_stage=3, recompute="full", **TIME),
    case("cp 2, pp 2", microbatches=3, schedule="zb-h1", recompute="selective"),
    case("dp 2, cp 2, tp 2", BY_SHAPE, zero_stage=3, **TIME),
    case("dp 2, cp 2, pp 2", microbatches=3, zero_stage=2, schedule="zb-h1"),
    case("tp 2, cp 2, pp 2", microbatches=2, zero_stage=3, recompute="full", **TIME),
    case("cp 4, tp 2", zero_stage=1, context="contiguous", recompute="selective"),
    case("dp 2, cp 2, tp 2, pp 2", microbatches=2, zero_stage=1, schedule="zb-h1", **TIME),
]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_each_mesh_is_one_process(n):
    cases = [of_mesh for mesh, of_mesh in CASES if world_size(mesh) == n]
    program = partial(unlike_one_process, steps=2)
    assert p101.launch(program, cases, world_size=n, backend="sim").results == [[]] * n


def test_by_the_rules_of_nccl():
    cases = [of_mesh for mesh, of_mesh in CASES if mesh == "dp 2, cp 2, pp 2"]
    run = p101.launch(
        partial(unlike_one_process, steps=2), cases, world_size=8, backend="sim", rules="nccl"
    )
    assert run.results == [[]] * 8


def test_on_gloo():
    cases = [case("cp 2")[1], case("cp 2", context="ulysses", zero_stage=3)[1]]
    program = partial(unlike_one_process, steps=2)
    assert p101.launch(program, cases, world_size=2).results == [[]] * 2


# ── what is sent ──

SAMPLES, LENGTH, WIDTH, LAYERS, KV = 4, 8, 24, 2, 2


def bytes_of_a_step(world):
    """By axis, of a step after the first; and the bytes of the model's gradients."""

    def program():
        model = gpt()
        tokens = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) % 13
        trainer = on_mesh("dp 2, cp 2")(model, next_token_loss, torch.optim.AdamW)
        batch = trainer.share((tokens[:, :-2], tokens[:, 1:-1]))
        trainer.step(*batch)
        with p101.span("second step"):
            trainer.step(*batch)
        return sum(p.nbytes for p in model.parameters())

    run = p101.launch(program, world_size=4, **world)
    sent = Counter()
    begun = {span.rank: span.start for span in run.trace.spans("second step")}
    for e in run.trace.events:
        if e.kind == "send" and e.posted >= begun[e.rank]:
            sent[e.group.axis, e.rank] += e.nbytes
    return sent, run.results[0]


@pytest.mark.parametrize("world", [{"backend": "sim"}, {"trace": True}], ids=["sim", "gloo"])
def test_bytes_along_each_axis_equal_theory(world):
    sent, gradients = bytes_of_a_step(world)
    # keys and values of half of 6 positions, of this rank's 2 samples
    block = KV * SAMPLES // 2 * 3 * WIDTH * 8
    # forward 1; backward 1, and their gradients 2
    assert {sent["cp", rank] for rank in range(4)} == {LAYERS * 4 * block}
    # an all-reduce over all four: 2 · 3/4, but for what 4 doesn't divide
    of_gradients = [sent["dp_cp", rank] for rank in range(4)]
    control = 6 * 8 * 4**2  # what else these ranks agree on
    assert 6 * gradients <= sum(of_gradients) <= 6 * gradients + control


# ── what is refused, on all ranks ──


def small(**options):
    return seeded(GPT(GPTConfig(vocabulary=13, context=7, layers=1, heads=4, width=8, **options)))


class WithoutPositions(nn.Module):
    """It counts positions itself, from 0 on each rank."""

    def __init__(self):
        super().__init__()
        self.gpt = small()

    def forward(self, tokens):
        return self.gpt(tokens)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = seeded(nn.MultiheadAttention(8, 2, batch_first=True))

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def first_position_only(step):
    tokens, targets = text(step)
    return tokens[:, :1], targets[:, :1]


def one_label_a_text(step):
    tokens, targets = text(step)
    return tokens, targets[:, 0]


REFUSED = {
    "shorter than the axis": (small, first_position_only, {}, "a length of 1 along dim 1"),
    "no time": (small, one_label_a_text, {}, r"targets are a tensor of shape \(11,\)"),
    "heads": (small, text, {"context": "ulysses"}, "4 heads of q and 4 of k and v over 3 ranks"),
    "unknown": (small, text, {"context": "ring"}, "expected one of 'zigzag', 'contiguous'"),
    "dropped weights": (partial(small, dropout=0.1), text, {}, "called with dropout_p=0.1"),
    "own attention": (
        partial(small, attention="unfused"),
        text,
        {},
        "other positions must call torch's scaled_dot_product_attention",
    ),
    "own positions": (WithoutPositions, text, {}, "forward must take `positions`"),
    "another model": (
        lambda: nn.Linear(9, 9).double(),
        lambda step: (torch.ones(11, 9).double(),) * 2,
        {"loss_fn": nn.functional.mse_loss},
        "the model raised 'mat1 and mat2 shapes cannot be multiplied .* expected inputs",
    ),
    "torch's own module": (
        lambda: Encoder(),
        lambda step: (
            (torch.randn(11, 7, 8, generator=torch.Generator().manual_seed(0)).double(),) * 2
        ),
        {"loss_fn": nn.functional.mse_loss},
        "the calls of nn.MultiheadAttention aren't seen",
    ),
    "router": (
        partial(small, experts=4),
        text,
        {"loss_fn": lambda outputs, y: next_token_loss(outputs[0], y) + outputs[1].mean()},
        "a router's balance or capacity",
    ),
}


def errors():
    found = {}
    for name, (build, batch, options, _) in REFUSED.items():
        options = {"loss_fn": next_token_loss, "mesh": mesh_of("cp 3"), **options}
        try:
            trainer = p101.HybridTrainer(build(), optimizer=OPTIMIZERS["sgd"], **options)
            trainer.step(*trainer.share(batch(0)))
        except (ValueError, p101.NotEqualError) as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_cut_is_refused_on_every_rank():
    first, *others = p101.launch(errors, world_size=3, backend="sim").results
    assert others == [first] * 2
    for name, (*_, words) in REFUSED.items():
        assert re.search(words, first[name]), (name, first.get(name))


def test_without_the_axis_its_option_is_refused():
    task: Task = TASKS["tied gpt"]
    program = partial(on_mesh("dp 2"), task.build(), task.loss_fn, OPTIMIZERS["sgd"])
    with pytest.raises(p101.RankFailed, match="context='ulysses' is for the axis 'cp'"):
        p101.launch(partial(program, context="ulysses"), world_size=2, backend="sim")
