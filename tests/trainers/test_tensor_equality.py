"""Tensor parallel on n ranks is one process, to ten digits: losses, gradients and weights; and the
messages are those of theory.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    OPTIMIZERS,
    TASKS,
    WITHOUT_HEAD,
    Case,
    Task,
    on_mesh,
    randn,
    rows,
    seeded,
    setting,
    text,
    unlike_one_process,
)

STEPS = 3


class FusedAttention(nn.Module):
    """Twelve heads of two features, their query, key and value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 72), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class ChangesInPlace(nn.Module):
    """In an evaluation it changes its input between two layers that take it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        x = x + 1 if torch.is_grad_enabled() else x.add_(1)
        return self.down(up * self.gate(x))


class Called(nn.Module):
    """A module of the name `sequence` tells no order."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = MLP([4, 7, 3])

    def forward(self, x: Tensor) -> Tensor:
        return self.sequence(x)


def chain() -> nn.Module:
    middle = nn.Linear(7, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 3)
    return seeded(nn.Sequential(nn.Linear(4, 7), nn.GELU(), *middle))


def fused() -> nn.Module:
    middle = FusedAttention(), nn.LayerNorm(8), FusedAttention()
    return seeded(nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8)))


def with_embedding() -> nn.Module:
    layers = nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6), nn.Linear(6, 13)
    return seeded(nn.Sequential(nn.Embedding(13, 6, padding_idx=4), *layers))


def computed_again() -> nn.Module:
    """The activations of each block are computed again in backward."""
    model = TASKS["tied gpt"].build()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def features(step: int) -> tuple[Tensor, Tensor]:
    return randn(step, 5, 6, 8), randn(100 + step, 5, 6, 8)


def ignoring_4(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=4)


GPT, UNTIED = TASKS["tied gpt"], TASKS["untied gpt"]
CHAIN = {"0": "column", "2": "row", "3": "column", "4": "row"}
EMBEDDING = {"0": "vocabulary", "2": "column", "4": "row", "5": "vocabulary"}
FUSED = {"*.qkv": p101.column(parts=3, heads=12), "*.out": "row"}
IN_PLACE = {"0.up": "column", "0.gate": "column", "0.down": "row"}
CUT_HEAD = {"loss_fn": p101.vocabulary_cross_entropy}
TIME = {"sequence_parallel": True}
TRAINED = {  # what one process does, and how the ranks do it
    "mlp": (Task(lambda: seeded(MLP([4, 7, 6, 5, 3])), F.mse_loss, rows(4, 3)), {}),
    "last layer alone": (Task(lambda: seeded(MLP([4, 7, 6, 3])), F.mse_loss, rows(4, 3)), {}),
    "lecture": (TASKS["mlp"], {"plan": {"layers.*": "column_gather"}}),
    "called sequence": (
        Task(lambda: seeded(Called()), F.mse_loss, rows(4, 3)),
        {"plan": {"sequence.layers.0": "column_gather"}},
    ),
    "chain": (Task(chain, F.mse_loss, rows(4, 3)), {"plan": CHAIN}),
    "embedding": (Task(with_embedding, next_token_loss, text), {**CUT_HEAD, "plan": EMBEDDING}),
    "gpt": (GPT, CUT_HEAD),
    "gpt, whole head": (UNTIED, {"plan": WITHOUT_HEAD}),
    "fused": (Task(fused, F.mse_loss, features), {"plan": FUSED}),
    "ignored targets": (
        GPT._replace(loss_fn=ignoring_4),
        {"loss_fn": partial(p101.vocabulary_cross_entropy, ignore_index=4)},
    ),
    "untied gpt, time cut": (UNTIED, {**CUT_HEAD, **TIME}),
    "gpt, time cut": (GPT, {**CUT_HEAD, **TIME}),
    "whole head, time cut": (UNTIED, {"plan": WITHOUT_HEAD, **TIME}),
    "fused, time cut": (Task(fused, F.mse_loss, features), {"plan": FUSED, **TIME}),
    "computed again": (GPT._replace(build=computed_again), {**CUT_HEAD, **TIME}),
    "changed in place": (
        Task(lambda: seeded(nn.Sequential(ChangesInPlace())), F.mse_loss, features),
        {"plan": IN_PLACE, **TIME},
    ),
}


def case(name, optimizer="adamw", clip_norm=0.05, trainer=p101.TensorParallelTrainer, **more):
    task, options = TRAINED[name]
    return Case(task, trainer, optimizer, clip_norm, {"verify": False, **options, **more})


