"""What the layers refuse, when they send nothing, and how many bytes they send."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
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


# name → (what is called on six ranks with a mesh of shape (2, 3), what the error must say)
REFUSED = {
    "a name that the mesh doesn't have": (
        lambda mesh: AllGather(mesh, ("c",)),
        "no axis 'c': it has shape (2, 3), so expected -2 to 1, or one of the names ('a', 'b')",
    ),
    "a name, on a mesh without names": (
        lambda mesh: AllGather(mesh_of(0, (2, 3)), "a"),
        "no axis 'a': it has shape (2, 3), so expected -2 to 1, or names, which its axes don't",
    ),
    "an axis out of range": (lambda mesh: AllSumReduce(mesh, (2,)), "no axis 2: it has shape"),
    "an axis named twice": (lambda mesh: ReduceScatter(mesh, (1, "b")), "names an axis twice"),
    "an axis of another type": (lambda mesh: Broadcast(mesh, (1.5,)), "no axis 1.5"),
    "no axes": (
        lambda mesh: AllSumReduce(mesh, None),
        "axes=None: expected axes of the mesh by number or name",
    ),
    "no mesh": (lambda mesh: AllGather([0, 1], (0,)), "expected a DeviceMesh"),
    "no source mesh": (lambda mesh: Repartition([0, 1], mesh), "expected a DeviceMesh"),
    "a shape of fewer dims than axes": (
        lambda mesh: AllGather(mesh, (0,), shape=(4,)),
        "shape has 1 dims ((4,)), but the mesh has 2 axes",
    ),
    "a shape that is no shape": (
        lambda mesh: AllGather(mesh, (0,), shape=(4, -1)),
        "expected the shape of the whole tensor",
    ),
    "fewer dims than axes": (lambda mesh: AllGather(mesh, (0,))(zeros(4)), "x has 1 dims"),
    "fewer dims than the target's axes": (
        lambda mesh: Repartition(mesh_of(0, (6,)), mesh)(zeros(4)),
        "x has 1 dims",
    ),
    "not my block": (
        lambda mesh: AllGather(mesh, (0,), shape=(4, 6))(zeros(2, 3)),
        "x has shape (2, 3), but",
    ),
    "not cut by the other axes": (
        lambda mesh: ReduceScatter(mesh, (0,), shape=(4, 6))(zeros(4, 6)),
        "x has shape (4, 6), but",
    ),
    "not my block of the source": (
        lambda mesh: Repartition(mesh, mesh, shape=(4, 6))(zeros(4, 2)),
        "x has shape (4, 2), but",
    ),
    "not the block that this rank will receive": (
        lambda mesh: Broadcast(mesh, (0,), shape=(4, 6))(zeros(2, 2)),
        "a block of shape (4, 2)",
    ),
    "no tensor": (lambda mesh: AllGather(mesh, (0,))([1.0]), "expected a tensor"),
    "ranks that can't know the shape": (
        lambda mesh: Repartition(mesh_of(0, (2,)), mesh),
        "the ranks [2, 3, 4, 5] of the target",
    ),
    "a source of another shape": (
        lambda mesh: Broadcast(mesh, (0,), source=mesh_of(0, (2,))),
        "source has shape (2,): expected (1, 3)",
    ),
    "a target of another shape": (
        lambda mesh: SumReduce(mesh, (1,), target=mesh_of(0, (2,))),
        "target has shape (2,): expected (2, 1)",
    ),
}


def said_of_each():
    mesh, said = named(), {}
    for name, (call, _) in REFUSED.items():
        try:
            call(mesh)
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def test_what_is_refused_before_any_message():
    run = p101.launch(said_of_each, world_size=6, backend="sim")
    for said in run.results:
        assert {
            name for name, (_, expected) in REFUSED.items() if expected not in said.get(name, "")
        } == set()
    assert sum(run.trace.messages_sent) == 0


def on_a_rank_without(build, x_there):
    """The last rank is outside of each mesh, or only receives: what it says if it passes this
    tensor.
    """
    inside = dist.get_rank() < dist.get_world_size() - 1
    try:
        layer = build()
        if not inside:
            layer(x_there)
    except ValueError as error:
        return str(error)


OUTSIDE = {
    "AllGather": lambda: AllGather(mesh_of(0, (2,)), (0,)),
    "ReduceScatter": lambda: ReduceScatter(mesh_of(0, (2,)), (0,)),
    "AllSumReduce": lambda: AllSumReduce(mesh_of(0, (2,)), (0,)),
    "Broadcast": lambda: Broadcast(mesh_of(0, (2,)), (0,)),
    "SumReduce": lambda: SumReduce(mesh_of(0, (2,)), (0,)),
    "Repartition": lambda: Repartition(mesh_of(0, (2,)), mesh_of(0, (1,))),
    "BatchNorm": lambda: BatchNorm(mesh_of(0, (2,)), 4),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_tensor_on_a_rank_outside_the_mesh_is_refused(name):
    *_, said = p101.launch(
        on_a_rank_without, OUTSIDE[name], torch.ones(2, 4), world_size=3, backend="sim"
    ).results
    assert "outside the layer's mesh: expected a zero-volume tensor" in said


def test_a_rank_that_only_receives_must_say_what():
    *_, said = p101.launch(
        on_a_rank_without,
        lambda: Broadcast(mesh_of(0, (3,)), (0,)),
        torch.empty(0),
        world_size=3,
        backend="sim",
    ).results
    assert (
        "x has shape (0,), which doesn't say what this rank will receive: expected a "
        "zero-volume tensor such as"
    ) in said


BUILT = {
    "AllGather": lambda flat: AllGather(flat, (0,)),
    "Repartition": lambda flat: Repartition(flat, mesh_of(0, (2, 2))),
}


@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT)
def test_uneven_blocks_without_a_shape_are_told_to_pass_it(build):
    with pytest.raises(p101.MisuseError, match="the whole tensor's shape as shape= to"):
        p101.launch(
            lambda: build(mesh_of(0, (4,)))(torch.ones(1 + (dist.get_rank() == 0), 4)),
            world_size=4,
            backend="sim",
        )


def silent():
    """Calls that need no message, forward or backward."""
    rank = dist.get_rank()
    mesh, flat, half = (
        DeviceMesh("cpu", torch.arange(4).view(4, 1)),
        mesh_of(0, (4,)),
        mesh_of(0, (2,)),
    )
    for kind in (AllGather, ReduceScatter, AllSumReduce, Broadcast, SumReduce):
        for axes in ((), (1,)):
            x = torch.ones(2, 3, requires_grad=True)
            y = copy.deepcopy(kind(mesh, axes))(x)
            y.sum().backward()
            assert (
                torch.equal(y, x)
                and y.data_ptr() != x.data_ptr()
                and torch.equal(x.grad, torch.ones(2, 3))
            )
        if rank > 1:
            kind(half, (0,))(torch.empty(0))
        kind(flat, (0,), **({} if kind is AllSumReduce else {"shape": (0, 4)}))(torch.empty(0, 4))
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
