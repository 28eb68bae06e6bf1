"""batch_isend_irecv through the recorded group, as on NCCL: all messages start as one batch and
share its work, and each has an event.

This needs no GPU: gloo takes the place of NCCL, and holds back what is posted between
_start_coalescing and _end_coalescing.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.collectives import comm as comm_module
from tests.collectives.cases import MOVING, answer, arguments, differs, values


class All(dist.Work):
    """The work of a batch. Unlike gloo's own work, it can be waited for several times."""

    def __init__(self, works):
        super().__init__()
        self.works = works

    def wait(self, *timeout):
        while self.works:
            self.works.pop().wait(*timeout)
        return True


class Coalescing:
    """gloo that starts messages in batches, as NCCL does.

    A message outside a batch is an error here.
    """

    def __init__(self, gloo):
        self.gloo, self.held = gloo, None

    def __getattr__(self, name):
        return getattr(self.gloo, name)

    def send(self, *message):
        self.held.append(partial(self.gloo.send, *message))

    def recv(self, *message):
        self.held.append(partial(self.gloo.recv, *message))

    def _start_coalescing(self):
        self.held = []

    def _end_coalescing(self):
        held, self.held = self.held, None
        return All([post() for post in held])


def as_nccl():
    group = dist.group.WORLD
    group.inner, group.backend = Coalescing(group.inner), "nccl"


def program():
    """Swap on a ring; then the answers of the collectives that differ from one process's."""
    as_nccl()
    comm_module.batches = lambda backend: True
    rank, p = dist.get_rank(), dist.get_world_size()
    inbox, outbox = torch.zeros(5), torch.full((5,), float(rank))
    messages = [
        dist.P2POp(dist.irecv, inbox, (rank - 1) % p),
        dist.P2POp(dist.isend, outbox, (rank + 1) % p),
    ]
    with p101.span("swap"):
        dist.batch_isend_irecv(messages)[0].wait()  # waits for all
    xs = [values(r, (2 * p + 1, 3)) for r in range(p)]
    return inbox.tolist(), [
        wrong
        for operation in sorted(MOVING - {"all_to_all"})
        for name in p101.algorithms(operation)
        if (
            wrong := differs(
                answer(operation, xs, rank),
                getattr(p101, operation),
                xs[rank],
                algorithm=name,
                **arguments(operation),
            )
        )
    ]


@pytest.mark.parametrize(("world_size", "trace"), [(2, True), (3, False), (3, True)])
def test_a_batch_starts_as_one_and_every_message_is_recorded(world_size, trace):
    run = p101.launch(program, world_size=world_size, trace=trace)
    assert run.results == [([float((rank - 1) % world_size)] * 5, []) for rank in range(world_size)]
    if trace:
        swap = {e.rank: e for e in run.trace.spans("swap")}
        sides = [
            (e.kind, e.rank, e.peer, e.nbytes)
            for e in run.trace.events
            if e.kind != "span" and e.end <= swap[e.rank].end
        ]
        assert sorted(sides) == [
            (kind, r, (r + step) % world_size, 20)
            for kind, step in (("recv", -1), ("send", 1))
            for r in range(world_size)
        ]
