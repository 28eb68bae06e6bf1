"""Gradients of gradients, up to third order, equal those of one process for every operation and
algorithm.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import autograd
from parallel101.autograd import point_to_point, replicated
from parallel101.mesh import group_of
from tests.autograd.test_collectives import LINEAR, named
from tests.collectives.cases import answer, launched, on_backends, transposed

ORDERS = 3


def start(rank):
    drawn = torch.Generator("cpu").manual_seed(rank)
    x = torch.randn(5, 4, generator=drawn, device="cpu", dtype=torch.float64)
    return x.to(torch.get_default_device()).requires_grad_()


def in_one_process(operation, xs, root=0, position=0, src=0, dst=0, **kwargs):
    if operation == "all_to_all":
        return transposed(xs, position, **kwargs)
    return answer(operation, xs, position, root=src or dst, **kwargs)


def gradients(objective, xs):
    """The gradients by xs: of the objective, of the sum of the sines of that gradient, and so
    on.
    """
    found = []
    for _ in range(ORDERS):
        grads = torch.autograd.grad(objective, xs, create_graph=True, materialize_grads=True)
        found.append(grads)
        objective = sum(grad.sin().sum() for grad in grads)
    return found


def derivatives_that_differ():
    rank, p, wrong = dist.get_rank(), dist.get_world_size(), []
    # the second: in reverse order, with rank 0 idle
    for group in (None, list(range(p - 1, 0, -1)) or [0]):
        members = group_of(group)
        for operation, kwargs in LINEAR:
            if members.size == 1:
                kwargs = {**kwargs, **{root: 0 for root in ("src", "dst") if root in kwargs}}
            expected = [[torch.zeros(5, 4)]] * ORDERS
            if members.position is not None:
                xs = [start(r) for r in members.ranks]
                each = (
                    in_one_process(operation, xs, position=i, **kwargs) for i in range(members.size)
                )
                orders = gradients(sum(y.pow(3).sum() for y in each), xs)
                expected = [[order[members.position]] for order in orders]
            for name, function in named(operation):
                x = start(rank)
                found = gradients(function(x, group=group, **kwargs).pow(3).sum(), [x])
                pairs = ((a[0], b[0].double()) for a, b in zip(found, expected))
                same = [torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs]
                wrong += [(operation, name, group, same)] * (not all(same))
    return wrong


@on_backends(gloo=[2], sim=[1, 3])
def test_gradients_of_gradients_are_those_of_one_process(backend, world_size):
    assert launched(derivatives_that_differ, backend, world_size) == [[]] * world_size


def twice(loss, x):
    """The gradient by x, and that of its square."""
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return g.item(), torch.autograd.grad(g.pow(2).sum(), x)[0].item()


def only_the_root_goes_on():
    """The root's loss is a cube.

    The others call backward on the sum of their empty result, which is linear.
    """
    rank, found = dist.get_rank(), []
    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    for operation in (autograd.gather, autograd.reduce):
        y = operation(x)
        found.append(twice(y.pow(3).sum() if rank == 0 else y.sum(), x))
    sent = (x * x, 1) if rank == 0 else (x, 0)
    y = (point_to_point.send if rank == 0 else point_to_point.receive)(*sent)
    return [*found, twice(y.sum() if rank == 0 else y.pow(3).sum(), x)]


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_rank_that_got_no_part_of_the_result_takes_part_in_the_second_backward(backend):
    run = p101.launch(only_the_root_goes_on, world_size=2, backend=backend)
    # gather: ∂aᵢ = 3 aᵢ², squared and summed: 9 aᵢ⁴, whose gradient is 36 aᵢ³
    # reduce: ∂aᵢ = 3 s² on both, squared and summed: 18 s⁴, whose gradient is 72 s³
    # a sent x²: x⁶ at 1, so 6 x⁵, and of its square 360 x⁹
    assert run.results == [
        [(3.0, 36.0), (27.0, 1944.0), (6.0, 360.0)],
        [(12.0, 288.0), (27.0, 1944.0), (0.0, 0.0)],
    ]


def replicated_gradients():
    """A tensor-parallel product of two layers.

    The loss, and the losses computed from gradients of x, are replicated and count once.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, a, b = (torch.randn(2 * p, 2 * p, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mine = slice(2 * rank, 2 * rank + 2)
    # rows of a: each rank has two hidden units
    hidden = (replicated.copy_to_group(x) @ a[mine].t()).sin()
    out = replicated.reduce_from_group(hidden @ b[:, mine].t())  # columns of b
    out = replicated.gather_from_group(replicated.scatter_to_group(out, 0).cos(), 0)
    whole = ((x @ a.t()).sin() @ b.t()).cos()
    found = []
    for y in (out, whole):
        by_x, by_a, by_b = torch.autograd.grad(y.pow(2).sum(), [x, a, b], create_graph=True)
        further = sum(gradients(by_x.sin().sum(), [x]), ())
        found.append([by_x, by_a[mine], by_b[:, mine], *further])
    return [torch.allclose(*pair, rtol=1e-9) for pair in zip(*found)]


@on_backends(gloo=[2], sim=[3])
def test_the_replicated_pair_counts_a_loss_once(backend, world_size):
    assert launched(replicated_gradients, backend, world_size) == [[True] * 6] * world_size


def linear_and_repeated():
    x = torch.ones(2, requires_grad=True)
    y = autograd.all_reduce(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    second = torch.autograd.grad(g.sum(), x)[0].tolist()
    y.sum().backward()
    y.sum().backward()  # the first backward freed nothing that this one needs
    return second, x.grad.tolist()


def test_the_second_derivative_of_a_linear_program_is_zero_and_a_backward_may_be_repeated():
    run = p101.launch(linear_and_repeated, world_size=2, backend="sim")
    assert run.results == [([0.0, 0.0], [4.0, 4.0])] * 2
