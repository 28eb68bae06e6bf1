"""What the layers refuse, when they send nothing, and how many bytes they send."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101 import layers
from parallel101.layers import (
    AllGather,
    AllSumReduce,
    BatchNorm,
    Broadcast,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from tests.layers.cases import mesh_of


def named():
    return DeviceMesh("cpu", torch.arange(6).view(2, 3), mesh_dim_names=("a", "b"))


def zeros(*shape):
    return torch.zeros(shape)


# what is called on six ranks | what the error must say
REFUSED = """
AllGather(mesh, "c") | no axis 'c': it has shape (2, 3), so expected -2 to 1, or one of its
AllGather(unnamed, "a") | expected -2 to 1, or one of its axes' names ()
AllSumReduce(mesh, 2) | no axis 2: it has shape
ReduceScatter(mesh, (1, "b")) | names an axis twice
Broadcast(mesh, 1.5) | the mesh has no axis 1.5
Broadcast(mesh, (True,)) | no axis True
AllGather([0, 1], 0) | mesh=[0, 1]: expected a DeviceMesh
Repartition([0, 1], mesh) | expected a DeviceMesh
BatchNorm([0, 1], 3) | expected a DeviceMesh
BatchNorm(flat, -1) | split_sizes(-1, 1)
AllGather(mesh, 0, shape=(4,)) | shape has 1 dims ((4,)), but the mesh has 2 axes
AllGather(mesh, 0, shape=(4, -1)) | expected the shape of the whole tensor
AllGather(mesh, 0)(zeros(4)) | x has 1 dims
Repartition(flat, mesh)(zeros(4)) | x has 1 dims
AllGather(mesh, 0, shape=(4, 6))(zeros(2, 3)) | x has shape (2, 3), but
ReduceScatter(mesh, 0, shape=(4, 6))(zeros(4, 6)) | x has shape (4, 6), but
Repartition(mesh, mesh, shape=(4, 6))(zeros(4, 2)) | x has shape (4, 2), but
Broadcast(mesh, 0, shape=(4, 6))(zeros(2, 2)) | a block of shape (4, 2)
AllGather(mesh, 0)([1.0]) | expected a tensor
Repartition(mesh_of(0, (2,)), mesh) | the ranks [2, 3, 4, 5] of the target
Broadcast(mesh, 0, source=mesh_of(0, (2,))) | expected a DeviceMesh of shape (1, 3)
Broadcast(mesh, 0, source=[0, 1]) | source=[0, 1]: expected a DeviceMesh of shape (1, 3)
SumReduce(mesh, 1, target=mesh_of(0, (2,))) | expected a DeviceMesh of shape (2, 1)
SpatialParallel(conv(), line, shape=None) | shape=None: expected the shape of the whole tensor
SpatialParallel(conv(), line, shape=(3, 8)) | expected 3 dims for a Conv1d
SpatialParallel(conv(), mesh_of(0, (1, 2)), shape=(2, 3, 8)) | expected one rank on axis 1
SpatialParallel(conv(), line, shape=(2, 4, 8)) | has 4 channels, but the Conv1d expects 3
spatial(conv(padding=1, padding_mode="circular")) | use padding_mode='zeros'
spatial(nn.Linear(3, 3)) | module is a Linear: expected a convolution or pooling, Conv1d
spatial(nn.MaxPool1d(3, ceil_mode=True)) | use ceil_mode=False
spatial(nn.AvgPool1d(3, padding=1, count_include_pad=False)) | count_include_pad=False has no
HaloExchange([0, 1], shape=(8,), kernel_size=3) | mesh=[0, 1]: expected a DeviceMesh
HaloExchange(line, shape=(8,), kernel_size=3) | but the mesh has 3 axes (1, 1, 2)
HaloExchange(line, shape=None, kernel_size=3) | shape=None: expected the shape of the whole tensor
halo(9) | the kernel covers 9 entries (kernel_size=9, dilation=1), but the input has only 8
halo((1, 1, 1, 1)) | kernel_size=(1, 1, 1, 1): expected an int, or one for each dim
halo(3, stride=(1, 2)) | stride=(1, 2): expected an int, or one for each dim of the
halo(3, stride=0) | stride=0, padding=0, dilation=1: expected ints of at least 1
halo(3.5) | kernel_size=3.5: expected an int, or one for each dim of the kernel
halo(3, padding=((1, 0, 2),)) | padding=(1, 0, 2), dilation=1: expected ints
halo(3)(zeros(1 if rank > 1 else 2, 3, 8)) | x has shape
"""


def said_of_each():
    mesh, line = named(), mesh_of(0, (1, 1, 2))
    names = {**vars(layers), "nn": nn, "zeros": zeros, "mesh_of": mesh_of, "mesh": mesh}
    names |= {"unnamed": mesh_of(0, (2, 3)), "flat": mesh_of(0, (6,)), "line": line}
    names |= {"conv": functools.partial(nn.Conv1d, 3, 3, 3), "rank": dist.get_rank()}
    names["halo"] = lambda kernel, **window: layers.HaloExchange(
        line, shape=(2, 3, 8), kernel_size=kernel, **window
    )
    names["spatial"] = functools.partial(layers.SpatialParallel, mesh=line, shape=(2, 3, 8))
    said = {}
    for row in REFUSED.strip().splitlines():
        call, expected = row.split(" | ")
        try:
            eval(call, names)
            said[call] = "nothing"
        except (TypeError, ValueError) as error:
            said[call] = "" if expected in str(error) else str(error)
    return said


def test_what_is_refused_before_any_message():
    run = p101.launch(said_of_each, world_size=6, backend="sim")
    assert [{call: s for call, s in said.items() if s} for said in run.results] == [{}] * 6
    assert sum(run.trace.messages_sent) == 0


def on_a_rank_that_has_no_tensor():
    """The last rank is outside of each mesh, or only receives: what it says to a wrong tensor."""
    pair, said = mesh_of(0, (2,)), []
    built = [
        kind(pair, 0) for kind in (AllGather, ReduceScatter, AllSumReduce, Broadcast, SumReduce)
    ]
    built += [Repartition(pair, mesh_of(0, (1,))), BatchNorm(pair, 4)]
    built += [layers.HaloExchange(pair, shape=(2, 4), kernel_size=3)]
    given = [(layer, torch.ones(2, 4)) for layer in built]
    for layer, x in [*given, (Broadcast(mesh_of(0, (3,)), 0), torch.empty(0))]:
        try:
            if dist.get_rank() == 2:
                layer(x)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_wrong_tensor_on_a_rank_that_has_none_is_refused():
    run = p101.launch(on_a_rank_that_has_no_tensor, world_size=3, backend="sim")
    *outside, receiver = run.results[2]
    assert len(outside) == 8
    for said in outside:
        assert "outside the layer's mesh: expected a zero-volume tensor" in said
    assert "x has shape (0,), which doesn't say what this rank will receive" in receiver


def uneven():
    one_more = 1 + (dist.get_rank() == 0)
    return one_more, mesh_of(0, (4,)), torch.ones(one_more, 4)


def gather_uneven():
    _, mesh, x = uneven()
    AllGather(mesh, (0,))(x)


def repartition_uneven():
    _, mesh, x = uneven()
    Repartition(mesh, mesh_of(0, (2, 2)))(x)


def exchange_other_columns():
    columns, mesh, _ = uneven()
    layer = layers.HaloExchange(mesh, shape=(4, columns), kernel_size=(3, 1))
    layer(torch.ones(1, columns))


DIFFERENT = {
    gather_uneven: "the whole tensor's shape as shape= to",
    repartition_uneven: "the whole tensor's shape as shape= to",
    exchange_other_columns: "shape in the other dims is not the same",
}


@pytest.mark.parametrize("program", DIFFERENT, ids=lambda program: program.__name__)
def test_shapes_that_differ_between_ranks_are_named(program):
    with pytest.raises(p101.MisuseError, match=DIFFERENT[program]):
        p101.launch(program, world_size=4, backend="sim")


def silent():
    """Calls that need no message, forward or backward."""
    rank, flat, half = dist.get_rank(), mesh_of(0, (4,)), mesh_of(0, (2,))
    mesh = DeviceMesh("cpu", torch.arange(4).view(4, 1))
    for kind in (AllGather, ReduceScatter, AllSumReduce, Broadcast, SumReduce):
        for axes in ((), (1,)):
            x = torch.ones(2, 3, requires_grad=True)
            y = copy.deepcopy(kind(mesh, axes))(x)
            y.sum().backward()
            assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
            assert torch.equal(x.grad, torch.ones(2, 3))
        if rank > 1:
            kind(half, (0,))(torch.empty(0))
        kind(flat, (0,), shape=(0, 4))(torch.empty(0, 4))
    Repartition(flat, flat)(torch.ones(2))
    Repartition(mesh, flat)(torch.ones(2, 1))


def test_no_message_where_none_is_needed():
    run = p101.launch(silent, world_size=4, backend="sim")
    assert sum(run.trace.messages_sent) == 0


def called(kind, axes):
    mesh = named()
    absent = kind is Broadcast and dist.get_rank() > 0
    layer = kind(mesh, axes)
    layer(torch.ones((0, 4, 6, 5) if absent else (4, 6, 5), dtype=torch.float64))
    return str(layer)


@pytest.mark.parametrize(
    ("kind", "sent"), [(AllGather, 6 * 5), (ReduceScatter, 5), (SumReduce, 5), (Broadcast, 5)]
)
def test_no_more_bytes_are_sent_than_must_be(kind, sent):
    """Over all ranks, in units of the tensor that each passes.

    In a reduce-scatter that is six blocks.
    """
    run = p101.launch(called, kind, ("a", "b"), world_size=6, backend="sim")
    assert run.results == [f"{kind.__name__}(mesh 2×3, axes=(0, 1))"] * 6
    assert sum(run.trace.bytes_sent) == sent * 4 * 6 * 5 * 8
    axes = {event.group.axis for event in run.trace.events if event.kind == "send"}
    assert axes == ({"a", "b"} if kind in (AllGather, ReduceScatter) else {"a_b"})
