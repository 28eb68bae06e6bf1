"""The simulator's rows, each of which is both sides of a message, become a send and a receive."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel101.laboratory.record.events import EventGroup, events_of
from tests.sim.programs import run


def send_two(rank):
    for _ in range(2):
        dist.send(torch.ones(3), 1, tag=7) if rank == 0 else dist.recv(torch.empty(3), 0, tag=7)


def test_a_row_of_two_sides_becomes_two_events():
    events = events_of(run(send_two, 2, payload_bytes=100).events)
    about = {"tag": 7, "nbytes": 12, "group": EventGroup("world", (0, 1), None), "shape": (3,)}
    about |= {"dtype": "float32", "payload": [1.0] * 3}
    for number, (send, recv) in enumerate(zip(events[::2], events[1::2], strict=True), start=1):
        sides = {"start": send.start, "end": send.end, "where": send.where, "seq": number}
        assert send == send._replace(rank=0, kind="send", peer=1, **sides, **about)
        assert recv == send._replace(
            rank=1, kind="recv", peer=0, posted=recv.posted, where=recv.where
        )
        assert send.posted <= send.start < send.end and recv.posted <= recv.start
        first = send_two.__code__.co_firstlineno
        assert send.where == recv.where == f"{__file__}:{first + 2}"
    assert len(events) == 4
