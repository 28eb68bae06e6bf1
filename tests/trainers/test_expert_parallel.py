"""Experts on several ranks equal those of one process, whatever the router chooses; dispatch and
combine are each the other's adjoint, and send the bytes that they must.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.analysis.traffic import axis_traffic, traffic
from parallel101.models.experts import Experts, MixtureOfExperts
from parallel101.trainers.expert_parallel import Combine, Dispatch, count_rows, experts_over_ranks
from tests.trainers.cases import randn

WIDTH, HIDDEN = 3, 5
TOKENS = ([3, 1, 2, 4], [0, 2, 0, 0], [0, 0, 0, 0], [2, 0, 0, 1])  # of each rank
ROUTERS = ("by the weights", "one hot expert", "the last only")


class OverRanks(nn.Module):
    """This rank's part of the experts, in the place of all of them."""

    def __init__(self, whole, sizes):
        super().__init__()
        self.sizes, self.seconds_per_row = sizes, 0.0
        self.part = part_of(whole, sizes)

    def forward(self, rows, choice):
        return experts_over_ranks(self.compute, rows, choice, sizes=self.sizes)

    def compute(self, rows, choice):
        p101.compute(self.seconds_per_row * len(rows))
        return self.part(rows, choice)


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
    rank, n = dist.get_rank(), dist.get_world_size()
    tokens = tokens[:n]
    x, weight = randn(50, sum(tokens), 4, WIDTH).abs(), randn(51, sum(tokens), 4, WIDTH)
    whole = mixture(experts, top_k, capacity, router)
    alone = x.clone().requires_grad_()
    loss, expected = loss_of(whole, alone, weight)
    loss.backward()

    layer = mixture(experts, top_k, capacity, router)
    layer.experts = OverRanks(layer.experts, sizes)
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
            for p, q in zip(layer.experts.part.parameters(), whole.experts.parameters())
        ),
    ]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(((a - b).norm() / (1 + b.norm())).item() for a, b in pairs)


def all_differences():
    n = dist.get_world_size()
    found = {}
    for experts, sizes in {
        4: p101.split_sizes(4, n),
        5: p101.split_sizes(5, n),
        7: [7 - n + 1, *[1] * (n - 1)],
    }.items():
        for tokens in TOKENS:
            for router in ROUTERS:
                case = experts, sizes, tokens, router
                found[str(case)] = differences(*case)
    found["top 1"] = differences(5, p101.split_sizes(5, n), TOKENS[0], ROUTERS[0], top_k=1)
    found["dropped"] = differences(5, p101.split_sizes(5, n), TOKENS[0], ROUTERS[1], capacity=1.0)
    return {case: error for case, error in found.items() if not error < 1e-12}, len(found)


@pytest.mark.parametrize(
    ("backend", "world_size"), [("gloo", 2), ("sim", 1), ("sim", 3), ("sim", 4)]
)
def test_it_equals_one_process_forward_and_backward(backend, world_size):
    rules = "nccl" if backend == "sim" else "gloo"
    run = p101.launch(all_differences, world_size=world_size, backend=backend, rules=rules)
    assert run.results == [({}, 38)] * world_size


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


def inner_products():
    """⟨Fx, y⟩ and ⟨x, F*y⟩ over all ranks, of dispatch and combine."""
    rank, sizes = dist.get_rank(), [2, 1, 2]
    choice = torch.tensor([4, 0, 0, 3, 1, 2, 2, 2]) if rank else torch.tensor([], dtype=torch.long)
    plan = count_rows(randn(0, len(choice), 2), choice, sizes, p101.mesh.group_of(None))
    found = []
    for function, rows in ((Dispatch, len(choice)), (Combine, sum(plan.received))):
        x = randn(rank, rows, 2).requires_grad_()
        result = function.apply(x, plan)
        y = randn(10 + rank, *result.shape)
        (adjoint,) = torch.autograd.grad(result, x, y)
        products = torch.stack([(result * y).sum(), (x * adjoint).sum()]).detach()
        found.append(p101.all_reduce(products).tolist())
    return found


def test_dispatch_and_combine_have_their_adjoints():
    for products in p101.launch(inner_products, world_size=3, backend="sim").results:
        for there, back in products:
            assert there == pytest.approx(back, rel=1e-12)
            assert abs(there) > 1e-3


# ── what is sent, and when ──

CHOICES = ([0, 0, 1, 3], [0, 0, 0, 0, 2, 0], [], [4, 0])  # of 5 experts on 4 ranks: 2, 1, 1, 1