def cases(names, world_size):
    found = []
    for i, name in enumerate(names):
        optimizer, clip_norm, accumulate = setting(i, world_size)
        if name == "ignored targets":  # a mean over the targets that count, not over samples
            accumulate = 1
        found.append(case(name, optimizer, clip_norm, accumulate=accumulate))
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, list(TRAINED)), (3, list(TRAINED)[::2]), (4, list(TRAINED)[1::2])],
    ids=["2", "3", "4"],
)
def test_equal_to_one_process(world_size, names):
    run = p101.launch(
        partial(unlike_one_process, steps=STEPS),
        cases(names, world_size),
        world_size=world_size,
        backend="sim",
    )
    assert run.results == [[]] * world_size


@pytest.mark.parametrize("where", [{}, {"backend": "sim", "rules": "nccl"}], ids=["gloo", "nccl"])
def test_on_real_ranks_and_by_the_rules_of_nccl(where):
    few = cases(["lecture", "gpt", "whole head, time cut", "fused, time cut"], 2)
    run = p101.launch(partial(unlike_one_process, steps=2), few, world_size=2, **where)
    assert run.results == [[]] * 2


def test_with_data_parallel():
    """Weight gradients that are computed while the all-reduce over tp is in flight are
    synchronized over dp, each once.
    """
    several = [
        case(name, trainer=on_mesh("dp 2, tp 2"), **options)
        for name, options in (
            ("mlp", {"overlap": False}),
            ("gpt, time cut", {"bucket_bytes": 1000}),
            ("gpt", {"zero_stage": 1}),
            ("mlp", {"zero_stage": 2}),
            ("gpt, time cut", {"zero_stage": 3}),
        )
    ]
    run = p101.launch(partial(unlike_one_process, steps=2), several, world_size=4, backend="sim")
    assert run.results == [[]] * 4


def test_in_a_pipeline_that_splits_backward():
    """I starts the all-reduce of the input's gradient and W computes the weight gradient, each
    once a layer and microbatch.
    """
    runs = []
    for schedule in ("zb-h1", "1f1b"):
        options = {"schedule": schedule, "microbatches": 3}
        found = [case("untied gpt, time cut", trainer=on_mesh("pp 2, tp 2"), **options)]
        program = partial(unlike_one_process, steps=2)
        runs.append(p101.launch(program, found, world_size=4, backend="sim"))
        assert runs[-1].results == [[]] * 4
    split, whole = (run.trace for run in runs)
    assert bytes_by_axis(split)["tp"] == bytes_by_axis(whole)["tp"]
    for rank in range(4):
        computed = [e for e in split.spans("weight gradient") if e.rank == rank]
        assert len(computed) == 3 * 2, "a W for each microbatch and step, and none in between"


def in_other_dtypes():
    found = []
    for autocast in (None, torch.bfloat16):
        alone = {"group": [torch.distributed.get_rank()], "loss_fn": next_token_loss}
        for build, options in (
            (p101.DataParallelTrainer, alone),
            (p101.TensorParallelTrainer, CUT_HEAD | TIME),
        ):
            options = {"optimizer": OPTIMIZERS["sgd"], "verify": False, **options}
            trainer = build(UNTIED.build().float(), autocast=autocast, **options)
            trainer.step(*text(0))
            found.append((trainer.step(*text(0)), trainer.gradients()))
    return found


def test_float32_and_bfloat16_autocast():
    for whole, mine, whole_half, half in p101.launch(
        in_other_dtypes, world_size=3, backend="sim"
    ).results:
        assert mine[0] == pytest.approx(whole[0], rel=1e-5)
        assert half[0] == pytest.approx(whole_half[0], rel=0.02)
        torch.testing.assert_close(mine[1], whole[1], rtol=1e-3, atol=1e-5)
        assert {g.dtype for g in half[1].values()} == {torch.float32}


def wrong_inputs():
    sgd = OPTIMIZERS["sgd"]
    of_features = p101.TensorParallelTrainer(
        fused(), F.mse_loss, sgd, plan=FUSED, verify=False, **TIME
    )
    with pytest.raises(ValueError, match=r"expected \(batch, time, features\)"):
        of_features.step(randn(1, 6, 8), randn(2, 6, 8))
    of_text = p101.TensorParallelTrainer(GPT.build(), optimizer=sgd, verify=False, **CUT_HEAD)
    with pytest.raises(IndexError, match="tokens range from 0 to 13, but the embedding has 13"):
        of_text.step(torch.tensor([[0, 13]]), torch.tensor([[0, 1]]))


