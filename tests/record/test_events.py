"""The rows that ranks send hold the fields of Event or of MessageRow, in this order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel101.laboratory.record.events import Event, EventGroup, MessageRow, events_of
from parallel101.laboratory.sim.simulate import simulate


def send_two(rank):
    for _ in range(2):
        dist.send(torch.ones(3), 1, tag=7) if rank == 0 else dist.recv(torch.empty(3), 0, tag=7)


def test_a_message_of_the_simulator_is_one_row():
    rows = [MessageRow._make(row) for row in simulate(send_two, 2, payload_bytes=100).events]
    for number, row in enumerate(rows, start=1):
        assert (row.src, row.dst, row.tag, row.nbytes, row.seq) == (0, 1, 7, 12, number)
        about = (EventGroup("world", (0, 1), None), (3,), "float32", [1.0] * 3)
        assert (row.group, row.shape, row.dtype, row.payload) == about
        assert row.send_posted <= row.start < row.end and row.recv_posted <= row.start
        assert __file__ in row.send_where and __file__ in row.recv_where
    assert len(rows) == 2


def test_a_row_of_two_sides_becomes_two_events():
    group = EventGroup("world", (0, 1), None)
    message = {"tag": 7, "nbytes": 12, "start": 2.0, "end": 3.0, "group": group, "seq": 4}
    message |= {"shape": (3,), "dtype": "float32", "payload": [1.0]}
    sides = {"send_where": "a.py:1", "send_posted": 0.5, "recv_where": "b.py:2", "recv_posted": 1.5}
    row = MessageRow(src=0, dst=1, **sides, **message)
    send = Event(rank=0, kind="send", peer=1, where="a.py:1", posted=0.5, **message)
    assert events_of([tuple(row), tuple(send)]) == [
        send,
        send._replace(rank=1, kind="recv", peer=0, where="b.py:2", posted=1.5),
        send,
    ]
