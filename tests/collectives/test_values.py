"""Every operation by every algorithm gives the values that one process computes: any world
size, root, dim, shape, stride, dtype, op, split.
"""

from __future__ import annotations

from itertools import product

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
    launched,
    negative,
    on_backends,
    transposed,
    values,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def each_algorithm(operations):
    for operation in operations:
        for name, function in collectives.fixed(operation, vars(collectives)).items():
            yield operation, name, function
        yield operation, "auto", getattr(collectives, operation)


def conjugate(x):
    return torch.complex(x, 3 * x).conj()


# what may be the memory of a tensor of shape (2p, 6)
LAYOUTS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x.t()[::2, 1::2],
    "expanded": lambda x: x.t()[:1].expand(5, -1),
    "negated": negative,
    "conjugated": conjugate,
}


def cases(rank, p):
    """(operation, this rank's x, the result, the other arguments)"""
    everybody = range(p)

    def case(operation, xs, sizes=None, **given):
        expected = answer(operation, xs, rank, sizes=sizes, **given)
        given = arguments(operation, **given) | ({} if sizes is None else {"sizes": sizes})
        return operation, xs[rank], expected, given

    for operation in sorted((MOVING | REDUCING) - {"all_to_all"}):
        cut = operation in WITH_DIM
        for shape in [(3 * p, 2), (7,), (2, 3), (0, 3), (3, 0), (3, 2, 5), *[()] * (not cut)]:
            for dim in range(-len(shape), len(shape)) if cut else [0]:
                yield case(operation, [values(r, shape) for r in everybody], dim=dim)
        for layout in LAYOUTS.values():
            yield case(operation, [layout(values(r, (2 * p, 6))) for r in everybody], root=p - 1)
        for dtype in DTYPES:
            if dist.get_backend() != "nccl" or dtype != torch.int16:  # which it doesn't have
                xs = [values(r, (p, 3), dtype) for r in everybody]
                yield case(operation, xs, op="max" if dtype == torch.bool else "sum")
    xs = [values(r, (p + 2, 3), torch.int16).double() for r in everybody]
    for operation, root in product(sorted(ROOTED), {0, p // 2, p - 1}):
        yield case(operation, xs, root=root)
    for operation, op in product(sorted(REDUCING), OPS):
        yield case(operation, xs, op=op)
    uneven = [(3 * r + 2) % 5 for r in everybody]
    for sizes in (uneven, [0] * (p - 1) + [4], [5] + [0] * (p - 1), [0] * p):
        for operation, dim in product(sorted(WITH_DIM), range(3)):
            joined = sizes if operation in ("gather", "all_gather") else [sum(sizes)] * p
            shapes = [[joined[r] if d == dim else 3 for d in range(3)] for r in everybody]
            xs = [values(r, shape) for r, shape in enumerate(shapes)]
            yield case(operation, xs, sizes, root=p - 1, dim=dim)

    def turned(xs, *dims, **sizes):
        split, joined = (sizes.get(f"{name}_sizes") for name in ("split", "concat"))
        given = {"split_sizes": split and split[rank], "concat_sizes": joined}
        given |= {"split_dim": dims[0], "concat_dim": dims[1]}
        return "all_to_all", xs[rank], transposed(xs, rank, *dims, split), given

    for shape in [(3 * p, 2), (7, 5), (2, 3), (0, 3), (3, 0, 4), (3, 2, 5)]:
        for split_dim, concat_dim in product(range(len(shape)), range(-len(shape), len(shape))):
            yield turned([values(r, shape) for r in everybody], split_dim, concat_dim)
    for dtype in DTYPES:
        if dist.get_backend() != "nccl" or dtype != torch.int16:
            yield turned([values(r, (2 * p, p), dtype).t() for r in everybody], 0, 1)
    for layout in LAYOUTS.values():
        yield turned([layout(values(r, (2 * p, 6))) for r in everybody], 0, 1)
    for sizes in (uneven, [0] * (p - 1) + [4], [5] + [0] * (p - 1), [0] * p):
        xs = [values(r, (sum(sizes), sizes[::-1][r])) for r in everybody]
        yield turned(xs, 0, 1, split_sizes=[sizes] * p, concat_sizes=sizes[::-1])
    count = [[(2 * i + j) % 3 for j in everybody] for i in everybody]  # only the two know it
    xs = [values(r, (2, sum(count[r]))) for r in everybody]
    column = [count[r][rank] for r in everybody]
    yield turned(xs, 1, 1, split_sizes=count, concat_sizes=column)


def wrong_values():
    rank, p, wrong = dist.get_rank(), dist.get_world_size(), []
    for operation, x, expected, given in cases(rank, p):
        for _, name, function in each_algorithm([operation]):
            given.pop("segment_bytes", None)
            if name == "bruck" and given.get("split_sizes") and given["split_dim"] == 1:
                continue  # it passes on blocks whose sizes only the two ranks know
            if name == "pipelined_chain":
                given["segment_bytes"] = 56
            if fault := differs(expected, function, x, **given):
                wrong.append((operation, name, tuple(x.shape), x.dtype, given, fault))
    return wrong


@on_backends(gloo=[3], sim=[1, 2, 3, 4, 5, 8])
def test_values_are_those_of_one_process(backend, world_size):
    assert launched(wrong_values, backend, world_size) == [[]] * world_size


def gradients_with_lazy_marks():
    """The operations whose backward differs if its gradient is lazily conjugated or negated."""
    rank, p = dist.get_rank(), dist.get_world_size()
    wrong = []
    for mark in (negative, conjugate):
        x = mark(values(rank, (2 * p, 2 * p))).resolve_conj().resolve_neg().requires_grad_()
        for operation, name, _ in each_algorithm(MOVING | REDUCING):
            y = getattr(p101, operation)(x, algorithm=name)
            g = mark(values(rank, y.shape))
            (one,), (other,) = (
                torch.autograd.grad(y, x, h, retain_graph=True)
                for h in (g, g.resolve_conj().resolve_neg())
            )
            wrong += [(operation, name, mark.__name__)] * (not torch.equal(one, other))
    return wrong


@on_backends(gloo=[2], sim=[1, 3])
def test_gradients_may_be_lazily_conjugated_or_negated(backend, world_size):
    assert launched(gradients_with_lazy_marks, backend, world_size) == [[]] * world_size


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
    assert launched(chains_of_many_segments, backend, world_size) == [[]] * world_size


def non_sources_are_ignored():
    x = values(1, (4, 4)) if dist.get_rank() == 1 else torch.full((4, 4), torch.nan).double()
    xs = [values(1, (4, 4))] * dist.get_world_size()
    return [
        torch.equal(function(x, 1), answer(operation, xs, dist.get_rank()))
        for operation, _, function in each_algorithm(["broadcast", "scatter"])
    ]


def test_a_broadcast_or_scatter_ignores_the_values_on_other_ranks():
    for fine in launched(non_sources_are_ignored, "sim", 4):
        assert len(fine) > 5 and all(fine)


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
    for world_size in (2, 5, 8):
        results = launched(bits_of_awkward_floats, "sim", world_size)
        assert all(bits == results[0] for bits in results)
        assert "not the same twice" not in results[0].values()


def test_without_a_process_group_there_is_one_rank():
    x = values(0, (3, 2))
    for operation in MOVING | REDUCING:
        result = getattr(collectives, operation)(x)
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    collectives.barrier()
