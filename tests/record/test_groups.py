"""Every event knows its ranks and their mesh axis, so the bytes of each axis can be counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.collectives import asynchronous
from parallel101.laboratory.record.events import NO_GROUP, EventGroup

pytestmark = pytest.mark.parametrize("backend", ["gloo", "sim"])
LINES = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}


def reduce_over_both_axes(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axis, numel in (("dp", 10), ("tp", 1000)):
        x = torch.ones(numel)
        if how == "torch":
            dist.all_reduce(x, group=mesh.get_group(axis))
        elif how == "ours":
            p101.all_reduce(x, group=mesh[axis])
        else:
            asynchronous.all_reduce_async(x, group=mesh[axis]).wait()


@pytest.mark.parametrize("how", ["torch", "ours", "asynchronous"])
def test_bytes_of_each_mesh_axis(backend, how, tmp_path):
    trace = p101.launch(reduce_over_both_axes, how, world_size=4, backend=backend, trace=True).trace
    trace.save(tmp_path / "trace.json")
    # torch's own collective is one event a rank, with its payload
    kind = "all_reduce" if how == "torch" else "send"
    for recorded in (trace, p101.Trace.load(tmp_path / "trace.json")):
        nbytes = Counter()
        for event in recorded.events:
            if event.kind == kind and event.group.axis is not None:
                nbytes[event.rank, event.group.axis] += event.nbytes
        sizes = {"dp": 40, "tp": 4000}
        assert nbytes == {(rank, axis): sizes[axis] for rank in range(4) for axis in sizes}
        for event in recorded.events:
            if event.kind in ("send", "recv", "all_reduce") and event.group.axis is not None:
                assert event.group.ranks in LINES[event.group.axis]
                assert event.rank in event.group.ranks
    if how != "torch":
        received = sum(e.kind == "recv" for e in trace.events)
        assert len(trace.messages()) == sum(trace.messages_sent) == received
    trace.to_chrome(tmp_path / "chrome.json")
    written = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    slices = [s for s in written if s.get("cat") == kind]
    assert Counter((s["args"]["axis"], *s["args"]["group"]) for s in slices) == Counter(
        (e.group.axis, *e.group.ranks) for e in trace.events if e.kind == kind
    )


def test_groups_that_are_no_axis_have_their_ranks_in_order(backend):
    def program():
        pair = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1), group=pair)
        p101.broadcast(torch.ones(1), group=[2, 0])
        dist.barrier()
        with p101.span("compute"):
            pass

    events = p101.launch(program, world_size=3, backend=backend, trace=True).trace.events
    groups = {e.kind: (e.group.ranks, e.group.axis) for e in events}
    assert groups == {
        "all_reduce": ((0, 2), None),
        "send": ((2, 0), None),
        "recv": ((2, 0), None),
        "barrier": ((0, 1, 2), None),
        "span": ((), None),
    }
    assert all(
        isinstance(e.group, EventGroup) and (e.group == NO_GROUP) == (e.kind == "span")
        for e in events
    )


def test_the_programs_own_messages_have_the_group_they_were_sent_in(backend):
    def program():
        p101.all_reduce(torch.ones(4), group=[1, 0])
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    events = p101.launch(program, world_size=2, backend=backend, trace=True).trace.events
    assert {e.group for e in events if e.tag} == {EventGroup("world", (1, 0), None)}
    assert {e.group for e in events if not e.tag} == {EventGroup("world", (0, 1), None)}
