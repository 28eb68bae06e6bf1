"""Every operation by every algorithm gives the values that one process computes: any world
size, root, dim, shape, stride, dtype, op.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from tests.collectives.cases import (
    MOVING,
    OPS,
    REDUCING,
    ROOTED,
    WITH_DIM,
    answer,
    arguments,
    differs,
    negative,
    on_backends,
    transposed,
    values,
)

GLOO, SIM = (3,), (1, 2, 5, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def each_algorithm(operations):
    for operation in operations:
        for name, function in collectives.fixed(operation, vars(collectives)).items():
            yield operation, name, function
        yield operation, "auto", getattr(collectives, operation)


def shapes_and_dims():
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    for operation, name, function in each_algorithm((MOVING | REDUCING) - {"all_to_all"}):
        shapes = [(3 * p, 2), (7,), (2, 3), (0, 3), (3, 0), (3, 2, 5)] + [()] * (
            operation not in WITH_DIM
        )
        for shape in shapes:
            for dim in range(-len(shape), len(shape)) if operation in WITH_DIM else [0]:
                xs = [values(r, shape) for r in range(p)]
                expected = answer(operation, xs, rank, dim=dim)
                fault = differs(expected, function, xs[rank], **arguments(operation, dim=dim))
                wrong += [(operation, name, shape, dim, fault)] * bool(fault)
    for _, name, function in each_algorithm(["all_to_all"]):
        for shape in [(3 * p, 2), (7, 5), (2, 3), (0, 3), (3, 0, 4), (3, 2, 5)]:
            for split_dim in range(len(shape)):
                for concat_dim in range(-len(shape), len(shape)):
                    xs = [values(r, shape) for r in range(p)]
                    expected = transposed(xs, rank, split_dim, concat_dim)
                    fault = differs(expected, function, xs[rank], split_dim, concat_dim)
                    wrong += [("all_to_all", name, shape, split_dim, concat_dim, fault)] * bool(
                        fault
                    )
    return wrong


@on_backends(gloo=GLOO, sim=SIM)
def test_any_shape_and_dim(backend, world_size):
    assert (
        p101.launch(shapes_and_dims, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


def roots_ops_strides_and_dtypes():
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    dtypes = DTYPES if p <= 5 else FLOATS[-1:]
    if dist.get_backend() == "nccl":  # which has no int16
        dtypes = tuple(dtype for dtype in dtypes if dtype != torch.int16)

    def check(operation, name, function, xs, label, **given):
        given = arguments(operation, **given)
        plain = {"root" if key in ("src", "dst") else key: value for key, value in given.items()}
        fault = differs(answer(operation, xs, rank, **plain), function, xs[rank], **given)
        wrong.extend([(operation, name, label, given, fault)] * bool(fault))

    for operation, name, function in each_algorithm(ROOTED):
        for root in {0, p // 2, p - 1}:
            check(
                operation,
                name,
                function,
                [values(r, (p + 2, 3)) for r in range(p)],
                "root",
                root=root,
            )
    for operation, name, function in each_algorithm(REDUCING):
        for op in OPS:
            check(
                operation,
                name,
                function,
                [values(r, (p + 2, 3), torch.int16).double() for r in range(p)],
                "op",
                op=op,
            )
    for operation, name, function in each_algorithm((MOVING | REDUCING) - {"all_to_all"}):
        whole = [values(r, (6, 2 * p)) for r in range(p)]
        check(operation, name, function, [x.t() for x in whole], "transposed", root=p - 1)
        check(operation, name, function, [x[::2, 1::2] for x in whole], "every second", root=p - 1)
        check(
            operation, name, function, [x[:1].expand(5, -1) for x in whole], "expanded", root=p - 1
        )
        for dtype in dtypes:
            op = "max" if dtype == torch.bool else "sum"
            check(
                operation,
                name,
                function,
                [values(r, (p, 3), dtype) for r in range(p)],
                dtype,
                op=op,
            )
    for _, name, function in each_algorithm(["all_to_all"]):
        for dtype in dtypes:
            xs = [values(r, (2 * p, p), dtype) for r in range(p)]
            fault = differs(
                transposed([x.t() for x in xs], rank, 0, 1), function, xs[rank].t(), 0, 1
            )
            wrong.extend([("all_to_all", name, dtype, fault)] * bool(fault))
    return wrong


@on_backends(gloo=GLOO, sim=SIM)
def test_any_root_op_stride_and_dtype(backend, world_size):
    assert (
        p101.launch(roots_ops_strides_and_dtypes, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


def conjugate(x):
    return torch.complex(x, 3 * x).conj()


def conjugates_and_negatives():
    """What is wrong: each operation of a lazily conjugated or negated tensor, and its backward
    with such a gradient.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    for mark in (negative, conjugate):
        x = mark(values(rank, (2 * p, 2 * p)))
        plain = x.resolve_conj().resolve_neg().requires_grad_()
        assert plain.data_ptr() != x.data_ptr()
        for operation, name, function in each_algorithm(MOVING | REDUCING):
            fault = differs(function(plain), function, x)
            y = getattr(p101, operation)(plain, algorithm=name)
            g = mark(values(rank, y.shape))
            (one,), (other,) = (
                torch.autograd.grad(y, plain, h, retain_graph=True)
                for h in (g, g.resolve_conj().resolve_neg())
            )
            wrong += [(operation, name, mark.__name__, fault)] * (
                bool(fault) or not torch.equal(one, other)
            )
    return wrong