def step(seconds_per_row):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    rank, sizes = dist.get_rank(), [2, 1, 1, 1]
    rows = torch.ones(len(CHOICES[rank]), WIDTH).requires_grad_()

    def experts(rows, choice):
        p101.compute(seconds_per_row * len(rows))
        return rows * (choice[:, None] + 1)

    choice = torch.tensor(CHOICES[rank], dtype=torch.int64)
    experts_over_ranks(experts, rows, choice, sizes=sizes, group=mesh["ep"]).sum().backward()


def test_bytes_are_those_of_rows_for_other_ranks_four_times_and_of_the_counts():
    trace = p101.launch(step, 0.0, world_size=4, backend="sim").trace
    _, (along_ep,) = axis_traffic(trace)
    assert along_ep.axis == "ep"
    owner, sizes = [0, 0, 1, 2, 3], [2, 1, 1, 1]
    moved = [[0] * 4 for _ in range(4)]
    for rank, choices in enumerate(CHOICES):
        for expert in choices:
            moved[rank][owner[expert]] += rank != owner[expert]
    for rank in range(4):
        there, back = sum(moved[rank]), sum(row[rank] for row in moved)
        # dispatch and combine, forward and backward
        rows = 2 * (there + back) * WIDTH * 4
        assert along_ep.sent(rank) == rows + 8 * (5 - sizes[rank])


def test_a_hot_expert_is_a_straggler_on_the_clock():
    network = p101.Network(latency=0.001, bandwidth=1e9)
    trace = p101.launch(step, 0.5, world_size=4, backend="sim", network=network).trace
    rows = [9, 1, 1, 1]
    spans = [[e for e in trace.spans("experts") if e.rank == rank] for rank in range(4)]
    for rank, (forward,) in enumerate(spans):
        assert forward.args == {"rows": rows[rank]}
        assert forward.end - forward.start == pytest.approx(0.5 * rows[rank])
    assert trace.makespan == pytest.approx(0.5 * max(rows), abs=0.1)
    waited = [e.end - e.start for e in trace.spans("combine") if e.rank == 1]
    assert waited[0] == pytest.approx(0.5 * (9 - 1), abs=0.1)


def two_routers():
    """Of the same layer: one that prefers expert 0, and what steps on its balance alone make of
    it. And the tokens.
    """
    x = 1 + randn(0, 8, 16, WIDTH)  # what all tokens have in common, and a rest
    layer = MixtureOfExperts(WIDTH, HIDDEN, 4, top_k=1).double()
    layer.router.weight.data[0] += 0.5
    hot, balanced = layer, copy.deepcopy(layer)
    optimizer = torch.optim.SGD(balanced.router.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        balanced(x)[1].mean().backward()
        optimizer.step()
    return hot, balanced, x


def one_layer(layer, x):
    layer.experts = OverRanks(layer.experts, [1] * 4)
    layer.experts.seconds_per_row = 1.0
    y, _ = layer(x.chunk(4)[dist.get_rank()])
    y.sum().backward()


def test_the_balancing_loss_ends_the_straggler_and_the_pictures_show_it():
    hot, balanced, x = two_routers()
    before, after = (
        p101.launch(one_layer, layer, x, world_size=4, backend="sim") for layer in (hot, balanced)
    )
    assert before.trace.makespan > 100  # of 128 tokens
    assert after.trace.makespan < 45
    for run, layer in ((before, hot), (after, balanced)):
        choice = layer.router(x).argmax(-1)
        sent = traffic(run.trace, within="dispatch").nbytes
        for rank, mine in enumerate(choice.chunk(4)):
            rows = mine.flatten().bincount(minlength=4)
            rows[rank] = 0
            assert sent[rank] == (rows * WIDTH * 8).tolist()
        assert f"rows {choice.eq(0).sum()}" in run.timeline().svg()
    assert "dispatch" in before.traffic(within="dispatch").svg()


def wrong_arguments(choice, sizes):
    experts_over_ranks(lambda rows, _: rows, torch.ones(2, WIDTH), choice, sizes=sizes)


@pytest.mark.parametrize(
    ("choice", "sizes", "message"),
    [
        ([0, 3], [2, 1], "up to 3: expected for each row one of the 3 experts"),
        ([0], [2, 1], "a choice of shape (1,)"),
        ([0, 1], [2], "expected one for each of the group's 2 ranks"),
    ],
    ids=["no such expert", "a row without", "a rank without a size"],
)
def test_wrong_arguments_are_an_error_on_every_rank(choice, sizes, message):
    with pytest.raises(p101.RankFailed) as failed:
        p101.launch(wrong_arguments, torch.tensor(choice), sizes, world_size=2, backend="sim")
    assert message in str(failed.value)
