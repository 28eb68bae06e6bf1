"""Asynchronous collectives: same values and bytes as the blocking ones, and communication
overlaps with compute.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.collectives import asynchronous
from parallel101.collectives.asynchronous import (
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from parallel101.laboratory.sim.network import Network
from parallel101.mesh import group_of
from tests.collectives.cases import OPS, answer, launched, negative, on_backends, values
from tests.collectives.test_costs import BYTES, STEPS, measured

SHAPES = [(1,), (7,), (12,), (5, 3), (0, 2)]


def wrong_values():
    """Every operation on every shape and group, many in flight at once."""
    p, rank, begun, wrong = dist.get_world_size(), dist.get_rank(), [], []
    for group, shape in product((None, list(range(p))[::-1][: max(1, p - 1)]), SHAPES):
        members = group_of(group)
        place, n = members.position, members.size
        x, xs = values(rank, shape), [values(r, shape) for r in members.ranks]

        def add(pending, operation, xs=xs, place=place, **given):
            expected = None if place is None else answer(operation, xs, place, **given)
            begun.append((operation, given, pending, expected))

        for op in OPS:
            add(all_reduce_async(x.clone(), op, group=group), "all_reduce", op=op)
        begun[-1][2].advance()  # some have advanced further than others
        inplace = x.clone()
        add(all_reduce_async(inplace, group=group, out=inplace), "all_reduce")
        add(all_gather_async(x.clone(), group=group), "all_gather")
        add(reduce_scatter_async(x.clone(), group=group), "reduce_scatter")
        if place is not None and shape[0] > 1:
            given = {"sizes": [shape[0] - (n > 1), 1, *[0] * n][:n], "op": "mean"}
            add(reduce_scatter_async(x.clone(), group=group, **given), "reduce_scatter", **given)
            sizes = given["sizes"]
            shards = [values(r, (m, *shape[1:])) for r, m in zip(members.ranks, sizes)]
            out = torch.empty_like(x)
            pending = all_gather_async(shards[place], group=group, sizes=sizes, out=out)
            add(pending, "all_gather", xs=shards, sizes=sizes)
    for operation, given, pending, expected in begun[::2] + begun[1::2]:
        result = pending.wait()
        same = result.numel() == 0 if expected is None else torch.equal(result, expected)
        if not same or not pending.done or pending.wait() is not result:
            wrong.append((operation, given, result, expected))
    return wrong


@on_backends(gloo=[2, 3], sim=[1, 2, 4, 5])
def test_values_are_those_of_one_process(backend, world_size):
    assert launched(wrong_values, backend, world_size) == [[]] * world_size


def in_one_buffer():
    """A reduce-scatter into the own block, then an all-gather into the same buffer: an
    all-reduce in place.
    """
    p, rank = dist.get_world_size(), dist.get_rank()
    flat = values(rank, (4 * p,))
    mine = flat.view(p, 4)[rank]
    reduce_scatter_async(flat, out=mine).wait()
    result = all_gather_async(mine, out=flat).wait()
    return (
        torch.equal(flat, answer("all_reduce", [values(r, (4 * p,)) for r in range(p)], rank))
        and result.data_ptr() == flat.data_ptr()
    )


@on_backends(gloo=[2], sim=[3])
def test_in_one_buffer(backend, world_size):
    assert launched(in_one_buffer, backend, world_size) == [True] * world_size


def one_after_the_other():
    for name, nbytes in (("all_reduce", 72), ("reduce_scatter", 72), ("all_gather", 24)):
        x = torch.ones(nbytes, dtype=torch.uint8)
        dist.barrier()
        with p101.span(f"{name} later"):
            getattr(asynchronous, f"{name}_async")(x).wait()
        dist.barrier()
        with p101.span(f"{name} now"):
            getattr(collectives, name)(x, algorithm="direct")


def test_bytes_and_steps_are_those_of_the_blocking_ones():
    for speed in (STEPS, BYTES):
        run = p101.launch(
            one_after_the_other, world_size=3, backend="sim", network=Network(**speed)
        )
        found = measured(run.trace)
        for name, rounds in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
            seconds, sent = found[f"{name} later"]
            assert (seconds, sent) == found[f"{name} now"] and sent == rounds * 2 * 24


def meanwhile(seconds):
    pending = all_reduce_async(torch.ones(300, dtype=torch.uint8))
    for _ in range(2):
        with p101.span("compute"):
            p101.compute(seconds)
        pending.advance()
    return pending.wait().sum().item()


def test_computing_and_sending_take_the_longer_of_the_two():
    for seconds in (0.0, 50.0, 1000.0):
        run = p101.launch(
            meanwhile,
            seconds,
            world_size=3,
            backend="sim",
            network=Network(latency=0.0, bandwidth=1.0),
        )
        assert run.results == [900] * 3
        part = 2 * 100.0  # each rank sends and receives two blocks of 100 bytes
        assert run.trace.makespan == 2 * max(seconds, part)
        first = min(event.start for event in run.trace.events if event.kind == "send")
        assert first == 0.0, "the first message starts before the first compute has ended"


def test_wrong_arguments_are_an_error_before_any_message():
    x = torch.ones(4, 3)
    for call, message in (
        (lambda: all_reduce_async(x.t()), "expected a contiguous tensor"),
        (lambda: all_reduce_async(torch.tensor(1.0)), "one dim or more"),
        (lambda: all_reduce_async(x, "most"), "op='most'"),
        (
            lambda: all_reduce_async(x, out=torch.ones(3, 4)),
            (
                r"out is torch.float32 of shape \(3, 4\) on cpu: expected torch.float32 of shape "
                r"\(4, 3\)"
            ),
        ),
        (lambda: reduce_scatter_async(x, sizes=[3]), "sum to 3"),
        (lambda: all_gather_async(x, out=x.double()), "out is torch.float64"),
        (lambda: all_reduce_async(negative(x)), "x has shape.*not lazily conjugated or negated"),
        (
            lambda: all_reduce_async(x, out=negative(x)),
            "out has shape.*not lazily conjugated or negated",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
