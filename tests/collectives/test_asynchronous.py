"""Asynchronous collectives: same values and bytes as the blocking ones, and communication
overlaps with compute.
"""

from __future__ import annotations

import math

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
from parallel101.mesh import group_of, split_sizes
from tests.collectives.cases import OPS, answer, negative, on_backends, values

SHAPES = [(1,), (7,), (12,), (5, 3), (0, 2)]
GROUPS = {"all": lambda p: None, "turned": lambda p: list(reversed(range(p)))[: max(1, p - 1)]}


def wrong_values():
    """Every operation on every shape and group, several in flight at once, finished in the
    order in which they began.
    """
    p, rank, wrong, begun = dist.get_world_size(), dist.get_rank(), [], []
    for which, make in GROUPS.items():
        group = make(p)
        members = group_of(group)
        place = members.position
        for shape in SHAPES:
            x = values(rank, shape, torch.float64)
            xs = [values(r, shape, torch.float64) for r in members.ranks]
            expected = (
                {} if place is None else {op: answer("all_reduce", xs, place, op=op) for op in OPS}
            )
            for op in OPS:
                begun.append(
                    (
                        f"all_reduce {op} {shape} {which}",
                        all_reduce_async(x.clone(), op, group=group),
                        expected.get(op),
                    )
                )
            begun[-1][1].advance()  # some have advanced further than others
            inplace = x.clone()
            begun.append(
                (
                    f"all_reduce in place {shape}",
                    all_reduce_async(inplace, group=group, out=inplace),
                    expected.get("sum"),
                )
            )
            begun.append(
                (
                    f"all_gather {shape}",
                    all_gather_async(x.clone(), group=group),
                    None if place is None else torch.cat(xs),
                )
            )
            mine = (
                None
                if place is None
                else expected["sum"].split(split_sizes(shape[0], members.size))[place]
            )
            begun.append(
                (f"reduce_scatter {shape}", reduce_scatter_async(x.clone(), group=group), mine)
            )
            if place is not None and shape[0] > 1:
                sizes = (
                    [shape[0] - 1, 1, *[0] * members.size][: members.size]
                    if members.size > 1
                    else [shape[0]]
                )
                mine = expected["mean"].split(sizes)[place]
                begun.append(
                    (
                        "reduce_scatter sizes",
                        reduce_scatter_async(x.clone(), "mean", group=group, sizes=sizes),
                        mine,
                    )
                )
                own = values(rank, (sizes[place], *shape[1:]), torch.float64)
                every = torch.cat(
                    [
                        values(r, (s, *shape[1:]), torch.float64)
                        for r, s in zip(members.ranks, sizes)
                    ]
                )
                out = torch.empty_like(every)
                begun.append(
                    (
                        "all_gather sizes",
                        all_gather_async(own, group=group, sizes=sizes, out=out),
                        every,
                    )
                )
    for name, pending, expected in begun:
        result = pending.wait()
        same = result.numel() == 0 if expected is None else torch.equal(result, expected)
        if not same or not pending.done or pending.wait() is not result:
            wrong.append((name, result, expected))
    return wrong


@on_backends(gloo=[2, 3], sim=[1, 2, 4, 5])
def test_values_are_those_of_one_process(backend, world_size):
    assert (
        p101.launch(wrong_values, world_size=world_size, backend=backend).results
        == [[]] * world_size
    )


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
    assert (
        p101.launch(in_one_buffer, world_size=world_size, backend=backend).results
        == [True] * world_size
    )


@pytest.mark.parametrize("p", [3, 4])
def test_bytes_and_steps_are_those_of_the_blocking_ones(p):
    def run(module, name):
        getattr(module, name)(
            torch.ones(24 * p if name != "all_gather" else 24, dtype=torch.uint8), **extra[module]
        )

    def finished(name):
        getattr(asynchronous, f"{name}_async")(
            torch.ones(24 * p if name != "all_gather" else 24, dtype=torch.uint8)
        ).wait()

    extra = {collectives: {"algorithm": "direct"}}
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        for network in (
            Network(latency=1.0, bandwidth=math.inf),
            Network(latency=0.0, bandwidth=1.0),
        ):
            later = p101.launch(finished, name, world_size=p, backend="sim", network=network).trace
            now = p101.launch(
                run, collectives, name, world_size=p, backend="sim", network=network
            ).trace
            assert (
                later.bytes_sent
                == now.bytes_sent
                == [24 * (p - 1) * (2 if name == "all_reduce" else 1)] * p
            )
            assert later.makespan == now.makespan


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
        (lambda: all_reduce_async(negative(x)), "x is lazily conjugated or negated"),
        (lambda: all_reduce_async(x, out=negative(x)), "out is lazily conjugated or negated"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
