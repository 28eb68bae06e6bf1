"""What the record says about the messages of the collectives: their group and its mesh axis."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.collectives import comm as comm_module
from parallel101.collectives.asynchronous import all_gather_async

# of the mesh [[0, 1], [2, 3]], along its axes "node" and "gpu"
COLUMNS, ROWS = [(0, 2), (1, 3)], [(0, 1), (2, 3)]


def sent_by_axis(trace):
    """Bytes sent by each rank along each axis; every message must go along a line of its axis."""
    nbytes = Counter()
    for event in trace.events:
        if event.kind == "send":
            lines = {"node": COLUMNS, "gpu": ROWS, "node_gpu": [(0, 1, 2, 3)]}[event.group.axis]
            assert event.group.ranks in lines and {event.rank, event.peer} <= {*event.group.ranks}
            nbytes[event.rank, event.group.axis] += event.nbytes
    return nbytes


def hierarchical(algorithm):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    p101.all_reduce(torch.ones(16, dtype=torch.uint8), group=mesh, algorithm=algorithm)


@pytest.mark.parametrize(("algorithm", "gpu", "node"), [("two_level", 16, 8), ("torus", 12, 12)])
def test_all_reduce_along_the_axes_of_a_mesh_counts_by_axis(algorithm, gpu, node):
    sent = sent_by_axis(p101.launch(hierarchical, algorithm, world_size=4, backend="sim").trace)
    assert sent == {
        (rank, axis): nbytes for rank in range(4) for axis, nbytes in (("gpu", gpu), ("node", node))
    }


def messages_of_several_collectives(batched):
    if batched:
        assert comm_module.batches("nccl")
        comm_module.batches = lambda backend: True
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    x = torch.ones(4, dtype=torch.uint8)
    # in flight at the same time
    begun = [all_gather_async(x, group=mesh[axis]) for axis in ("node", "gpu")]
    p101.all_reduce(x, group=mesh, algorithm="ring")
    for collective in begun:
        collective.wait()
    position = mesh["gpu"].get_local_rank()
    exchange = p101.receive if position else p101.send
    exchange(x[:3], 1 - position, group=mesh["gpu"])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_messages_in_flight_together_keep_their_own_groups(backend, batched):
    options = {"world_size": 4, "backend": backend, "trace": True}
    trace = p101.launch(messages_of_several_collectives, batched, **options).trace
    expected = {
        (rank, axis): nbytes
        for rank in range(4)
        for axis, nbytes in (("node", 4), ("gpu", 4), ("node_gpu", 6))
    }
    for sender in (0, 2):
        expected[sender, "gpu"] += 3
    assert sent_by_axis(trace) == expected


def test_a_message_of_the_program_has_no_axis_of_a_collective():
    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        p101.all_reduce(torch.ones(1), group=mesh)
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    events = p101.launch(program, world_size=2, backend="sim").trace.events
    assert {(e.tag == 0, e.group.axis) for e in events if e.kind == "send"} == {
        (False, "dp"),
        (True, None),
    }
