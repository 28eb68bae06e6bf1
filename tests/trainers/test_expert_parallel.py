"""Experts on several ranks equal those of one process, whatever the router chooses, and the rank
with the most rows sets the pace. (The bytes: test_record.py.)
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel101 as p101
from parallel101.models.experts import Experts, MixtureOfExperts
from parallel101.trainers.expert_parallel import experts_over_ranks
from tests.trainers.cases import on_ranks, raised, randn

WIDTH, HIDDEN = 3, 5
TOKENS = ([3, 1, 2], [0, 2, 0], [0, 0, 0])  # of each rank
ROUTERS = ("by the weights", "one hot expert", "the last only")


def over_ranks(whole, sizes):
    """This rank's part of the experts, and a module that takes the place of all of them."""
    part, layer = part_of(whole, sizes), nn.Module()
    layer.forward = partial(experts_over_ranks, part, sizes=sizes)
    return part, layer


def part_of(whole, sizes):
    rank = dist.get_rank()
    part = Experts(sizes[rank], WIDTH, HIDDEN).double()
    for p, q in zip(part.parameters(), whole.parameters()):
        p.data.copy_(q.detach().split(sizes)[rank])
    return part


def mixture(experts, top_k, capacity, router):
    layer = MixtureOfExperts(WIDTH, HIDDEN, experts, top_k, capacity).double()
    for salt, p in enumerate(layer.parameters()):
        p.data.copy_(randn(salt, *p.shape))
    if router != "by the weights":
        layer.router.weight.data *= 0.01
        layer.router.weight.data[0 if router == "one hot expert" else -1] += 5.0
    return layer


def loss_of(layer, x, weight):
    """Not a mean: the losses of all ranks add up to that of one process."""
    y, balance = layer(x)
    return (y * weight).sum() + balance.sum(), y


def differences(experts, sizes, tokens, router, top_k=2, capacity=None):
    """From one process: of this rank's results and of its gradients."""
    rank = dist.get_rank()
    x, weight = randn(50, sum(tokens), 4, WIDTH).abs(), randn(51, sum(tokens), 4, WIDTH)
    whole = mixture(experts, top_k, capacity, router)
    alone = x.clone().requires_grad_()
    loss, expected = loss_of(whole, alone, weight)
    loss.backward()

    layer = mixture(experts, top_k, capacity, router)
    part, layer.experts = over_ranks(layer.experts, sizes)
    mine = x.split(tokens)[rank].clone().requires_grad_()
    loss, y = loss_of(layer, mine, weight.split(tokens)[rank])
    loss.backward()
    router_gradient = p101.all_reduce(layer.router.weight.grad)
    pairs = [
        (y, expected.split(tokens)[rank]),
        (mine.grad, alone.grad.split(tokens)[rank]),
        (router_gradient, whole.router.weight.grad),
        *(
            (p.grad, q.grad.split(sizes)[rank])
            for p, q in zip(part.parameters(), whole.experts.parameters())
        ),
    ]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(((a - b).norm() / (1 + b.norm())).item() for a, b in pairs)


def all_differences():
    sizes = {4: [2, 1, 1], 5: [2, 2, 1], 7: [5, 1, 1]}
    cases = [
        (n, sizes[n], tokens, router) for n in sizes for tokens in TOKENS for router in ROUTERS
    ]
    found = {str(case): differences(*case) for case in cases}
    found["top 1"] = differences(5, sizes[5], TOKENS[0], ROUTERS[0], top_k=1)
    found["dropped"] = differences(5, sizes[5], TOKENS[0], ROUTERS[1], capacity=1.0)
    return {case: error for case, error in found.items() if not error < 1e-12}, len(found)


def test_it_equals_one_process_forward_and_backward():
    """So dispatch and combine are each the other's adjoint."""
    run = p101.launch(all_differences, world_size=3, backend="sim", rules="nccl")
    assert run.results == [({}, 29)] * 3


def without_gradients_of_rows():
    """Rows need a gradient on rank 0 only; the experts of all ranks need theirs."""
    rank, sizes = dist.get_rank(), [2, 1, 0]
    whole = Experts(3, WIDTH, HIDDEN).double()
    part = nn.Module() if rank == 2 else part_of(whole, sizes)
    if rank == 2:  # it has rows, but no experts
        part.forward = lambda rows, choice: rows[:, :WIDTH]
    rows = randn(rank, 4, WIDTH).requires_grad_(rank == 0)
    choice = torch.tensor([0, 1, 2, 2])
    with torch.no_grad():
        first = experts_over_ranks(part, rows, choice, sizes=sizes)
    assert not first.requires_grad
    y = experts_over_ranks(part, rows, choice, sizes=sizes)
    assert torch.equal(first, y)
    y.sum().backward()
    assert (rows.grad is not None) == (rank == 0)
    alone = torch.cat([randn(r, 4, WIDTH) for r in range(3)])
    whole(alone, choice.repeat(3)).sum().backward()
    for p, q in zip(part.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad, q.grad.split(sizes)[rank])


def test_ranks_need_not_agree_on_gradients_of_rows_and_may_have_no_experts():
    p101.launch(without_gradients_of_rows, world_size=3, backend="sim", rules="nccl")


# ── when, and what is refused ──

CHOICES = ([0, 0, 1, 3], [0, 0, 0, 0, 2, 0], [], [4, 0])  # of 5 experts on 4 ranks: 2, 1, 1, 1


def step(seconds_per_row):
    rank = dist.get_rank()
    rows = torch.ones(len(CHOICES[rank]), WIDTH).requires_grad_()

    def experts(rows, choice):
        p101.compute(seconds_per_row * len(rows))
        return rows * (choice[:, None] + 1)

    choice = torch.tensor(CHOICES[rank], dtype=torch.int64)
    experts_over_ranks(experts, rows, choice, sizes=[2, 1, 1, 1]).sum().backward()


def test_a_hot_expert_is_a_straggler_on_the_clock():
    network = p101.Network(latency=0.001, bandwidth=1e9)
    run = p101.launch(step, 0.5, world_size=4, backend="sim", network=network)
    trace = run.trace
    rows = [9, 1, 1, 1]
    spans = [[e for e in trace.spans("experts") if e.rank == rank] for rank in range(4)]
    for rank, (forward,) in enumerate(spans):
        assert forward.args == {"rows": rows[rank]}
        assert forward.end - forward.start == pytest.approx(0.5 * rows[rank])
    assert trace.makespan == pytest.approx(0.5 * max(rows), abs=0.1)
    waited = [e.end - e.start for e in trace.spans("combine") if e.rank == 1]
    assert waited[0] == pytest.approx(0.5 * (9 - 1), abs=0.1)
    assert "rows 9" in run.timeline().svg()


WRONG = {  # what the error says of a choice and sizes
    "up to 3: expected for each row one of the 3 experts": ([0, 3], [2, 1]),
    "a choice of shape (1,)": ([0], [2, 1]),
    "one for each of the group's 2 ranks": ([0, 1], [2]),
}


def errors_of_wrong_arguments():
    rows = torch.ones(2, WIDTH)
    return [
        raised(experts_over_ranks, lambda rows, _: rows, rows, torch.tensor(choice), sizes=sizes)
        for choice, sizes in WRONG.values()
    ]


def test_wrong_arguments_are_an_error_on_every_rank():
    for errors in on_ranks(2, errors_of_wrong_arguments):
        assert all(words in error for words, error in zip(WRONG, errors, strict=True)), errors
