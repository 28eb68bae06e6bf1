"""What is computed or gathered again in backward changes no bit, with dropout, on any layout and
schedule; less is kept, and repeated messages are counted.
"""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.trainers.recompute import modules_to_recompute
from tests.trainers.cases import (
    CUT_HEAD,
    OPTIMIZERS,
    TRAINERS,
    on_mesh,
    on_ranks,
    randn,
    world_size,
)
from tests.trainers.models import TIME

WAYS = ("none", "selective", "full", lambda name: name.endswith("mlp"))
TOKENS = torch.randint(13, (8, 9), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


LAYERS = 2


def gpt(dropout=0.1):
    sizes = {"context": 8, "layers": LAYERS, "heads": 4, "width": 16, "attention": "unfused"}
    config = GPTConfig(13, dropout=dropout, tied=False, **sizes)
    return GPT(config, dtype=torch.float64)


def step(shape, dropout=0.1, count=False, **options):
    """The loss, all gradients, and the peak of activations of a step, if they are counted."""
    torch.manual_seed(3)
    options = (CUT_HEAD if "tp" in shape else {"loss_fn": next_token_loss}) | options
    trainer = on_mesh(shape)(gpt(dropout), optimizer=OPTIMIZERS["sgd"], **options)
    batch = trainer.share(BATCH)
    if options.get("zero_stage") == 3:
        trainer.step(*batch)  # now it knows its order
    with p101.count_activations(trainer) if count else nullcontext() as activations:
        loss = trainer.step(*batch)
    return loss, trainer.gradients(), activations.peak if count else None


SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
LAYOUTS = [
    ("dp 2", {"accumulate": 2}),
    *(("dp 2", {"zero_stage": stage}) for stage in (1, 2, 3)),
    *(("tp 2", options) for options in ({}, TIME, {"overlap": False})),
    *(("pp 2", {"schedule": name, "microbatches": 4}) for name in SCHEDULES),
    ("pp 2", {"schedule": "interleaved", "chunks": 2, "microbatches": 4}),
    ("dp 2, tp 2", {"zero_stage": 3, **TIME}),
    ("tp 2, pp 2", {"schedule": "zb-h1", "microbatches": 4, **TIME}),
    ("dp 2, pp 2", {"schedule": "zb-h1", "microbatches": 4, "zero_stage": 3}),
]
CHANGES = [{"recompute": way} for way in WAYS]
CHANGES_IN_TIME = [{}, {"regather": True}, {"regather": True, "recompute": "full"}]
CASES = [(*layout, CHANGES) for layout in LAYOUTS]
CASES += [(*layout, CHANGES_IN_TIME) for layout in LAYOUTS if "sequence_parallel" in layout[1]]
CASES += [("tp 4", {"overlap": False, **TIME}, CHANGES_IN_TIME)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_bit_changes_and_less_is_kept(case):
    shape, options, changes = CASES[case]

    def every_way():
        return [step(shape, count=True, **options, **change) for change in changes]

    found = on_ranks(world_size(shape), every_way)
    for none, *others in found:
        for loss, of_way, _ in others:
            assert loss == none[0]
            assert all(torch.equal(g, of_way[name]) for name, g in none[1].items())
    # on a first stage; the last one's head and loss are not recomputed
    none, less, least = (peak for _, _, peak in found[0][:3])
    assert least < less < none


# ── which modules ──


@pytest.mark.parametrize(
    ("build", "way", "names"),
    [
        (gpt, "none", []),
        (gpt, "full", ["blocks.0", "blocks.1"]),
        (gpt, "selective", [f"blocks.{i}.attention.core" for i in range(2)]),
        (gpt, lambda name: re.search(r"\.1\b", name), ["blocks.1"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(MLP([2, 2]))), "full", ["1.0"]),
    ],
    ids=["none", "full", "selective", "function", "lists in lists"],
)
def test_which_modules_are_computed_again(build, way, names):
    assert modules_to_recompute(way, build()) == names


def test_a_frozen_norm_can_be_recomputed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()).double()
    train = TRAINERS["naive"](
        model, nn.MSELoss(), OPTIMIZERS["sgd"], recompute=lambda name: name == "1"
    )
    train.step(randn(0, 3, 4), randn(1, 3, 4))


# ── messages ──


def sent_again(shape="tp 2", **options):
    """Bytes that rank 0 sends in a step, and inside of recomputations; and how many these are."""
    trace = p101.launch(step, shape, **options, world_size=world_size(shape), backend="sim").trace
    again = [e for e in trace.spans("recompute") if e.rank == 0]
    inside = sum(
        e.nbytes
        for e in trace.events
        if e.kind == "send" and e.rank == 0
        if any(span.start <= e.posted and e.end <= span.end for span in again)
    )
    return trace.bytes_sent[0], inside, len(again)


@pytest.mark.parametrize("time", [{}, TIME], ids=["whole", "time cut"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_messages_that_are_repeated_are_in_the_trace_and_a_core_has_none(dropout, time):
    activation = 8 * 8 * 8 * 16  # batch, time, features in float64
    plain, selective, full = (sent_again(dropout=dropout, recompute=w, **time) for w in WAYS[:3])
    assert plain[1] == 0 and full[2] == LAYERS and full[0] == plain[0] + full[1]
    # without sequence parallel: two all-reduces of an activation, of which each of two ranks sends
    # as much as it has; the last one is not needed if no mask comes after it
    sums = 2 if dropout else 1
    # two gathers besides; each message is of half an activation
    each = (2 + sums) / 2 if time else sums
    assert full[1] == LAYERS * each * activation
    assert selective == (plain[0], 0, LAYERS)


@pytest.mark.parametrize("shape", ["tp 2", "tp 4"])
def test_each_gather_of_the_forward_is_sent_once_more(shape):
    """query, key and value together; the MLP's first layer; and the head."""
    n, gathers, gathered = world_size(shape), 2 * LAYERS + 1, 8 * 8 * 8 * 16
    once, twice = (sent_again(shape, regather=again, **TIME)[0] for again in (False, True))
    assert twice - once == gathers * (n - 1) * gathered / n
