"""Gradients: ⟨Fx, y⟩ = ⟨x, F*y⟩ for every operation, algorithm and set of axes, and the same
gradients as in one process.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101 import autograd, collectives
from parallel101.autograd import point_to_point, replicated
from parallel101.mesh import group_of, split_sizes
from tests.collectives.cases import launched, on_backends

LINEAR = [
    ("broadcast", {"src": 1}),
    ("scatter", {"src": 1, "dim": 1}),
    ("gather", {"dst": 1, "dim": -1}),
    ("reduce", {"dst": 1}),
    ("reduce", {"dst": 0, "op": "mean"}),
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": -2}),
    ("reduce_scatter", {"dim": 1, "op": "mean"}),
    ("all_reduce", {}),
    ("all_reduce", {"op": "mean"}),
    ("all_to_all", {"split_dim": 0, "concat_dim": 1}),
    ("all_to_all", {"split_dim": 1, "concat_dim": -1}),
]


def random(shape, salt):
    """Different on every rank and in every call."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(
        torch.get_default_device()
    )


def inner_products(function, x, *args, **kwargs):
    """This rank's parts of ⟨Fx, y⟩ and ⟨x, F*y⟩."""
    x = x.clone().requires_grad_()
    result = function(x, *args, **kwargs)
    y = random(result.shape, 7)
    (result * y).sum().backward()
    return (result * y).sum().item(), (x * x.grad).sum().item()


def unequal(products, within=1e-12):
    """Those of the inner products that differ by more than this part of their norm, over all
    ranks of the world.
    """
    here = torch.tensor(list(products.values()), dtype=torch.float64)
    with_norm = torch.cat([here, here.abs().sum(1, keepdim=True)], 1)
    there, back, norm = collectives.all_reduce(with_norm).unbind(1)
    errors = ((there - back).abs() / (norm + 1)).tolist()
    return {key: error for key, error in zip(products, errors) if not error < within}


def named(operation):
    table = dict(autograd.algorithms(operation))
    return [*table.items(), ("auto", getattr(autograd, operation))]


def adjoints_on_a_mesh(shape):
    """Every operation along each axis and along both: every algorithm on three ranks and on four,
    elsewhere "auto", and what is made for several axes.
    """
    mesh, calls = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")), []
    segments = {"algorithm": "pipelined_chain", "segment_bytes": 64}
    for group in (mesh["a"], mesh["b"], mesh):
        for operation, kwargs in LINEAR:
            for _, function in named(operation)[0 if group.size() in (3, 4) else -1 :]:
                calls.append((function, {**kwargs, "group": group}))
        for function in (autograd.broadcast, autograd.reduce):
            calls.append((function, {**segments, "group": group}))
    for name, op in itertools.product(("two_level", "torus"), ("sum", "mean")):
        calls.append((autograd.all_reduce, {"op": op, "group": mesh, "algorithm": name}))
    torus = {"group": mesh, "algorithm": "torus"}
    for function in (autograd.all_gather, autograd.reduce_scatter):
        calls.append((function, {"dim": 1, **torus}))
    for split, concat in ((0, 0), (0, 1), (1, 0)):
        calls.append((autograd.all_to_all, {"split_dim": split, "concat_dim": concat, **torus}))
    products = {
        i: inner_products(function, random((5, 7), i), **kwargs)
        for i, (function, kwargs) in enumerate(calls)
    }
    return {str(calls[i]): error for i, error in unequal(products).items()}, len(products)


@pytest.mark.parametrize("shape", [(2, 3), (2, 2)])
def test_adjoints_for_every_operation_and_algorithm(shape):
    p = shape[0] * shape[1]
    run = p101.launch(adjoints_on_a_mesh, shape, world_size=p, backend="sim", rules="nccl")
    assert [wrong for wrong, _ in run.results] == [{}] * p
    assert run.results[0][1] > 40 + 12


