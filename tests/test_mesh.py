"""Balanced splits, groups that keep their order, and the lines of ranks along the axes of a
mesh.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101.mesh import Group, along, group_of, split_sizes


@settings(deadline=None, max_examples=40)
@given(n=st.integers(0, 10_000), p=st.integers(1, 300))
def test_a_split_is_balanced_and_in_order_and_covers_everything(n, p):
    sizes = split_sizes(n, p)
    assert len(sizes) == p and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    starts = [sum(sizes[:i]) for i in range(p)] if p < 50 else []
    assert starts == [n // p * i + min(i, n % p) for i in range(len(starts))]


def test_a_split_of_a_negative_number_or_over_no_ranks_is_an_error():
    for n, p in ((-1, 2), (3, 0), (3, -2)):
        with pytest.raises(ValueError, match=rf"split_sizes\({n}, {p}\)"):
            split_sizes(n, p)


@settings(deadline=None, max_examples=40)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_along_gives_the_ranks_that_differ_on_those_axes_only(shape, data):
    positions = torch.arange(math.prod(shape)).view(shape)
    position = data.draw(st.integers(0, positions.numel() - 1))
    axes = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    where = torch.unravel_index(torch.tensor(position), tuple(shape))
    plane = tuple(slice(None) if axis in axes else int(i) for axis, i in enumerate(where))
    assert along(shape, position, axes) == positions[plane].flatten().tolist()


def what_a_group_is():
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[3, 0], [1, 4]], mesh_dim_names=("x", "y"))
    new_group = dist.new_group([4, 2])
    found = {
        "all": group_of(None),
        "ranks": group_of([3, 1]),
        "mesh": group_of(mesh),
        "new_group": group_of(new_group)._replace(process_group=None),
    }
    if mesh.get_coordinate() is not None:
        found["axis"] = group_of(mesh["x"])
        lines = group_of(mesh.get_group("y")), group_of(mesh).along(1)
        found["names"] = [group.axis for group in (found["mesh"], found["axis"], *lines)]
    elif rank == 2:
        found["axis"] = group_of(mesh)
    return found


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_group_is_ranks_in_order_and_my_position(backend):
    results = p101.launch(what_a_group_is, world_size=5, backend=backend).results
    for rank, found in enumerate(results):
        assert found["all"] == Group(tuple(range(5)), rank, (5,), None)
        assert found["ranks"] == Group((3, 1), {3: 0, 1: 1}.get(rank), (2,), None)
    assert [found["mesh"].position for found in results] == [1, 2, None, 0, 3]
    inside = [results[r] for r in (0, 1, 3, 4)]
    assert all(found["mesh"][:3:2] == ((3, 0, 1, 4), (2, 2)) for found in inside)
    assert results[2]["mesh"] == results[2]["axis"] == Group((), None, (0,), None)
    assert results[2]["new_group"].position == 0 or results[2]["new_group"].ranks == (2, 4)
    assert [r for r in range(5) if results[r]["new_group"].position is not None] == [2, 4]
    assert all(found["names"] == ["x_y", "x", "y", "y"] for found in inside)
    flat = results[0]["all"], results[0]["ranks"], results[2]["new_group"]
    assert [group.axis for group in flat] == [None] * 3
    assert [found["axis"].ranks for found in inside] == [(0, 4), (3, 1), (3, 1), (0, 4)]


def test_without_a_process_group_only_the_one_rank_is_a_group():
    assert group_of(None) == Group((0,), 0, (1,), None)
    with pytest.raises(RuntimeError, match="no process group"):
        group_of([0])
