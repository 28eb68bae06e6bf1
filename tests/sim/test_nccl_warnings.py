"""rules="nccl": what ended here and may hang on GPUs gets a warning, and device_id= is followed."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101

from .programs import run


def told(program, n=3) -> list[str]:
    """The warnings of a run by NCCL's rules."""
    return run(lambda rank: program(), n, rules="nccl").warnings


def two_groups(order, wait_between=False, by_future=False):
    """Each rank begins an all-reduce of two groups of the same ranks, in its own order."""

    def program():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
        rank, works = dist.get_rank(), []
        for index in order[rank]:
            works.append(dist.all_reduce(torch.ones(2), group=groups[index], async_op=True))
            if by_future:
                works[-1] = works[-1].get_future()
            if wait_between:
                works.pop().wait()
        for work in works:
            work.wait()

    return program


@pytest.mark.parametrize(
    ("order", "options", "warned"),
    [
        ([[0, 1], [1, 0], [1]], {}, True),
        ([[0, 1], [0, 1], [1]], {}, False),
        ([[0, 1, 0, 1], [0, 1, 1, 0], [1, 1]], {}, True),
        ([[0, 1], [0, 1], [1]], {"wait_between": True}, False),
        ([[0, 1], [1, 0], [1]], {"by_future": True}, False),  # who waits for it isn't known
    ],
)
def test_collectives_of_two_groups_in_flight_in_another_order(order, options, warned):
    texts = told(two_groups(order, **options))
    assert len(texts) == warned
    for text in texts:
        assert "all_reduce among ranks 0 and 1 (" in text and "in the other order" in text
        assert text.count("test_nccl_warnings.py") == 2


@pytest.mark.parametrize("local", [False, True])
def test_new_group_that_only_members_call(local):
    def program():
        if dist.get_rank() != 2:
            dist.new_group([0, 1], use_local_synchronization=local)

    texts = told(program)
    assert len(texts) == (not local)
    if not local:
        assert texts[0].startswith("ranks 0 and 1 called new_group([0, 1]) at ")
        assert "and rank 2 did not" in texts[0]
        with pytest.warns(RuntimeWarning, match=re.escape(texts[0][:99])):
            p101.launch(program, world_size=3, backend="sim", rules="nccl")


def test_each_rank_makes_the_groups_that_it_is_in_only():
    texts = told(lambda: dist.new_group([0, 1] if dist.get_rank() < 2 else [2]))
    assert [text.partition(" called")[0] for text in texts] == ["ranks 0 and 1", "rank 2"]


def test_what_every_rank_calls_is_not_told():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for axis in ("dp", "tp"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))

    assert told(program, n=4) == []


def ring_all_send_first(**init):
    def program():
        dist.init_process_group("nccl", **init)
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.zeros(1)
        sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
        dist.irecv(x, (rank - 1) % size).wait()
        sent.wait()
        return x.item()

    return program


def test_with_a_device_messages_outside_a_batch_share_the_groups_queue():
    def launched(program):
        return p101.launch(program, world_size=3, backend="sim", rules="nccl").results

    assert launched(ring_all_send_first()) == [2.0, 0.0, 1.0]
    with pytest.raises(p101.DeadlockError, match="batch_isend_irecv") as caught:
        launched(ring_all_send_first(device_id=torch.device("cpu")))
    assert caught.value.cycle == [0, 1, 2]
