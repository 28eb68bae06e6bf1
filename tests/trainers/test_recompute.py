"""Recomputation gives the same gradients, bit for bit, with dropout, on every trainer and with
every schedule; it keeps less, and its repeated messages are counted.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.trainers.recompute import modules_to_recompute
from tests.trainers.cases import OPTIMIZERS, mesh_of, randn, world_size

WAYS = ("none", "selective", "full", lambda name: name.endswith("mlp"))
TOKENS = torch.randint(13, (8, 9), generator=torch.Generator().manual_seed(0))


def gpt(dropout=0.1, attention="unfused", layers=4):
    config = GPTConfig(
        13, context=8, layers=layers, heads=2, width=16, dropout=dropout, attention=attention
    )
    return GPT(config, dtype=torch.float64)


def gradients(shape, recompute, dropout=0.1, **options):
    """The loss, all gradients, and the peak of activations of a step."""
    torch.manual_seed(3)
    loss_fn = p101.vocabulary_cross_entropy if "tp" in shape else next_token_loss
    trainer = p101.HybridTrainer(
        gpt(dropout),
        loss_fn,
        OPTIMIZERS["sgd"],
        mesh=mesh_of(shape),
        recompute=recompute,
        verify=False,
        **options,
    )
    batch = trainer.share((TOKENS[:, :-1], TOKENS[:, 1:]))
    for _ in range(2 if options.get("zero_stage") == 3 else 1):  # which then knows its order
        with p101.count_activations(trainer) as activations:
            loss = trainer.step(*batch)
    return loss, trainer.gradients(), activations.peak


LAYOUTS = [
    ("dp 2", {"accumulate": 2}),
    *(("dp 2", {"zero_stage": stage}) for stage in (1, 2, 3)),
    ("tp 2", {}),
    ("tp 2", {"sequence_parallel": True}),
    ("tp 2", {"overlap": False}),
    *(
        ("pp 2", {"schedule": name, "microbatches": 4})
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    ),
    ("pp 2", {"schedule": "interleaved", "chunks": 2, "microbatches": 4}),
    ("dp 2, tp 2", {"zero_stage": 3, "sequence_parallel": True}),
    ("tp 2, pp 2", {"schedule": "zb-h1", "microbatches": 4, "sequence_parallel": True}),
    ("dp 2, pp 2", {"schedule": "zb-h1", "microbatches": 4, "zero_stage": 3}),
]


def every_way(shape, options):
    return [gradients(shape, way, **options) for way in WAYS]


@pytest.mark.parametrize(
    ("shape", "options"), LAYOUTS, ids=[f"{shape} {options}" for shape, options in LAYOUTS]
)
def test_gradients_are_the_same_bit_for_bit_and_less_is_kept(shape, options):
    found = p101.launch(every_way, shape, options, world_size=world_size(shape), backend="sim")
    for none, *others in found.results:
        for loss, of_way, _ in others:
            assert loss == none[0]
            for name, g in none[1].items():
                assert torch.equal(g, of_way[name]), name
    # on a first stage; the last one's head and loss are not recomputed
    none, selective, full, _ = (peak for _, _, peak in found.results[0])
    assert full < selective < none


def test_one_process_draws_dropouts_masks_again():
    def run(way):
        torch.manual_seed(3)
        trainer = p101.DataParallelTrainer(gpt(), next_token_loss, OPTIMIZERS["sgd"], recompute=way)
        trainer.step(TOKENS[:, :-1], TOKENS[:, 1:])
        return trainer.gradients(), torch.rand(3)

    none, *others = map(run, WAYS)
    for of_way, after in others:
        assert torch.equal(after, none[1]), "as many random numbers are used up"
        assert all(torch.equal(g, of_way[name]) for name, g in none[0].items())


def test_it_is_verified_and_evaluated_and_two_steps_train():
    trainer = p101.DataParallelTrainer(
        gpt(), next_token_loss, OPTIMIZERS["adamw"], recompute="full", accumulate=2
    )
    batch = TOKENS[:, :-1], TOKENS[:, 1:]
    assert trainer.verify(*batch).equal
    first = trainer.step(*batch)
    for _ in range(5):
        trainer.step(*batch)
    assert trainer.evaluate([batch]) < first


# ── which modules ──


@pytest.mark.parametrize(
    ("build", "way", "names"),
    [
        (gpt, "none", []),
        (gpt, "full", [f"blocks.{i}" for i in range(4)]),
        (gpt, "selective", [f"blocks.{i}.attention.core" for i in range(4)]),
        (gpt, lambda name: re.search(r"\.[01]\b", name), ["blocks.0", "blocks.1"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(MLP([2, 2]))), "full", ["1.0"]),
    ],
    ids=["none", "full", "selective", "function", "lists in lists"],
)
def test_which_modules_are_computed_again(build, way, names):
    assert modules_to_recompute(way, build()) == names


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.layer(x).tanh()


def convolutional():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.Sequential(nn.Sequential(MLP([4, 4])), nn.ModuleDict({"a": layers})["a"])


@pytest.mark.parametrize(
    ("build", "way", "message"),
    [
        (gpt, "everything", 'recompute=\'everything\': expected "none", "selective", "full"'),
        (lambda: MLP([4, 4, 4]), "full", "'full' matches no module of MLP: expected blocks"),
        (lambda: MLP([4, 4, 4]), "selective", "'selective' matches no module of MLP"),
        (gpt, lambda name: name == "blocks.7", "matches no module of GPT: .* embedding, "),
        (
            convolutional,
            lambda name: name == "1",
            "'1.1' is a BatchNorm1d: its forward changes its buffers.*twice.*LayerNorm",
        ),
    ],
    ids=["word", "no blocks", "no core", "no such name", "running statistics"],
)
def test_what_cannot_be_recomputed_is_refused(build, way, message):
    with pytest.raises(ValueError, match=message):
        p101.DataParallelTrainer(build(), F.mse_loss, OPTIMIZERS["sgd"], recompute=way)


def test_a_forward_that_changes_a_buffer_is_refused_in_the_first_step():
    model = nn.Sequential(Counts(), nn.Linear(4, 4))
    trainer = p101.DataParallelTrainer(
        model.double(), F.mse_loss, OPTIMIZERS["sgd"], recompute="full"
    )
    with pytest.raises(RuntimeError, match=r"the forward of '0' changes its buffers.*twice"):
        trainer.step(randn(0, 3, 4), randn(1, 3, 4))


def test_a_frozen_norm_can_be_recomputed():
    model = convolutional().double()
    model[1].eval()
    trainer = p101.DataParallelTrainer(
        model, F.mse_loss, OPTIMIZERS["sgd"], recompute=lambda name: name == "1"
    )
    trainer.step(randn(0, 3, 4), randn(1, 3, 4))


# ── messages ──


def one_step(recompute, dropout, sequence_parallel):
    gradients("tp 2", recompute, dropout, sequence_parallel=sequence_parallel)


def sent_again(way, dropout, sequence_parallel):
    """Bytes that rank 0 sends in a step, and inside of recomputations."""
    trace = p101.launch(
        one_step, way, dropout, sequence_parallel, world_size=2, backend="sim"
    ).trace
    again = [e for e in trace.spans() if e.rank == 0 and e.name == "recompute"]
    inside = sum(
        e.nbytes
        for e in trace.events
        if e.kind == "send"
        and e.rank == 0
        and any(span.start <= e.posted and e.end <= span.end for span in again)
    )
    return trace.bytes_sent[0], inside, len(again)


def test_messages_that_are_repeated_are_in_the_trace_and_a_core_has_none():
    activation, layers = 8 * 8 * 8 * 16, 4  # batch, time, features in float64
    for time in (False, True):
        for dropout in (0.0, 0.1):
            plain, none, _ = sent_again("none", dropout, time)
            full, again, spans = sent_again("full", dropout, time)
            assert none == 0 and spans == layers
            assert full == plain + again
            # without sequence parallel: two all-reduces of an activation, of which each of two
            # ranks sends as much as it has; the last one is not needed if no mask comes after it
            sums = 2 if dropout else 1
            if not time:
                assert again == layers * sums * activation
            else:  # two gathers besides; each message is of half an activation
                assert again == layers * (2 + sums) * activation / 2
            selective, inside, spans = sent_again("selective", dropout, time)
            assert (selective, inside, spans) == (plain, 0, layers)