def adjoints_of_uneven_shards_and_groups():
    p, products = dist.get_world_size(), {}
    # everybody, in reverse order, and without rank 0
    for group in (None, list(range(p))[::-1], list(range(p - 1, 0, -1)) or [0]):
        members = group_of(group)
        size, position = members.size, members.position
        sizes = [(3 * i + 1) % 4 for i in range(size)]
        mine = sizes[position] if position is not None else 2
        x, shard = random((sum(sizes), 2), 1), random((mine, 2), 2)
        count = [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]
        row, column = count[position or 0], [each[position or 0] for each in count]
        both = {"split_sizes": sizes, "concat_sizes": sizes}
        own = {"split_sizes": row, "concat_sizes": column}
        calls = [
            ("scatter", x, {"src": size - 1, "sizes": sizes}),
            ("gather", shard, {"dst": size - 1, "sizes": sizes}),
            ("all_gather", shard, {"sizes": sizes}),
            ("reduce_scatter", x, {"op": "mean", "sizes": sizes}),
            ("all_to_all", random((sum(sizes), mine), 3), {"concat_dim": 1, **both}),
            ("all_to_all", random((sum(row), 2), 4), own),  # alltoallv, which Bruck refuses
        ]
        for i, (operation, given, kwargs) in enumerate(calls):
            for name, function in named(operation):
                if kwargs is not own or name != "bruck":
                    label = str(group), i, operation, name
                    products[label] = inner_products(function, given, group=group, **kwargs)
    return unequal(products)


@on_backends(gloo=[3], sim=[1, 4])
def test_adjoints_of_uneven_shards_idle_ranks_and_groups_in_another_order(backend, world_size):
    assert launched(adjoints_of_uneven_shards_and_groups, backend, world_size) == [{}] * world_size


def objective_of_all_ranks(weights):
    """This rank's gradient of a small program with several collectives: that of the sum over
    ranks of their losses.
    """
    rank = dist.get_rank()
    w = weights[rank].clone().requires_grad_()
    whole = autograd.all_gather(w, 0)
    mean = autograd.all_reduce(whole.sin() * (rank + 1), "mean")
    shard = autograd.reduce_scatter(mean * whole, 1)
    (shard.pow(2).sum() * (rank + 2)).backward()
    return w.grad


def test_gradients_are_those_of_one_process():
    p = 3
    weights = list(torch.linspace(-2, 2, p * 10, dtype=torch.float64).view(p, 2, 5).exp().cos())
    together = [w.clone().requires_grad_() for w in weights]
    whole = torch.cat(together)
    mean = sum(whole.sin() * (r + 1) for r in range(p)) / p
    shards = (p * mean * whole).split(split_sizes(5, p), 1)
    sum(shard.pow(2).sum() * (r + 2) for r, shard in enumerate(shards)).backward()
    for backend in ("gloo", "sim"):
        run = p101.launch(objective_of_all_ranks, weights, world_size=p, backend=backend)
        for grad, w in zip(run.results, together):
            torch.testing.assert_close(grad, w.grad, rtol=1e-12, atol=1e-12)


def backward_of_nothing():
    """A rank that got no part of the result calls backward too.

    Its x gets its gradient, or zeros if no rank used it.
    """
    received = []
    for function in (autograd.gather, autograd.reduce, autograd.broadcast, autograd.scatter):
        x = torch.ones(2, 2, requires_grad=True)
        function(x, 1).sum().backward()
        received.append(x.grad.tolist())
    x = torch.ones(2, 2, requires_grad=True)
    autograd.all_reduce(x, group=[0, 1]).sum().backward()
    return [*received, x.grad.tolist()]


def test_a_rank_that_gets_no_part_of_the_result_takes_part_in_backward():
    ones, zeros = [[1.0, 1.0]] * 2, [[0.0, 0.0]] * 2
    threes, twos = [[3.0, 3.0]] * 2, [[2.0, 2.0]] * 2
    assert p101.launch(backward_of_nothing, world_size=3).results == [
        [ones, ones, zeros, zeros, twos],
        [ones, ones, threes, ones, twos],
        [ones, ones, zeros, zeros, zeros],
    ]