@on_backends(gloo=[2], sim=[1, 3])
def test_lazily_conjugated_or_negated_tensors(backend, world_size):
    assert (
        p101.launch(conjugates_and_negatives, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


def uneven_shards():
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    for sizes in (
        [(3 * r + 2) % 5 for r in range(p)],
        [0] * (p - 1) + [4],
        [5] + [0] * (p - 1),
        [0] * p,
    ):
        for operation, name, function in each_algorithm(WITH_DIM):
            for dim in (0, 1, 2):
                if operation in ("gather", "all_gather"):
                    xs = [
                        values(r, [sizes[r] if d == dim else 3 for d in range(3)]) for r in range(p)
                    ]
                else:
                    xs = [
                        values(r, [sum(sizes) if d == dim else 3 for d in range(3)])
                        for r in range(p)
                    ]
                expected = answer(operation, xs, rank, root=p - 1, dim=dim, sizes=sizes)
                given = {**arguments(operation, root=p - 1, dim=dim), "sizes": sizes}
                fault = differs(expected, function, xs[rank], **given)
                wrong += [(operation, name, sizes, dim, fault)] * bool(fault)
        for _, name, function in each_algorithm(["all_to_all"]):
            joined = sizes[::-1]
            xs = [values(r, (sum(sizes), joined[r])) for r in range(p)]
            expected = torch.cat([x.split(sizes)[rank] for x in xs], 1)
            fault = differs(
                expected, function, xs[rank], 0, 1, split_sizes=sizes, concat_sizes=joined
            )
            wrong += [("all_to_all", name, sizes, fault)] * bool(fault)
            if name != "bruck":  # only sender and receiver know these sizes
                count = [[(2 * i + j) % 3 for j in range(p)] for i in range(p)]
                xs = [values(r, (2, sum(count[r]))) for r in range(p)]
                expected = torch.cat([xs[r].split(count[r], 1)[rank] for r in range(p)], 1)
                column = [count[r][rank] for r in range(p)]
                fault = differs(
                    expected, function, xs[rank], 1, 1, split_sizes=count[rank], concat_sizes=column
                )
                wrong += [("all_to_all, one dim", name, fault)] * bool(fault)
    return wrong


@on_backends(gloo=GLOO, sim=SIM)
def test_uneven_shards(backend, world_size):
    assert (
        p101.launch(uneven_shards, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


def chains_of_many_segments():
    """1.6 MB: by default three segments on a chain of four; whole elements; the old name."""
    rank, p = dist.get_rank(), dist.get_world_size()
    xs, src = [values(r, (200_001,)) for r in range(p)], min(1, p - 1)
    found = [differs(xs[src], collectives.broadcast, xs[rank], src, algorithm="chain")]
    for segment_bytes in (None, 400_004, 1_600_008, 10**9):
        options = {"algorithm": "pipelined_chain", "segment_bytes": segment_bytes}
        found.append(differs(xs[src], collectives.broadcast, xs[rank], src, **options))
        for op in ("sum", "mean", "max"):
            expected = answer("reduce", xs, rank, root=p - 1, op=op)
            found.append(differs(expected, collectives.reduce, xs[rank], p - 1, op, **options))
    return [wrong for wrong in found if wrong]


@on_backends(gloo=[4], sim=[2, 4])
def test_a_chain_passes_on_every_segment(backend, world_size):
    assert (
        p101.launch(chains_of_many_segments, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


def non_sources_are_ignored():
    rank = dist.get_rank()
    x = values(rank, (4, 4)) if rank == 1 else torch.full((4, 4), float("nan"), dtype=torch.float64)
    fine = []
    for operation, _, function in each_algorithm(["broadcast", "scatter"]):
        fine.append(
            torch.equal(
                function(x, 1), answer(operation, [values(1, (4, 4))] * dist.get_world_size(), rank)
            )
        )
    return all(fine)


def test_a_broadcast_or_scatter_ignores_the_values_on_other_ranks():
    assert p101.launch(non_sources_are_ignored, world_size=4).results == [True] * 4


def bits_of_awkward_floats():
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x = torch.randn(64, dtype=torch.float32) * 10.0 ** torch.randint(-8, 8, (64,))
    x[0], x[1] = (0.0, -0.0) if rank % 2 else (-0.0, 0.0)
    x[2] = float("nan") if rank == p - 1 else 1.0
    bits = {}
    for op in OPS:
        for name in collectives.TEXTBOOK["all_reduce"]:
            once, again = (
                collectives.all_reduce(x, op, algorithm=name).view(torch.int32).tolist()
                for _ in range(2)
            )
            bits[op, name] = once if once == again else "not the same twice"
    return bits


def test_all_reduce_gives_every_rank_the_same_bits_every_time():
    for backend, world_size in [("gloo", 3), ("sim", 2), ("sim", 5), ("sim", 8)]:
        run = p101.launch(bits_of_awkward_floats, world_size=world_size, backend=backend)
        assert all(bits == run.results[0] for bits in run.results)
        assert "not the same twice" not in run.results[0].values()


def test_without_a_process_group_there_is_one_rank():
    x = values(0, (3, 2))
    for operation in MOVING | REDUCING:
        result = getattr(collectives, operation)(x)
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    collectives.barrier()
