"""A wrong call is an error at once, on every rank, before any message.

A group is anything that names ranks in order.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel101 as p101
from parallel101 import autograd, collectives
from parallel101.collectives.auto import choose
from parallel101.collectives.comm import backends_in, batches, comm_of
from parallel101.mesh import group_of
from tests.collectives.cases import (
    MOVING,
    REDUCING,
    WITH_DIM,
    answer,
    arguments,
    differs,
    transposed,
    values,
)

X = torch.ones(4, 6)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls complex32 experimental
    HALF = torch.zeros(4, dtype=torch.complex32)
WRONG = {  # call → what the error's message must contain
    'all_gather(X, algorithm="rign")': "'rign'.*'auto', 'direct', 'ring'",
    'all_reduce(X, algorithm="no such algorithm")': "all_reduce has 'auto'.*'torus'",
    'barrier(algorithm="tree")': "'dissemination'",
    'all_reduce(X, "avg")': "'avg' is unknown.*'sum', 'mean', 'product', 'max', 'min'",
    "reduce(X, op=torch.sum)": "expected one of 'sum'",
    'all_reduce(X.long(), "mean")': "mean.*int64",
    "reduce_scatter(X.bool())": "'sum' has no meaning for bool.*'max'",
    'all_reduce(X.cfloat(), "max")': "'max' has no meaning for torch.complex64",
    'all_reduce(HALF, "mean")': "'mean' has no meaning for torch.complex32",
    "all_gather(X, 2)": r"dim=2.*shape \(4, 6\).*expected an int from -2 to 1",
    "all_gather(X[0, 0])": r"no dims.*x\.reshape",
    'scatter(X, dim="rows")': "dim='rows'",
    "all_gather(X, dim=True)": "dim=True",
    "all_to_all(X, 0, -3)": "concat_dim=-3",
    "broadcast(X, 3)": "src=3.*0 to 2",
    'all_reduce(X, algorithm="chain")': "'chain' is unknown",
    'broadcast(X, algorithm="binomial", segment_bytes=4)': "=4 with algorithm='binomial': only",
    "reduce(X, segment_bytes=4)": "algorithm='auto': only",
    'reduce(X, algorithm="pipelined_chain", segment_bytes=3)': "at least one element of x, 4 bytes",
    'broadcast(X, algorithm="pipelined_chain", segment_bytes=4.0)': "=4.0: expected an int",
    "gather(X, -1)": "dst=-1",
    'reduce(X, "sum")': "dst='sum'",
    "scatter(X, sizes=[1, 1, 1])": r"sum to 3, but x has 4 along dim 0",
    "reduce_scatter(X, sizes=[2, 2])": r"=\[2, 2\].*each of the group's 3 ranks",
    "gather(X, sizes=[4, 4, -4])": "all 0 or more, one for each",
    "all_gather(X, sizes=[7, 7, 7])": r"sizes=\[7, 7, 7\].*shape \(4, 6\)",
    "all_gather(X, sizes=4)": "sizes=4: expected a list",
    "gather(X[:1], sizes=[True] * 3)": "expected a list of sizes",
    "all_to_all(X, 0, 0, split_sizes=[2, 1, 1], concat_sizes=[3, 3, 3])": "own block has size",
    'all_to_all(X[:3], 0, 0, concat_sizes=[1, 1, 1], algorithm="bruck")': "'bruck' passes on",
    'all_reduce(X, algorithm="torus")': "'torus' needs a DeviceMesh of two axes",
    'all_gather(X, algorithm="torus")': "'torus' needs a DeviceMesh of two axes",
    'reduce_scatter(X, algorithm="torus")': "'torus' needs a DeviceMesh of two axes",
    'all_to_all(X, algorithm="torus")': "'torus' needs a DeviceMesh of two axes",
    "all_gather([1, 2])": "x is a list: expected a tensor",
    "all_gather(X.to_sparse())": "dense",
    'all_reduce(X, group="world")': "group='world': expected None",
    "all_reduce(X, group=3)": "group=3: expected",
    "all_reduce(X, group={0, 1, 2})": "ranks in order",
    "all_reduce(X, group=np.array([0, 1, 2]))": "ranks in order",
    "all_reduce(X, group=torch.tensor([0, 1, 2]))": "ranks in order",
    "copy_to_group(X, group=[0, 0])": "twice",
    'copy_to_group(X, algorithm="two_level")': "'two_level' needs a DeviceMesh",
    "all_reduce(X, group=[])": r"group=\[\]",
    "all_reduce(X, group=[0, 1, 1])": "twice",
    "all_reduce(X, group=[0, 3])": "ranks from 0 to 2",
}


def wrong_calls(library):
    missed, names = [], {"copy_to_group": p101.copy_to_group, "X": X, "HALF": HALF}
    names |= {"torch": torch, "np": np}
    for name in collectives.TEXTBOOK:
        names[name] = functools.partial(getattr(library, name), group=dist.group.WORLD)
    for call, message in WRONG.items():
        try:
            with pytest.raises((ValueError, TypeError), match=message):
                eval(call, names)
        except (pytest.fail.Exception, Exception) as fault:
            missed.append((call, repr(fault)))
    library.barrier()  # no rank still waits, no message is in flight
    return missed


@pytest.mark.parametrize("library", [collectives, autograd], ids=["collectives", "autograd"])
def test_a_wrong_call_is_an_error_on_every_rank_before_any_message(library):
    run = p101.launch(wrong_calls, library, world_size=3, backend="sim")
    assert run.results == [[]] * 3
    assert run.trace.messages_sent == [2] * 3  # the barrier's


def groups():
    """Name, group, its ranks in order (on every rank), for a world of 6."""
    yield "ranks", [5, 0, 3], [5, 0, 3]
    yield "one rank", [4], [4]
    yield "a range", range(1, 6, 2), [1, 3, 5]
    yield "a process group", dist.new_group([1, 2, 4]), [1, 2, 4]
    rows = DeviceMesh("cpu", [[4, 1], [0, 5]], mesh_dim_names=("x", "y"))
    yield "a mesh of two axes", rows, [4, 1, 0, 5]
    rank = dist.get_rank()
    lines = {"x": [[4, 0], [1, 5]], "y": [[4, 1], [0, 5]]}
    for axis, options in lines.items():
        mine = next((line for line in options if rank in line), None)
        if mine is None:  # an idle rank cannot slice the mesh, so it passes the whole
            yield f"axis {axis}", rows, options[0]
        else:
            yield f"axis {axis}", rows[axis], mine
    box = init_device_mesh("cpu", (1, 3, 2), mesh_dim_names=("a", "b", "c"))
    yield "axes a and c", box["a", "c"], [rank // 2 * 2, rank // 2 * 2 + 1]


def every_operation_on_every_group():
    rank, wrong = dist.get_rank(), []
    for label, group, ranks in groups():
        position = ranks.index(rank) if rank in ranks else None
        xs = [values(r, (7, 5)) for r in ranks]
        x = values(rank, (7, 5))
        for operation in MOVING | REDUCING:
            auto = {"auto": getattr(autograd, operation)}
            for name, function in (auto | autograd.algorithms(operation)).items():
                root, dim = len(ranks) - 1, -1 if operation in WITH_DIM else 0
                if position is None:
                    expected = x.new_empty(0)
                elif operation == "all_to_all":
                    expected = transposed(xs, position, 0, 0)
                else:
                    expected = answer(operation, xs, position, root=root, dim=dim)
                given = arguments(operation, root=root, dim=-1)
                fault = differs(expected, function, x, group=group, **given)
                wrong += [(label, operation, name, fault)] * bool(fault)
        collectives.barrier(group=group)
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_any_group(backend):
    run = p101.launch(every_operation_on_every_group, world_size=6, backend=backend)
    assert run.results == [[]] * 6


def one_group_only(ranks):
    for operation in MOVING | REDUCING:
        for function in autograd.algorithms(operation).values():
            function(torch.ones(6, 6), group=ranks)
    collectives.barrier(group=ranks)


def test_idle_ranks_send_nothing():
    trace = p101.launch(one_group_only, [1, 4, 2], world_size=5, backend="sim").trace
    assert [sent > 0 for sent in trace.messages_sent] == [False, True, True, False, True]
    assert [received > 0 for received in trace.bytes_received] == [False, True, True, False, True]


def on_a_mesh(shapes):
    rank, p, wrong = dist.get_rank(), dist.get_world_size(), []
    sizes = [(3 * r + 2) % 5 for r in range(p)]

    def check(operation, algorithm, expected, xs, **given):
        function = getattr(autograd, operation)
        fault = differs(expected, function, xs[rank], group=mesh, algorithm=algorithm, **given)
        wrong.extend([(shape, operation, algorithm, given, fault)] * bool(fault))

    def along(n, dim):
        return (3, n) if dim else (n, 3)

    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        xs = [values(r, (13, 5)) for r in range(p)]
        for algorithm, op in product(("two_level", "torus"), ("sum", "mean", "max")):
            check("all_reduce", algorithm, answer("all_reduce", xs, rank, op=op), xs, op=op)
        for dim in (0, 1):
            uneven = [values(r, along(sizes[r], dim)) for r in range(p)]
            summed = [values(r, along(sum(sizes), dim)) for r in range(p)]
            for operation, ys, given in (
                ("all_gather", xs, {"dim": dim}),
                ("all_gather", uneven, {"dim": dim, "sizes": sizes}),
                ("reduce_scatter", xs, {"dim": dim, "op": "max"}),
                ("reduce_scatter", summed, {"dim": dim, "sizes": sizes}),
            ):
                check(operation, "torus", answer(operation, ys, rank, **given), ys, **given)
            for ys, split, given in ((uneven, 1 - dim, {"concat_sizes": sizes}), (xs, dim, {})):
                dims = {"split_dim": split, "concat_dim": dim}
                expected = transposed(ys, rank, split, dim)
                check("all_to_all", "torus", expected, ys, **dims, **given)
    return wrong


@pytest.mark.parametrize(
    ("backend", "shapes"),
    [
        ("gloo", [(3, 2)]),
        ("sim", [(2, 4), (2, 2, 2)]),
        ("sim", [(2, 3), (1, 6)]),
        ("sim", [(1, 1)]),
    ],
    ids=str,
)
def test_along_the_axes_of_a_mesh(backend, shapes):
    p, rules = math.prod(shapes[0]), "nccl" if backend == "sim" else "gloo"
    run = p101.launch(on_a_mesh, shapes, world_size=p, backend=backend, rules=rules)
    assert run.results == [[]] * p


def overlapping_groups():
    """Any two of these groups share a rank, and ranks call their all-reduces in different
    orders.
    """
    rank = dist.get_rank()
    total = torch.tensor([0.0])
    for ranks in ([0, 1], [1, 2], [2, 0]):
        if rank in ranks:
            total += collectives.all_reduce(torch.tensor([10.0**rank]), group=ranks)
    return total.item()


def test_groups_may_overlap():
    assert p101.launch(overlapping_groups, world_size=3).results == [11 + 101, 11 + 110, 110 + 101]


def late_ones():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    p101.compute(float(rank))  # on the virtual clock, rank r is r seconds late
    with p101.span("barrier"):
        collectives.barrier()
    return world_size


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_no_rank_leaves_a_barrier_before_all_have_entered(world_size):
    run = p101.launch(late_ones, world_size=world_size, backend="sim", rules="nccl")
    spans = run.trace.spans("barrier")
    assert len(spans) == world_size
    assert min(span.end for span in spans) >= world_size - 1


def test_algorithms_have_the_operations_arguments_and_show_their_own_source():
    for operation, table in collectives.TEXTBOOK.items():
        public = inspect.signature(getattr(autograd, operation)).parameters
        for name, function in autograd.algorithms(operation).items():
            own = list(inspect.signature(function).parameters)
            assert own == [p for p in public if p != "algorithm"]
            assert inspect.getsource(function) == inspect.getsource(table[name])
            assert inspect.getsource(function).startswith((f"def {name}(", f"def {name}_steps("))
            assert function.__name__ == name
    with pytest.raises(ValueError, match=r"operation='allreduce' is unknown.*'all_reduce'"):
        autograd.algorithms("allreduce")


def test_an_old_name_of_an_algorithm_works_and_is_not_listed():
    table = autograd.algorithms("broadcast")
    assert inspect.getsource(table["chain"]) == inspect.getsource(table["pipelined_chain"])
    assert "chain" not in list(table)
    with pytest.raises(KeyError, match="chain"):
        autograd.algorithms("all_reduce")["chain"]


def test_auto_always_finds_a_rule_that_the_operation_has():
    for operation, table in collectives.TEXTBOOK.items():
        for nbytes in (0, 1000, 10**6, 10**9):
            for ranks in (1, 2, 8, 9, 1000):
                assert choose(operation, "auto", table, nbytes, ranks) in table.values()


def sent_from(device):
    said = r"is on cuda:0, but the group \(cpu:.*gloo\) sends from cpu only: move it there"
    with pytest.raises(ValueError, match=said):
        comm_of(group_of(None), torch.device(device), "all_reduce")
    # a single rank sends nothing
    comm_of(group_of([dist.get_rank()]), torch.device(device), "all_reduce")
    return True


def test_a_group_knows_the_devices_from_which_it_sends():
    assert backends_in("cpu:gloo,cuda:gloo") == {"cpu": "gloo"}
    assert backends_in("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backends_in("cpu:parallel101_gloo") == {"cpu": "parallel101_gloo"}
    assert backends_in("cuda:parallel101_nccl") == {"cuda": "parallel101_nccl"}
    assert [batches(of) for of in ("gloo", "sim", "nccl", "parallel101_nccl")] == [0, 0, 1, 1]


def test_gloo_says_that_it_cannot_send_from_a_gpu():
    assert p101.launch(sent_from, "cuda:0", world_size=2).results == [True, True]