def no_backward():
    missed = []
    for call in (
        lambda x: autograd.all_reduce(x, "max"),
        lambda x: autograd.reduce(x, 0, "min"),
        lambda x: autograd.reduce_scatter(x, 0, "product"),
        lambda x: replicated.reduce_from_group(x, "max"),
    ):
        result = call(torch.ones(4, requires_grad=True))
        try:
            result.sum().backward()
            missed.append(result)
        except NotImplementedError as error:
            if "has no backward here, only 'sum' and 'mean' have" not in str(error):
                missed.append(error)
    assert not autograd.all_reduce(torch.ones(4)).requires_grad
    assert not autograd.all_reduce(torch.ones(4, dtype=torch.int64)).requires_grad
    return missed


def test_product_max_and_min_say_that_they_have_no_backward():
    assert p101.launch(no_backward, world_size=2).results == [[], []]


def graph_of_every_collective():
    """The class of each collective's node in the graph, if x requires a gradient and if not."""
    found = {}
    for wanted in (False, True):
        for name in [*collectives.TEXTBOOK, *replicated.__all__]:
            if name != "barrier":
                x = torch.ones(4, 4, requires_grad=wanted)
                y = getattr(autograd, name)(x)
                found[name, wanted] = y.grad_fn and type(y.grad_fn).__name__
    return found


def test_recording_does_not_change_what_runs():
    plain, recorded = (
        p101.launch(graph_of_every_collective, world_size=2, trace=trace).results
        for trace in (False, True)
    )
    assert plain == recorded
    nodes = [(wanted, node) for of_rank in plain for (_, wanted), node in of_rank.items()]
    assert all((node is not None) == wanted for wanted, node in nodes)
    assert plain[0]["all_reduce", True] == "AllReduceBackward"


def both_conventions():
    x = torch.ones(2, requires_grad=True)
    autograd.all_reduce(x).sum().backward()
    y = torch.ones(2, requires_grad=True)
    replicated.reduce_from_group(y, "mean").sum().backward()
    z = torch.ones(2, requires_grad=True)
    replicated.copy_to_group(z, group=[0, 2]).sum().backward()  # rank 1 is idle: z passes unchanged
    with pytest.raises(ValueError, match="'tree' is unknown"):
        replicated.copy_to_group(z, algorithm="tree")
    with pytest.raises(ValueError, match="'tree' is unknown"):
        replicated.scatter_to_group(z, algorithm="tree")
    return x.grad.tolist(), [round(g, 6) for g in y.grad.tolist()], z.grad.tolist()


def test_the_two_conventions_side_by_side():
    a, b, c = p101.launch(both_conventions, world_size=3).results
    assert a == c == ([3.0, 3.0], [0.333333] * 2, [2.0, 2.0])
    assert b == ([3.0, 3.0], [0.333333] * 2, [1.0, 1.0])


def there_and_back():
    rank = dist.get_rank()
    x = torch.full((3, 2), float(rank + 1), requires_grad=True)
    if rank == 0:
        point_to_point.send(x.t() * 2, 0, group=[2, 0]).sum().backward()  # strided on purpose
    elif rank == 2:
        got = point_to_point.receive(x.t(), 1, group=[2, 0])
        (got * torch.arange(6.0).view(2, 3)).sum().backward()
        assert got.tolist() == [[2.0] * 3] * 2
    with pytest.raises(ValueError, match="own position"):
        point_to_point.send(x, rank)
    with pytest.raises(ValueError, match="src=3"):
        point_to_point.receive(x, 3)
    idle = point_to_point.receive(x, 0, group=[(rank + 1) % 3, (rank + 2) % 3])
    return None if x.grad is None else x.grad.tolist(), idle.shape


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_send_and_receive_are_each_others_adjoint(backend):
    results = launched(there_and_back, backend, 3)
    assert results[0][0] == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    assert results[1][0] is None
    assert results[2][0] == [[0.0, 0.0]] * 3
    assert all(shape == (0,) for _, shape in results)
