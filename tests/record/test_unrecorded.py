"""`unrecorded()` on real ranks: no events, the same numbers in those that follow, and errors
inside are named. (On sim: tests/sim.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.spans import compute, span, unrecorded


def exchange(rank):
    sent = dist.isend(torch.ones(3), 1 - rank)
    dist.recv(torch.empty(3), 1 - rank)
    sent.wait()


def program(block):
    rank = dist.get_rank()
    for _ in range(2):
        if block:
            with unrecorded():
                collectives.all_gather(torch.ones(1))
                with span("inside"):
                    compute(1.0)
                    exchange(rank)
                p101.all_reduce(torch.ones(2, requires_grad=True)).sum().backward()
                dist.all_reduce(x := torch.ones(1))
                assert x.item() == 2
                collectives.all_gather(torch.ones(1))
        with span("outside"):
            exchange(rank)
            collectives.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_record_is_the_same_with_and_without(backend):
    traces = [
        p101.launch(program, block, world_size=2, backend=backend, trace=True).trace
        for block in (True, False)
    ]
    zero = {"start": 0.0, "end": 0.0, "posted": 0.0}
    with_it, without = ([event._replace(**zero) for event in t.events] for t in traces)
    assert sorted(with_it, key=str) == sorted(without, key=str) and with_it
    assert not traces[0].unfinished
