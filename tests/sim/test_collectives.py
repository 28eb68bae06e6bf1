"""torch's own collectives on the sim: they give what one process computes, take a ring's time,
and are one event for each rank.
"""

from __future__ import annotations

import functools
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute

from .programs import run, trace, wait_for

SIZES = [1, 2, 3, 5]
REDUCTIONS = {
    "SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]


def values(rank: int, shape=(6,), dtype=torch.float64) -> torch.Tensor:
    """The input of a rank: small integers, exact in every dtype."""
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if op == "AVG":
        return reduced("SUM", tensors) / len(tensors)
    return functools.reduce(REDUCTIONS[op], tensors)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


CASES = [(op, d) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") for d in FLOATS] + [
    (op, d) for op in REDUCTIONS for d in INTEGERS
]


@pytest.mark.parametrize("n", SIZES)
def test_reductions(n):
    def reductions(rank, op, dtype):
        root = n - 1
        op = getattr(dist.ReduceOp, op)
        x, y = (values(rank, (2, 3), dtype) for _ in range(2))
        part, single = torch.empty(3, dtype=dtype), torch.empty(1, 3, dtype=dtype)
        dist.all_reduce(x, op)
        dist.reduce(y, root, op)
        dist.reduce_scatter(part, list(values(rank, (n, 3), dtype)), op)
        dist.reduce_scatter_single(single, values(rank, (n, 3), dtype), op)
        assert torch.equal(single[0], part)
        return x, y, part

    by_rank = run(lambda rank: [reductions(rank, *case) for case in CASES], n).results
    for (op, dtype), *results in zip(CASES, *by_rank, strict=True):
        total = reduced(op, [values(r, (2, 3), dtype) for r in range(n)])
        pieces = reduced(op, [values(r, (n, 3), dtype) for r in range(n)])
        for rank, (x, y, part) in enumerate(results):
            at_root = total if rank == n - 1 else values(rank, (2, 3), dtype)
            same([x, y, part], [total, at_root, pieces[rank]])


MOVES = [
    (shape, dtype)
    for shape in ((3,), (), (0,), (2, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64)
]


@pytest.mark.parametrize("n", SIZES)
def test_moves(n):
    def moves(rank, shape, dtype):
        root = n // 2
        x = values(rank, shape, dtype)
        dist.broadcast(x, root)
        shards = [torch.empty(shape, dtype=dtype) for _ in range(n)]
        dist.all_gather(shards, values(rank, shape, dtype))
        mine = [torch.empty(shape, dtype=dtype) for _ in range(n)] if rank == root else None
        dist.gather(values(rank, shape, dtype), mine, root)
        given = torch.empty(shape, dtype=dtype)
        dist.scatter(
            given, [values(10 * r, shape, dtype) for r in range(n)] if rank == root else None, root
        )
        swapped = [torch.empty(shape, dtype=dtype) for _ in range(n)]
        dist.all_to_all(swapped, [values(100 * rank + r, shape, dtype) for r in range(n)])
        return x, shards, mine, given, swapped

    by_rank = run(lambda rank: [moves(rank, *case) for case in MOVES], n).results
    for (shape, dtype), *results in zip(MOVES, *by_rank, strict=True):
        everyone = [values(r, shape, dtype) for r in range(n)]
        for rank, (x, shards, mine, given, swapped) in enumerate(results):
            same([x, given], [values(n // 2, shape, dtype), values(10 * rank, shape, dtype)])
            same(shards, everyone)
            same(swapped, [values(100 * r + rank, shape, dtype) for r in range(n)])
            assert (mine is None) == (rank != n // 2)
            same(mine or [], everyone if mine else [])


@pytest.mark.parametrize("n", SIZES)
def test_single_tensor_forms(n):
    def program(rank):
        whole = torch.empty(2 * n, 3)
        dist.all_gather_single(whole, values(rank, (2, 3), torch.float32))
        in_place = torch.zeros(n, 3)
        in_place[rank] = rank
        dist.all_gather_single(in_place, in_place[rank : rank + 1])
        even = torch.empty(n, 2)
        dist.all_to_all_single(even, torch.full((n, 2), float(rank)))
        give, take = [(rank + r) % 3 for r in range(n)], [(r + rank) % 3 for r in range(n)]
        uneven = torch.empty(sum(take), 2)
        dist.all_to_all_single(uneven, torch.full((sum(give), 2), float(rank)), take, give)
        return whole, in_place, even, uneven

    shards = torch.cat([values(r, (2, 3), torch.float32) for r in range(n)])
    for rank, (whole, in_place, even, uneven) in enumerate(run(program, n).results):
        same([whole, in_place], [shards, torch.arange(float(n))[:, None].repeat(1, 3)])
        assert even[:, 0].tolist() == list(range(n))
        assert uneven[:, 1].tolist() == [r for r in range(n) for _ in range((r + rank) % 3)]


@pytest.mark.parametrize("n", [2, 3])
def test_coalesced_forms(n):
    def program(rank):
        xs = [torch.full((k,), float(rank)) for k in (1, 2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced(xs)
        a, b = torch.empty(n), torch.empty(2 * n)
        parts = [torch.empty(1), torch.empty(2)]
        with dist._coalescing_manager():
            dist.all_gather_single(a, torch.full((1,), float(rank)))
            dist.all_gather_single(b, torch.full((2,), float(rank)))
        with dist._coalescing_manager():
            dist.reduce_scatter_single(parts[0], torch.arange(float(n)))
            dist.reduce_scatter_single(parts[1], torch.arange(2.0 * n))
        return xs, a, b, parts

    total = n * (n - 1) / 2
    for rank, (xs, a, b, parts) in enumerate(run(program, n).results):
        assert [x.tolist() for x in xs] == [[total], [total] * 2]
        assert a.tolist() == list(range(n))
        assert b.tolist() == [r for r in range(n) for _ in range(2)]
        assert [part.tolist() for part in parts] == [
            [n * rank],
            [n * 2 * rank, n * (2 * rank + 1)],
        ]


def test_objects():
    def program(rank):
        n = dist.get_world_size()
        all_of_them, some, mine = [None] * n, [f"from {rank}"], [None]
        dist.all_gather_object(all_of_them, {"rank": rank, "long": "x" * rank})
        dist.broadcast_object_list(some, 1)
        gathered = [None] * n if rank == 0 else None
        dist.gather_object(rank, gathered, 0)
        dist.scatter_object_list(mine, [f"to {r}" for r in range(n)] if rank == 2 else None, 2)
        if rank == 0:
            dist.send_object_list([("a", 1)], 1)
        elif rank == 1:
            received = [None]
            dist.recv_object_list(received, 0)
            assert received == [("a", 1)]
        return all_of_them, some, gathered, mine

    for rank, result in enumerate(run(program, 3).results):
        everyone = [{"rank": r, "long": "x" * r} for r in range(3)]
        assert result == (everyone, ["from 1"], [0, 1, 2] if rank == 0 else None, [f"to {rank}"])


def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    def program(rank):
        group, n = dist.group.WORLD, dist.get_world_size()
        x = torch.arange(float(n)) + 10 * rank
        results = [
            functional.all_reduce(x, "sum", group),
            functional.all_gather_single(x, 0, group),
            functional.reduce_scatter_single(x, "avg", 0, group),
            functional.all_to_all_single(x, None, None, group),
            functional.broadcast(x, 1, group),
        ]
        return [(y + 0).tolist() for y in results]

    n = 3
    xs = [torch.arange(float(n)) + 10 * r for r in range(n)]
    for rank, (total, shards, part, swapped, sent) in enumerate(run(program, n).results):
        assert total == sum(xs).tolist() and shards == torch.cat(xs).tolist()
        assert part == [(sum(xs) / n)[rank].item()]
        assert swapped == [x[rank].item() for x in xs] and sent == xs[1].tolist()


ALPHA, BETA = 3.0, 0.5
SECONDS = {  # p ranks, v bytes: the table in sim/torch_collectives.py
    "all_reduce": lambda p, v: 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * v * BETA,
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
        lambda p, v: (p - 1) * ALPHA + (p - 1) / p * v * BETA,
    ),
    **dict.fromkeys(("broadcast", "reduce"), lambda p, v: (p - 1) * ALPHA + v * BETA),
    "barrier": lambda p, v: 2 * (p - 1) * ALPHA,
}


@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_each_takes_the_rings_time_from_the_last_arrival_and_is_one_event_a_rank(p):
    def program(rank):
        compute(float(rank))
        whole, shard = torch.ones(2 * p), torch.ones(2)
        first = rank == 0
        dist.all_reduce(whole)
        dist.all_gather_single(whole, shard)
        dist.reduce_scatter_single(shard, whole)
        dist.all_to_all_single(torch.empty(2 * p), whole)
        dist.gather(shard, list(torch.empty(p, 2)) if first else None, 0)
        dist.scatter(shard, list(torch.ones(p, 2)) if first else None, 0)
        dist.broadcast(whole, 0)
        dist.reduce(whole, 0)
        dist.barrier()

    events = trace(run(program, p, Network(latency=ALPHA, bandwidth=1 / BETA))).events
    at = p - 1.0
    for seq, (kind, seconds) in enumerate(SECONDS.items(), start=1):
        mine = [e for e in events if e.kind == kind]
        assert [e.rank for e in mine] == list(range(p))
        rooted = kind in ("gather", "scatter", "broadcast", "reduce")
        about = seq, "world", at, 0 if rooted else None, "sum" if "reduce" in kind else None
        assert {(e.seq, e.group.name, e.start, e.peer, e.name) for e in mine} == {about}
        took = seconds(p, 4 * 2 * p) if p > 1 else 0.0
        assert all(e.posted <= at and e.end == pytest.approx(at + took) for e in mine)
        assert max(e.nbytes for e in mine) == (0 if kind == "barrier" else 8 * p)
        at = mine[0].end
    assert not trace(run(program, p)).messages_sent[0]


def test_a_ring_over_nodes_takes_the_time_of_the_slow_links():
    def program(rank):
        nodes = [dist.new_group([2 * node, 2 * node + 1]) for node in range(2)]
        dist.all_reduce(torch.ones(1), group=nodes[rank // 2])
        dist.all_reduce(torch.ones(1))

    network = Network.two_level(
        2, latency=5.0, bandwidth=math.inf, inside_latency=1.0, inside_bandwidth=math.inf
    )
    ends = {e.group.name: e.end - e.start for e in trace(run(program, 4, network)).events}
    assert ends == {"1": 2.0, "2": 2.0, "world": 30.0}


def test_async_works_and_futures():
    def program(rank):
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda f: f.value()[0] * 10)
        before = x.tolist()
        after = future.wait().tolist()
        assert work.is_completed() and x.tolist() == [3.0, 3.0]
        late = work.get_future()
        return before, after, late.done(), late.wait()[0].tolist()

    assert run(program, 3).results == [
        ([float(r)] * 2, [30.0, 30.0], True, [3.0, 3.0]) for r in range(3)
    ]


def test_the_collectives_of_a_group_end_in_their_order():
    def program(rank):
        alone = dist.new_group(range(3))
        first = dist.all_reduce(torch.ones(1000), async_op=True)
        other = dist.all_reduce(torch.ones(1), group=alone, async_op=True)
        dist.barrier()
        return first.is_completed(), other.is_completed()

    result = run(program, 3)
    assert result.results == [(True, True)] * 3
    ends = {(e.kind, e.group.name): e.end for e in trace(result).events}
    assert ends["all_reduce", "1"] < ends["all_reduce", "world"] < ends["barrier", "world"], (
        "another group need not wait"
    )


def test_a_futures_callback_may_start_the_next_collective():
    """As in torch's PowerSGD hook. The callback runs while its rank is blocked in another call."""

    def program(rank):
        x, y, started = torch.ones(1), torch.ones(1), []
        dist.all_reduce(x, async_op=True).get_future().add_done_callback(
            lambda _: started.append(dist.all_reduce(y, async_op=True))
        )
        if rank == 0:
            dist.recv(torch.empty(1), 1)
        else:
            while not started:
                # to itself, so that other ranks can run
                wait_for([dist.isend(torch.ones(1), rank), dist.irecv(torch.ones(1), rank)])
                compute(1.0)
            started[0].wait()
            dist.send(torch.ones(1), 0)
        started[0].wait()
        return y.item()

    assert run(program, 2).results == [2.0, 2.0]


def test_payload_and_shape_are_of_what_the_rank_put_in():
    def program(rank):
        dist.all_reduce(torch.full((2,), float(rank)))
        dist.all_reduce(torch.zeros(100))
        give = [torch.ones(1), torch.ones(1)]
        dist.all_to_all([torch.empty(1), torch.empty(1)], give)  # each may have another shape
        dist.all_to_all_single(torch.empty(2, 1), torch.ones(2, 1))

    events = trace(run(program, 2, payload_bytes=8)).events
    ones, found = [1.0, 1.0], [(e.payload, e.shape) for e in events if e.rank == 1]
    assert found == [(ones, (2,)), (None, (100,)), (ones, ()), (ones, (2, 1))]


def test_an_average_of_integers_under_nccls_rules_is_rounded_towards_zero():
    """As Lightning asks for, when it logs with sync_dist on NCCL."""

    def program(r):
        x = torch.tensor([3, -3]) if r == 0 else torch.tensor([0, 0])
        dist.all_reduce(x, dist.ReduceOp.AVG)
        return x.tolist()

    assert run(program, 2, rules="nccl").results == [[1, -1]] * 2


def test_a_sum_of_complex_numbers():
    """torch sends them as pairs."""
    run(lambda r: dist.all_reduce(torch.ones(2, dtype=torch.complex64)), 2)


REFUSED = {  # on the rank that passes it, as on gloo
    "all_reduce of torch.int16": lambda x: dist.all_reduce(x.short()),
    "broadcast of torch.uint16": lambda x: dist.broadcast(x.to(torch.uint16), 0),
    "does not have the reduction 'premul_sum'": lambda x: dist.all_reduce(
        x, dist._make_nccl_premul_sum(2.0)
    ),
    "average of torch.int64 values": lambda x: dist.all_reduce(x.long(), dist.ReduceOp.AVG),
    "bits of whole numbers, and these are float32": lambda x: dist.all_reduce(
        x, dist.ReduceOp.BAND
    ),
    "dtypes: torch.float32 and torch.int64": lambda x: dist.reduce_scatter_single(
        x, torch.ones(4).long()
    ),
    "sizes: 2 and 3": lambda x: dist.all_gather([x, torch.ones(3)], x),
    "sizes: 2 and 4": lambda x: dist.reduce_scatter_single(x, torch.ones(8)),
    "list of outputs has 3 tensors": lambda x: dist.all_gather([x, x, x], x),
    "cannot be split into 2 equal pieces": lambda x: dist.all_gather_single(torch.ones(5), x),
    "split sizes [1, 3] do not fit": lambda x: dist.all_to_all_single(x, x.clone(), [1, 3], [1, 1]),
}


def test_what_gloo_refuses_on_a_rank_is_refused_there():
    def program(rank):
        for words, call in REFUSED.items():
            with pytest.raises(RuntimeError, match=re.escape(words)):
                call(torch.ones(2))

    run(program, 2)
