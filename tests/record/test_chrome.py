"""The export for Perfetto: slices of a thread nest or do not overlap, and each arrow leads from
a message's send to its receive.
"""

from __future__ import annotations

import functools
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


@functools.cache
def recorded(world: str) -> Trace:
    if world == "skewed":
        return skewed()
    links = {"backend": "sim", "network": NETWORKS[world]} if world in NETWORKS else {}
    return p101.launch(program, world_size=3, trace=True, **links).trace


def exported(trace: Trace) -> list[dict]:
    return chrome_events(trace.world_size, trace.events, trace.unfinished, trace.messages())


def skewed() -> Trace:
    """Two clocks that disagree: the receive ends before the send starts."""
    group = EventGroup("world", (0, 1), None)
    send = Event(0, "send", 1, 0, 8, 2.0, 3.0, "a.py:1", 2.0, group, 0, (1,), "int64")
    return Trace([send, send._replace(rank=1, kind="recv", peer=0, start=0.5, end=1.5)], 2, "gloo")


@pytest.mark.parametrize("world", [*NETWORKS, "gloo", "skewed"])
def test_arrows_lead_from_the_send_to_the_receive_of_a_message(world):
    trace = recorded(world)
    events = exported(trace)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(trace.events)
    messages = trace.messages()

    def enclosing(arrow):
        """The only slice of the arrow's thread that is open at its time."""
        around = [
            s
            for s in slices
            if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
            and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
        ]
        assert len(around) == 1
        return around[0]

    for side, kind in (("s", "send"), ("f", "recv")):
        arrows = [e for e in events if e["ph"] == side]
        assert [arrow["id"] for arrow in arrows] == list(range(len(messages)))
        for arrow, message in zip(arrows, messages):
            slice_, event = enclosing(arrow), getattr(message, kind)
            place = slice_["cat"], slice_["pid"], slice_["args"]["peer"]
            assert place == (kind, event.rank + 1, event.peer)
            assert slice_["ts"] == event.start * 1e6 and slice_["args"]["bytes"] == message.nbytes
            assert side == "s" or slice_["ts"] < arrow["ts"] < slice_["ts"] + slice_["dur"]


def test_no_process_or_thread_has_number_0_and_each_has_a_name():
    events = exported(recorded("uneven"))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1", 3: "rank 2"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    assert used == set(rows) and min(tid for _, tid in used) == 1
    kinds = {"span": "compute", "send": "send", "recv": "receive"}
    assert all(rows[e["pid"], e["tid"]] == kinds[e["cat"]] for e in events if e["ph"] == "X")


def test_slices_of_a_thread_nest_or_do_not_overlap():
    events = exported(recorded("no time at all"))
    slices = sorted(
        ((e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"),
        key=lambda s: (*s[:3], -s[3]),
    )
    for (*here, _, end), (*there, start, until) in zip(slices, slices[1:]):
        assert here != there or start >= end or until <= end
