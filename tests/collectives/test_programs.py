"""Collectives inside a program: results changed in place, other messages in flight,
torch.compile, unusual tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import parallel101 as p101
from parallel101 import autograd, collectives
from parallel101.autograd import replicated
from tests.collectives.cases import MOVING, REDUCING, ROOTED, on_backends

EVERY = {name: getattr(autograd, name) for name in sorted(MOVING | REDUCING)} | {
    name: getattr(replicated, name) for name in replicated.__all__
}


def written_to():
    wrong = []
    for name, function in EVERY.items():
        x = torch.ones(6, 6, requires_grad=True)
        function(x).sum().backward()
        expected, x.grad = x.grad, None
        y = function(x)
        y += 1  # as a bias is added
        y.relu_()
        y.sum().backward()
        wrong += [name] * (
            not torch.equal(x.grad, expected) or not torch.equal(x, torch.ones(6, 6))
        )
    return wrong


@on_backends(gloo=[2], sim=[3])
def test_a_result_may_be_changed_in_place(backend, world_size):
    run = p101.launch(written_to, world_size=world_size, backend=backend)
    assert run.results == [[]] * world_size


def with_a_message_in_flight():
    rank, p = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % p, (rank + 1) % p
    inbox, wrong = torch.zeros(p), []
    for name, function in EVERY.items():
        received = dist.irecv(inbox, left)  # posted before the collective …
        y = function(torch.ones(p))
        dist.isend(torch.full((p,), 7.0 + rank), right).wait()  # … and its message is sent after it
        received.wait()
        wrong += [name] * (inbox.tolist() != [7.0 + left] * p or bool((y > p).any()))
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_message_of_the_program_never_matches_one_of_a_collective(backend, world_size):
    run = p101.launch(with_a_message_in_flight, world_size=world_size, backend=backend)
    assert run.results == [[]] * world_size


def compiled():
    def function(x):
        return autograd.all_reduce(x * 2) + 1

    found = []
    for wanted in (False, True):
        x = torch.ones(3, requires_grad=wanted)
        y = torch.compile(function, backend="eager")(x)
        found.append(torch.equal(y, function(x)))
        if wanted:
            y.sum().backward()
            found.append(x.grad.tolist())
    return found


def test_a_compiled_function_may_call_them():
    run = p101.launch(compiled, world_size=2, backend="sim")  # one process: it imports Dynamo once
    assert run.results == [[True, True, [4.0] * 3]] * 2


def unlike_a_plain_tensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with FakeTensorMode():
        yield torch.ones(4), "x is a FakeTensor"
    yield (
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        r"x is a DTensor .*: expected a plain, dense tensor.*x\.to_local\(\) on a DTensor",
    )
    yield (
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD),
        "x is a AsyncCollectiveTensor",
    )


def refused():
    for library in (collectives, autograd):
        for x, said in unlike_a_plain_tensor():
            with pytest.raises(TypeError, match=said):
                library.all_reduce(x)
    with pytest.raises(TypeError, match="no memory of its own"):
        torch.vmap(collectives.all_reduce)(torch.ones(2, 3))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        autograd.all_reduce(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    return autograd.all_reduce(torch.nn.Parameter(torch.ones(2))).tolist()


def test_tensors_without_memory_and_forward_mode_are_refused():
    assert p101.launch(refused, world_size=2, backend="sim").results == [[2.0, 2.0]] * 2


def one_element():
    x = torch.arange(2.0)[::2]  # contiguous, although its stride is 2
    for name, function in EVERY.items():
        function(x.reshape(1, 1) if name in ROOTED else x)
    if dist.get_rank() == 0:
        dist.isend(x, 1).wait()
    elif dist.get_rank() == 1:
        dist.irecv(x, 0).wait()


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_one_element_may_have_any_stride(backend):
    p101.launch(one_element, world_size=2, backend=backend, trace=True)


def uneven_exchange():
    """Sizes on both sides of each limit in the rules: all ranks must choose the same algorithm,
    forward and backward.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    for width in (10, 100, 115, 120, 1000):
        sizes = [width] * (p - 1) + [2 * width]
        x = torch.full((p + 1, sizes[rank]), float(rank), requires_grad=True)
        y = autograd.all_to_all(x, 0, 1, concat_sizes=sizes)
        expected = torch.cat(
            [torch.full((2 if rank == 0 else 1, size), float(r)) for r, size in enumerate(sizes)], 1
        )
        y.sum().backward()
        wrong += [width] * (
            not torch.equal(y, expected) or not torch.equal(x.grad, torch.ones_like(x))
        )
    return wrong


@pytest.mark.parametrize("world_size", [9, 12])
def test_auto_chooses_the_same_on_ranks_with_different_sizes(world_size):
    run = p101.launch(uneven_exchange, world_size=world_size, backend="sim")
    assert run.results == [[]] * world_size
