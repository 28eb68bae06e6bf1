"""The layers of tensor parallelism against the whole model: losses, gradients of inputs and
weights, messages, overlap.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.mesh import split_sizes
from parallel101.trainers.tensor.layers import Region
from parallel101.trainers.tensor.plan import resolve
from parallel101.trainers.weight_gradients import WeightGradients
from tests.trainers.tensor_cases import (
    CASES,
    IN_TIME,
    Outcome,
    cut,
    differences,
    one_backward,
    randn,
    seeded,
)

SEQUENCE = {False: CASES, True: IN_TIME}


def all_cases(sequence_parallel):
    return {
        name: cut(case, sequence_parallel) for name, case in SEQUENCE[sequence_parallel].items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_loss_and_gradients_are_the_whole_models(world_size, sequence_parallel):
    results = p101.launch(
        all_cases, sequence_parallel, world_size=world_size, backend="sim"
    ).results
    for name, case in SEQUENCE[sequence_parallel].items():
        assert differences(case, [result[name] for result in results]) == [], name


def some_cases_everywhere():
    return all_cases(False), all_cases(True)


def test_on_gloo_as_on_the_virtual_clock():
    results = p101.launch(some_cases_everywhere, world_size=3, backend="gloo").results
    for i, cases in enumerate((CASES, IN_TIME)):
        for name, case in cases.items():
            assert differences(case, [result[i][name] for result in results]) == [], name


def test_under_the_rules_of_nccl():
    results = p101.launch(some_cases_everywhere, world_size=2, backend="sim", rules="nccl").results
    assert [
        differences(case, [result[0][name] for result in results]) for name, case in CASES.items()
    ] == [[]] * len(CASES)
    assert [
        differences(case, [result[1][name] for result in results]) for name, case in IN_TIME.items()
    ] == [[]] * len(IN_TIME)


def computed_again(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def with_checkpoints(sequence_parallel):
    """The activations of each block are computed again in backward."""
    return cut(CASES["gpt, tied"], sequence_parallel, prepare=computed_again)


def split_backward(sequence_parallel):
    """As a zero-bubble schedule does it: a backward that leaves the weight gradients, and then
    those.
    """
    case, model = CASES["gpt, auto"], seeded(CASES["gpt, auto"].build())
    resolved = resolve(case.plan, model, case.loss_fn, dist.get_world_size(), sequence_parallel)
    resolved.apply(model, None)
    later = WeightGradients(split=True)
    with later.forward():
        loss = case.loss_fn(model(case.inputs), case.targets)
    loss.backward()
    waiting = {name for name, p in model.named_parameters() if p.grad is None}
    assert {name for name in waiting if name.startswith("blocks.0.mlp")} == {
        f"blocks.0.mlp.{p}" for p in ("up.weight", "up.bias", "down.weight")
    }
    later.run()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name in sorted(resolved.partial):
        gradients[name] = p101.all_reduce(gradients[name])
    return Outcome(loss.item(), None, gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize(
    ("program", "name"),
    [(with_checkpoints, "gpt, tied"), (split_backward, "gpt, auto")],
    ids=["checkpoint", "split"],
)
def test_backward_in_other_orders(program, name, sequence_parallel):
    run = p101.launch(program, sequence_parallel, world_size=2, backend="sim")
    assert differences(CASES[name], run.results) == []
    if program is split_backward:
        usual = p101.launch(
            lambda: cut(CASES[name], sequence_parallel), world_size=2, backend="sim"
        )
        assert run.trace.bytes_sent == usual.trace.bytes_sent, "each message once"


# ── messages ──


def bytes_of(name, sequence_parallel, world_size):
    """Bytes that all ranks send in a forward and backward, without the sums of partial
    gradients.
    """
    case = SEQUENCE[sequence_parallel][name]

    def program():
        model = seeded(case.build())
        resolve(case.plan, model, case.loss_fn, world_size, sequence_parallel).apply(model, None)
        one_backward(model, case.loss_fn, case.inputs, case.targets)

    return sum(p101.launch(program, world_size=world_size, backend="sim").trace.bytes_sent)


def pair(world_size, batch=6):
    model = seeded(nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 5)))
    resolve({"0": "column", "2": "row"}, model, F.mse_loss, world_size).apply(model, None)
    return model, randn(1, batch, 4).requires_grad_()


def pair_forward(world_size):
    model, x = pair(world_size)
    model(x)


def pair_forward_and_backward(world_size, batch=6):
    model, x = pair(world_size, batch)
    y = model(x).square().sum()
    p101.barrier()
    with p101.span("backward"):
        y.backward()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_pair_has_one_all_reduce_in_each_direction(world_size):
    forward, both = (
        p101.launch(program, world_size, world_size=world_size, backend="sim").trace
        for program in (pair_forward, pair_forward_and_backward)
    )
    barrier = sum(p101.launch(p101.barrier, world_size=world_size, backend="sim").trace.bytes_sent)
    assert sum(forward.bytes_sent) == 2 * (world_size - 1) * 8 * 6 * 5
    assert sum(both.bytes_sent) - barrier == 2 * (world_size - 1) * 8 * (6 * 5 + 6 * 4)
    assert max(forward.messages_sent) == 2 * (world_size - 1), (
        "the blocks to their owners, and the sums to all"
    )


def test_the_all_reduce_is_in_flight_while_the_weight_gradient_is_computed():
    trace = p101.launch(pair_forward_and_backward, 2, 5000, world_size=2, trace=True).trace
    for rank in range(2):
        (backward,), (computed, *_) = (
            [e for e in trace.spans(name) if e.rank == rank]
            for name in ("backward", "weight gradient")
        )
        messages = [
            e
            for e in trace.events
            if e.rank == rank and e.kind in ("send", "recv") and e.posted > backward.start
        ]
        assert len([e for e in messages if e.posted < computed.start]) == 2, (
            "the first half of the all-reduce, both ways"
        )
        assert len([e for e in messages if e.posted > computed.end]) == 2, "the second half"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_of_a_gpt_equal_theory_with_and_without_sequence_parallel(world_size):
    """Query, key and value share one all-reduce; a block has two in each direction, the
    embedding one, the head one, the loss two.
    """
    activations, positions = 3 * 5 * 24, 3 * 5
    all_reduced = (4 * 2 + 1 + 1) * activations + (positions + world_size) + 2 * positions
    theory = 2 * (world_size - 1) * 8 * all_reduced
    assert [bytes_of("gpt, tied", cut_time, world_size) for cut_time in (False, True)] == [
        theory,
        theory,
    ]


def three_layers():
    return seeded(nn.ModuleDict({name: nn.Linear(4, 5) for name in "abc"}))


def two_inputs_of_three_layers(model):
    x = randn(1, 3, 6, 4).requires_grad_() * 1
    first, second = model["a"](x) + model["b"](x), model["c"](x * 2)
    (first.square().sum() + second.square().sum()).backward()
    return [p.grad for p in model.parameters()]


def sharing(world_size):
    model = three_layers()
    resolve(dict.fromkeys("abc", "column_gather"), model, F.mse_loss, world_size).apply(model, None)
    gradients = two_inputs_of_three_layers(model)
    assert model["a"].region.entry is None, "nothing is kept after backward"
    return gradients


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_with_one_input_share_its_all_reduce(world_size):
    run = p101.launch(sharing, world_size, world_size=world_size, backend="sim")
    for i, expected in enumerate(two_inputs_of_three_layers(three_layers())):
        torch.testing.assert_close(
            torch.cat([result[i] for result in run.results]), expected, rtol=1e-12, atol=0
        )
    outputs, inputs = 3 * 18 * 5, 2 * 18 * 4
    assert sum(run.trace.bytes_sent) == 8 * (world_size - 1) * (outputs + 2 * inputs), (
        "three outputs gathered, two inputs all-reduced"
    )


def changed_in_place():
    """Without gradients, and with time cut, what was gathered must be as new as the input."""
    region = Region(None, cut_time=True)
    x = region.cut(torch.ones(1, 4, 2))
    with torch.no_grad():
        before = region.enter(x)[0]
        again = region.enter(x)[0]
        x.add_(1)
        after = region.enter(x)[0]
        x = None
    return before is again, after.unique().tolist(), region.entry


def test_an_input_that_changed_is_gathered_again():
    run = p101.launch(changed_in_place, world_size=2, backend="sim")
    assert run.results == [(True, [2.0], None)] * 2
    assert run.trace.messages_sent == [2, 2]


def in_pieces():
    """Two pipeline stages, one after the other on the same rank: each applies the plan to its
    own modules only.
    """
    case, n = IN_TIME["gpt, tied"], dist.get_world_size()
    stages = []
    for local in (["embedding", "blocks.0"], ["blocks.1", "norm", "head"]):
        model = seeded(case.build())
        resolved = resolve(case.plan, model, case.loss_fn, n, sequence_parallel=True)
        resolved.apply(model, None, local)
        stages.append(
            (
                model,
                [
                    module
                    for name, module in zip(
                        ["embedding", "blocks.0", "blocks.1", "norm", "head"], model.sequence()
                    )
                    if name in local
                ],
            )
        )
    assert isinstance(stages[0][0].head, nn.Linear), "not on this stage, so not cut"
    losses = []
    for time in (5, 6, 5):
        tokens = torch.arange(3 * (time + 1)).view(3, -1) ** 2 % 13
        x = tokens[:, :-1]
        for _, modules in stages:
            for module in modules:
                x = module(x)
            if x.shape[-1] == 24:
                assert x.shape[1] == split_sizes(time, n)[dist.get_rank()]
        losses.append(
            (
                p101.vocabulary_cross_entropy(x, tokens[:, 1:]).item(),
                F.cross_entropy(
                    seeded(case.build())(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
                ).item(),
            )
        )
    return losses


@pytest.mark.parametrize("world_size", [2, 4])
def test_time_stays_cut_between_pipeline_stages_whatever_its_length(world_size):
    for result in p101.launch(in_pieces, world_size=world_size, backend="sim").results:
        for found, expected in result:
            assert found == pytest.approx(expected, rel=1e-12)


def other_dtypes():
    """float32, and bfloat16 autocast, against the whole model; and without gradients."""
    case, found = CASES["gpt, auto"], []
    for autocast in (False, True):
        for build in ("whole", "cut"):
            model = seeded(case.build()).float()
            loss_fn = case.whole_loss
            if build == "cut":
                resolve(case.plan, model, case.loss_fn, dist.get_world_size(), autocast).apply(
                    model, None
                )
                loss_fn = case.loss_fn
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_fn(model(case.inputs), case.targets)
            with torch.no_grad():
                assert autocast or abs(loss_fn(model(case.inputs), case.targets) - loss) < 1e-6
            loss.backward()
            found.append(
                (
                    loss.dtype,
                    loss.item(),
                    model.blocks[0].attention_norm.weight.grad,
                    model.blocks[0].mlp.up.weight.grad.dtype,
                )
            )
    return found


def test_float32_and_bfloat16_autocast():
    for whole, mine, whole_half, half in p101.launch(
        other_dtypes, world_size=3, backend="sim"
    ).results:
        assert [r[0] for r in (whole, mine, whole_half, half)] == [torch.float32] * 4
        assert {r[3] for r in (whole, mine, whole_half, half)} == {torch.float32}
        assert mine[1] == pytest.approx(whole[1], rel=1e-5) and half[1] == pytest.approx(
            whole[1], rel=0.02
        )
        torch.testing.assert_close(mine[2], whole[2], rtol=1e-3, atol=1e-6)


def mistakes():
    """Each is an error on every rank, before any message."""
    case = IN_TIME["chain"]
    model = seeded(case.build())
    resolve(case.plan, model, case.loss_fn, dist.get_world_size(), sequence_parallel=True).apply(
        model, None
    )
    with pytest.raises(ValueError, match=r"expected \(batch, time, features\)"):
        model(randn(1, 6, 4))
    gpt = CASES["gpt, tied"]
    model = seeded(gpt.build())
    resolve(gpt.plan, model, gpt.loss_fn, dist.get_world_size()).apply(model, None)
    with pytest.raises(
        IndexError, match="tokens range from 0 to 13, but the embedding has 13 rows"
    ):
        model(torch.tensor([[0, 13]]))


def test_wrong_inputs_are_errors_on_every_rank():
    p101.launch(mistakes, world_size=2, backend="sim")


# ── the loss ──


def logits_and_targets(p, dtype=torch.float64):
    return (randn(1, 4, 3, 10) * 5).to(dtype), torch.arange(12).view(4, 3) * 7 % 10


@pytest.mark.parametrize("sizes", [[10], [5, 5], [4, 3, 3], [0, 9, 1], [3, 3, 2, 2]], ids=str)
@pytest.mark.parametrize("ignored", [0, 3, 12], ids=lambda n: f"{n} ignored")
@pytest.mark.parametrize("options", [{}, {"ignore_index": 4, "reduction": "sum"}], ids=str)
def test_cross_entropy_of_cut_logits_is_torchs_of_the_joined_ones(sizes, ignored, options):
    logits, targets = logits_and_targets(len(sizes))
    targets.view(-1)[:ignored] = options.get("ignore_index", -100)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), **options)
    (3 * expected).backward()

    def program(backward):
        mine = logits.split(sizes, -1)[dist.get_rank()].clone().requires_grad_()
        loss = p101.vocabulary_cross_entropy(mine, targets, **options)
        if backward:
            (3 * loss).backward()
        return loss.detach(), mine.grad

    forward, both = (
        p101.launch(program, backward, world_size=len(sizes), backend="sim")
        for backward in (False, True)
    )
    for loss, _ in both.results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0, equal_nan=True)
    torch.testing.assert_close(
        torch.cat([g for _, g in both.results], -1), whole.grad, rtol=1e-12, atol=1e-16
    )
    assert both.trace.bytes_sent == forward.trace.bytes_sent, "backward sends nothing"
    assert sum(forward.trace.bytes_sent) == 2 * (len(sizes) - 1) * 8 * (12 + len(sizes) + 2 * 12), (
        "and logits are not gathered"
    )


def losses_of_extreme_logits():
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = logits_and_targets(n, torch.float32)
    mine = (logits * 1000).split(split_sizes(10, n), -1)[rank]
    loss = p101.vocabulary_cross_entropy(mine, targets)
    half = p101.vocabulary_cross_entropy((mine / 1000).bfloat16(), targets)
    for wrong in (targets + 1, targets - 1):
        with pytest.raises(IndexError, match="but the logits have a vocabulary of 10"):
            p101.vocabulary_cross_entropy(mine, wrong)
    with pytest.raises(ValueError, match="expected"):
        p101.vocabulary_cross_entropy(mine, targets[0])
    with pytest.raises(ValueError, match="expected whole numbers"):
        p101.vocabulary_cross_entropy(mine, targets.double())
    with pytest.raises(ValueError, match="reduction='none': expected"):
        p101.vocabulary_cross_entropy(mine, targets, reduction="none")
    return loss.item(), half.item(), half.dtype


def test_cross_entropy_of_extreme_and_of_half_logits():
    logits, targets = logits_and_targets(3, torch.float32)
    for loss, half, dtype in p101.launch(
        losses_of_extreme_logits, world_size=3, backend="sim"
    ).results:
        assert loss == pytest.approx(
            F.cross_entropy(logits.flatten(0, 1) * 1000, targets.flatten()).item(), rel=1e-6
        )
        assert half == pytest.approx(
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=0.01
        )
        assert dtype == torch.float32
