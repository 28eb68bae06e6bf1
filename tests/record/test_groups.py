"""Every event knows its ranks and their mesh axis, so the bytes of each axis can be counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.collectives import asynchronous
from parallel101.laboratory.record.events import NO_GROUP

LINES = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
SIZES = {"dp": 40, "tp": 4000}  # bytes


def program() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axis, nbytes in SIZES.items():
        x = torch.ones(nbytes // 4)
        dist.all_reduce(x, group=mesh.get_group(axis))
        p101.all_reduce(x, group=mesh[axis])
        asynchronous.all_reduce_async(x, group=mesh[axis]).wait()
    pair = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        dist.gather(
            torch.ones(1), [torch.ones(1)] * 2 if dist.get_rank() == 0 else None, group=pair
        )
    p101.broadcast(torch.ones(1), group=[2, 0])
    if dist.get_rank() < 2:  # a message of the program's own
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)
    dist.barrier()
    with p101.span("compute"):
        pass


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_events_know_their_ranks_and_axis(backend, tmp_path):
    trace = p101.launch(program, world_size=4, backend=backend, trace=True).trace
    trace.save(tmp_path / "trace.json")
    for recorded in (trace, p101.Trace.load(tmp_path / "trace.json")):
        nbytes = Counter()
        for e in recorded.events:
            assert (e.group == NO_GROUP) == (e.kind == "span")
            if e.group.axis is not None:
                nbytes[e.kind, e.rank, e.group.axis] += e.nbytes
                assert e.group.ranks in LINES[e.group.axis] and e.rank in e.group.ranks
        # torch's own collective is one event a rank, with its payload; two others send messages
        assert nbytes == {
            (kind, rank, axis): times * SIZES[axis]
            for kind, times in (("all_reduce", 1), ("send", 2), ("recv", 2))
            for rank in range(4)
            for axis in SIZES
        }
    assert len(trace.messages()) == sum(trace.messages_sent)
    others = Counter(
        (e.kind, bool(e.tag), e.group.ranks)
        for e in trace.events
        if e.group.axis is None and e.kind != "span"
    )
    assert others == {
        ("gather", False, (0, 2)): 2,
        **{(kind, True, (2, 0)): 1 for kind in ("send", "recv")},
        **{(kind, False, (0, 1, 2, 3)): 1 for kind in ("send", "recv")},
        ("barrier", False, (0, 1, 2, 3)): 4,
    }
