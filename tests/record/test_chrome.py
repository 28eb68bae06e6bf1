"""The export for Perfetto: slices of a thread nest or do not overlap, and each arrow leads from
a message's send to its receive.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.record.chrome import chrome_events
from parallel101.laboratory.record.events import Event, EventGroup
from parallel101.laboratory.record.trace import Trace

NETWORKS = {
    "a second each": p101.Network(latency=1.0, bandwidth=math.inf),
    "no time at all": p101.Network(latency=0.0, bandwidth=math.inf),
    "uneven": p101.Network(latency=1e-7, bandwidth=1e9),
}


def program():
    """Receives one after the other without a pause, and several sends at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with p101.span("outer"), p101.span("inner"):
        for size in (8, 1000):
            sends = [dist.isend(torch.ones(size), r) for r in range(n) if r != rank]
            for r in range(n):
                if r != rank:
                    dist.recv(torch.empty(size), r)
            for work in sends:
                work.wait()


def skewed() -> Trace:
    """Two clocks that disagree: the receive ends before the send starts."""
    group = EventGroup("world", (0, 1), "dp")
    send = Event(0, "send", 1, 0, 8, 2.0, 3.0, "a.py:1", 2.0, group, 0, (1,), "int64")
    return Trace([send, send._replace(rank=1, kind="recv", peer=0, start=0.5, end=1.5)], 2, "gloo")


@pytest.mark.parametrize("world", [*NETWORKS, "gloo", "skewed"])
def test_slices_nest_and_arrows_lead_from_the_send_to_the_receive_of_a_message(world):
    links = {"backend": "sim", "network": NETWORKS[world]} if world in NETWORKS else {}
    trace = skewed()
    if world != "skewed":
        trace = p101.launch(program, world_size=3, trace=True, **links).trace
    messages, size = trace.messages(), trace.world_size
    events = chrome_events(size, trace.events, trace.unfinished, messages)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(trace.events)

    def enclosing(arrow):
        """The only slice of the arrow's thread that is open at its time."""
        (around,) = [
            s
            for s in slices
            if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
            and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
        ]
        return around

    for side, kind in (("s", "send"), ("f", "recv")):
        arrows = [e for e in events if e["ph"] == side]
        assert [arrow["id"] for arrow in arrows] == list(range(len(messages)))
        for arrow, message in zip(arrows, messages):
            slice_, event = enclosing(arrow), getattr(message, kind)
            about = {name: slice_["args"][name] for name in ("peer", "group", "axis", "bytes")}
            group = {"group": event.group.ranks, "axis": event.group.axis}
            assert about == {"peer": event.peer, "bytes": message.nbytes, **group}
            assert (slice_["cat"], slice_["pid"]) == (kind, event.rank + 1)
            assert slice_["ts"] == event.start * 1e6
            assert side == "s" or slice_["ts"] < arrow["ts"] < slice_["ts"] + slice_["dur"]

    # no process or thread has number 0, and each has a name
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank + 1: f"rank {rank}" for rank in range(size)}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    assert used == set(rows) and min(tid for _, tid in used) >= 1
    kinds = {"span": "compute", "send": "send", "recv": "receive"}
    assert all(rows[e["pid"], e["tid"]] == kinds[e["cat"]] for e in slices)

    in_order = sorted(
        ((e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in slices),
        key=lambda s: (*s[:3], -s[3]),
    )
    for (*here, _, end), (*there, start, until) in zip(in_order, in_order[1:]):
        assert here != there or start >= end or until <= end