def test_inputs_that_the_layers_can_not_take_are_errors_on_every_rank():
    p101.launch(wrong_inputs, world_size=2, backend="sim")


# ── messages ──


def bytes_by_axis(trace):
    """Of activations and gradients, which are float64, in the steps."""
    begun = {span.rank: span.start for span in reversed(trace.spans("step"))}
    sent = {}
    for event in trace.events:
        in_a_step = event.posted >= begun.get(event.rank, 0.0)
        if event.kind == "send" and "float64" in event.dtype and in_a_step:
            sent[event.group.axis] = sent.get(event.group.axis, 0) + event.nbytes
    return sent


def one_step(name):
    task, options = TRAINED[name]
    arguments = {"loss_fn": task.loss_fn, "optimizer": OPTIMIZERS["sgd"], **options}
    trainer = on_mesh("dp 2, tp 2")(task.build(), **arguments)
    batch = tuple(t[:5] for t in task.batch(0))
    p101.barrier()
    with p101.span("step"):
        trainer.step(*trainer.share(batch))


ACTIVATIONS, POSITIONS = 5 * 6 * 24, 5 * 6  # of the whole batch, which dp shares out
# query, key and value share one all-reduce; a block has two in each direction, the embedding
# one, the head one, and the loss two
OF_A_GPT = (4 * 2 + 1 + 1) * ACTIVATIONS + (POSITIONS + 2 * 2) + 2 * POSITIONS
# norms, biases of rows, positions: summed by each of two replicas
PARTIAL = 2 * (4 * 24 + 2 * 24) + 2 * 24 + 7 * 24
ALL_REDUCED = {"mlp": 5 * (6 + 3 + 6), "gpt": OF_A_GPT, "gpt, time cut": OF_A_GPT + 2 * PARTIAL}


@pytest.mark.parametrize("name", ALL_REDUCED)
def test_bytes_along_tp_equal_theory(name):
    """With sequence parallel the same bytes, and the sums of gradients that are parts."""
    trace = p101.launch(one_step, name, world_size=4, backend="sim").trace
    assert bytes_by_axis(trace)["tp"] == 2 * 8 * ALL_REDUCED[name]


def test_with_the_algorithm_that_the_trainer_was_given():
    rings = [case(n, overlap=False, algorithm="ring") for n in ("gpt", "gpt, time cut")]
    program = partial(unlike_one_process, steps=2)
    run = p101.launch(program, rings, world_size=3, backend="sim")
    assert run.results == [[]] * 3
    passes = [span for name in ("forward", "backward") for span in run.trace.spans(name)]
    sends = [e for e in run.trace.events if e.kind == "send" and e.nbytes > 1000]  # not the loss's
    to = {
        (e.rank, e.peer)
        for e in sends
        if any(s.rank == e.rank and s.start <= e.posted < s.end for s in passes)
    }
    assert to == {(0, 1), (1, 2), (2, 0)}


def a_pair(overlap=True):
    """A column layer whose input has a gradient, and a row layer."""
    layers = nn.Linear(4, 4), nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 5)
    trainer = p101.TensorParallelTrainer(
        seeded(nn.Sequential(*layers)),
        F.mse_loss,
        OPTIMIZERS["sgd"],
        plan={"1": "column", "3": "row"},
        overlap=overlap,
        verify=False,
    )
    trainer.step(randn(1, 5000, 4), randn(2, 5000, 5))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_all_reduce_is_in_flight_while_the_weight_gradient_is_computed(overlap):
    trace = p101.launch(a_pair, overlap, world_size=2, trace=True).trace
    for rank in range(2):
        (backward,) = (e for e in trace.spans("backward") if e.rank == rank)
        computed = next(e for e in trace.spans("weight gradient") if e.rank == rank)
        posted = [
            e.posted
            for e in trace.events
            if e.rank == rank and e.kind in ("send", "recv") and e.group.axis == "tp"
            if backward.start < e.posted < backward.end
        ]
        before, after = (2, 2) if overlap else (4, 0)  # its two halves, each both ways
        assert len([t for t in posted if t < computed.start]) == before
        assert len([t for t in posted if t > computed.end]) == after
