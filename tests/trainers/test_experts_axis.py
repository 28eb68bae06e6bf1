"""The axis ep: with experts on several ranks, a trainer is one process, to ten digits, the router's
gradient and the balancing loss included. It sends each row to its expert and back, and no more.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, balanced_next_token_loss
from tests.trainers.cases import (
    OPTIMIZERS,
    Case,
    Task,
    mesh_of,
    on_mesh,
    seeded,
    text,
    unlike_one_process,
    world_size,
)

WIDTH, LAYERS = 8, 2


def mixture(experts=4, **options):
    config = GPTConfig(
        vocabulary=13, context=7, layers=LAYERS, heads=4, width=WIDTH, experts=experts, **options
    )
    return seeded(GPT(config))


def one_sample(step):
    """So all ranks but one have none, and still compute for the others."""
    return tuple(t[:1] for t in text(step))


LOSS = partial(balanced_next_token_loss, weight=0.5)
DROPPING = Task(partial(mixture, capacity=1.0), LOSS, text)
FIVE = Task(partial(mixture, 5, top_k=1), LOSS, text)  # which two ranks can't share evenly
ALONE = Task(partial(mixture, 5, top_k=1), LOSS, one_sample)
UNBALANCED = Task(mixture, partial(LOSS, weight=0.0), text)  # so that time may be cut
HEADS = dict.fromkeys(("*.query", "*.key", "*.value"), p101.column(heads=4))
PLAN = {**HEADS, "*.out": "row", "*.mlp.experts": "experts"}


def case(mesh, task=DROPPING, optimizer="adamw", **options):
    return mesh, Case(task, on_mesh(mesh), optimizer, 0.05, options)


CASES = [
    case("ep 1", FIVE),
    case("ep 2", FIVE, accumulate=2),
    case("ep 2", ALONE, accumulate=2, zero_stage=3),
    case("ep 2", recompute="full"),
    case("pp 2", microbatches=3, zero_stage=1),  # the balancing loss travels
    case("ep 3", ALONE),
    case("ep 4", optimizer="adamw by shape", accumulate=3),
    case("dp 2, ep 2"),
    case("ep 2, dp 2", FIVE, zero_stage=1),
    case("dp 2, ep 2", zero_stage=2, accumulate=2),
    case("dp 2, ep 2", FIVE, zero_stage=3),
    case("pp 2, ep 2", FIVE, microbatches=2, zero_stage=3, schedule="zb-h1"),
    case("ep 2, tp 2", plan=PLAN, zero_stage=1),
    case("ep 2, cp 2", UNBALANCED, zero_stage=1),
    case("dp 2, ep 2, tp 2", zero_stage=3, plan=PLAN),
    case("dp 2, cp 2, ep 2", UNBALANCED, zero_stage=3),
    case("ep 2, pp 2, dp 2", microbatches=2, zero_stage=2, schedule="zb-h1", recompute="full"),
]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_each_mesh_is_one_process(n):
    cases = [of_mesh for mesh, of_mesh in CASES if world_size(mesh) == n]
    program = partial(unlike_one_process, steps=2)
    assert p101.launch(program, cases, world_size=n, backend="sim").results == [[]] * n


def test_by_the_rules_of_nccl():
    cases = [of_mesh for mesh, of_mesh in CASES if mesh in ("ep 2, pp 2, dp 2", "dp 2, cp 2, ep 2")]
    run = p101.launch(
        partial(unlike_one_process, steps=2), cases, world_size=8, backend="sim", rules="nccl"
    )
    assert run.results == [[]] * 8


def test_on_gloo():
    cases = [of_mesh for mesh, of_mesh in CASES if mesh == "ep 2"]
    program = partial(unlike_one_process, steps=2)
    assert p101.launch(program, cases, world_size=2).results == [[]] * 2


# ── what is sent ──


def rows_by_expert(tokens):
    """How many rows of these samples each expert of each layer gets: one process asks its own."""
    model, found = mixture(), []
    for block in model.blocks:
        block.mlp.experts.register_forward_pre_hook(
            lambda _, args: found.append(args[1].bincount(minlength=4))
        )
    model(tokens)
    return torch.stack(found)


def bytes_of_the_first_step():
    tokens, targets = text(0)

    def program():
        trainer = on_mesh("dp 2, ep 2")(mixture(), LOSS, torch.optim.AdamW)
        with p101.span("step"):
            trainer.step(*trainer.share((tokens, targets)))

    trace = p101.launch(program, world_size=4, backend="sim").trace
    begun = {span.rank: span.start for span in trace.spans("step")}
    sent = Counter()
    for e in trace.events:
        if e.kind == "send" and e.posted >= begun[e.rank]:
            sent[e.group.axis] += e.nbytes
    return sent, tokens


def test_bytes_along_each_axis_equal_theory():
    sent, tokens = bytes_of_the_first_step()
    away = 0  # rows whose expert is on the other rank along ep
    for rank, of_rank in enumerate(tokens.split(p101.split_sizes(len(tokens), 4))):
        rows = rows_by_expert(of_rank)  # rank 0 of ep has experts 0 and 1
        away += int(rows[:, 2:].sum() if rank % 2 == 0 else rows[:, :2].sum())
    counts = 4 * LAYERS * 2 * 8  # each of 4 ranks tells another about 2 experts
    # to the expert and back, forward and backward
    assert sent["ep"] == 4 * away * WIDTH * 8 + counts
    model = mixture()
    of_experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.nbytes for p in model.parameters()) - of_experts
    # an all-reduce over n ranks sends 2(n − 1) times the bytes: dense over four ranks; half of the
    # experts over each pair along dp
    assert sent["dp"] == 2 * of_experts
    assert 6 * dense <= sent["dp_ep"] <= 6 * dense + 64 * len(list(model.parameters()))


def test_each_rank_holds_its_experts_only():
    def program():
        trainer = on_mesh("dp 2, ep 2")(mixture(), LOSS, torch.optim.AdamW, zero_stage=1)
        trainer.step(*trainer.share(text(0)))
        held = {name: len(p) for name, p in trainer.model.named_parameters() if "experts" in name}
        return set(held.values()), list(trainer.describe().bytes["weights"])

    of_experts, weights = p101.launch(program, world_size=4, backend="sim").results[0]
    model = mixture()
    away = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) // 2
    assert of_experts == {2}
    assert weights == [sum(p.nbytes for p in model.parameters()) - away] * 4


# ── what is refused, on all ranks ──


class WithAName(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return self.experts(x)


REFUSED = {
    "too few": (partial(mixture, 2), {}, "2 experts, too few for 3 ranks"),
    "none": (lambda: nn.Linear(2, 2), {}, 'no module named "experts"'),
    "no such module": (mixture, {"plan": {"*.mlps": "experts"}}, "'.*mlps' matches no module"),
    "not stacked": (lambda: WithAName(nn.Linear(4, 3)), {}, "expected a forward of"),
    "of other sizes": (
        lambda: WithAName(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))),
        {},
        r"have \[3, 4\] entries",
    ),
    "too few samples": (
        mixture,
        {"mesh": "pp 1, ep 3", "microbatches": 4},
        "a pipeline with experts needs one for each of 4 microbatches",
    ),
}


def errors():
    found = {}
    for name, (build, options, _) in REFUSED.items():
        options = {"loss_fn": LOSS, **options, "mesh": mesh_of(options.get("mesh", "ep 3"))}
        try:
            trainer = p101.HybridTrainer(build(), optimizer=OPTIMIZERS["sgd"], **options)
            trainer.step(*trainer.share(text(0)))
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_dealt_out_is_refused_on_every_rank():
    first, *others = p101.launch(errors, world_size=3, backend="sim").results
    assert others == [first] * 2
    for name, (*_, words) in REFUSED.items():
        assert re.search(words, first.get(name, "")), (name, first.get(name))


def test_without_the_axis_its_style_is_refused():
    def program():
        on_mesh("tp 2")(mixture(), LOSS, OPTIMIZERS["sgd"], plan=PLAN)

    with pytest.raises(p101.RankFailed, match="is for the axis 'ep'"):
        p101.launch(program, world_size=2, backend="sim")
