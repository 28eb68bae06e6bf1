"""gloo and NCCL under this library's watch: the backends' own process groups, made as torch makes them, inside a RecordedGroup.

Only what a rank of `launch` needs. The one private touch is in torch_private.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from parallel101.record import torch_private
from parallel101.record.calls import part_in
from parallel101.record.clocks import GpuClock
from parallel101.record.recorder import Ledger, Posted, RecordedGroup

FOREVER = timedelta(days=7)  #  gloo's and NCCL's own time limits would spoil the group: launch keeps the time


def init(backend: str, ledger: Ledger, store: dist.Store, rank: int, world_size: int) -> None:
    """Make torch's default group, on "gloo" or "nccl", with every call entered in the ledger.

    `dist.get_backend()` answers with the backend's own name, as in any program.
    """
    _ledger[:] = [ledger]
    if backend == "nccl" and ledger.recording:
        ledger.clock = GpuClock()
    name = f"parallel101_{backend}"
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name, partial(_create, backend), extended_api=True, devices=["cuda"] if backend == "nccl" else ["cpu"]
        )
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=FOREVER)
    torch_private.name_backend(backend)
    torch_private.wrap_new_groups(backend, name, _making_a_group)


_ledger: list[Ledger] = []  #  this process's books: torch keeps the function that makes groups for good, and a job may be joined again


def _create(backend: str, options, _unused=None) -> dist.ProcessGroup:
    """What torch calls to make a group, default or sub-group."""
    (ledger,) = _ledger
    members = list(options.global_ranks_in_group)
    label = str(options.group_id) if members else "world"
    inner, whole = _connect(backend, options)
    return RecordedGroup(inner, whole, label, members or range(options.group_size), ledger, backend)


@contextmanager
def _making_a_group(ranks: list[int] | None, members_only: bool) -> Iterator[None]:
    """Making a sub-group waits for its members: one that never makes it, or makes another, is a deadlock like any other."""
    (ledger,) = _ledger
    world = dist.group.WORLD
    assert isinstance(world, RecordedGroup)
    members = sorted(world.ranks if ranks is None else ranks)
    part = part_in("new_group", members)
    label = part if members_only else "new_group"  #  torch counts the groups that all ranks make, and names the others by their members
    others = tuple(rank for rank in members if rank != ledger.rank)
    with ledger.waits_in(Posted(world, ("new_group", None, 0, label), ledger.takes_part(label, part), others=others)):
        yield


def _connect(backend: str, options) -> tuple[Any, dist.ProcessGroup]:
    """torch's own backend, and a process group of torch's own around it: the backend is quicker to call, the group knows more calls."""
    inner: Any
    if backend == "gloo":
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    else:
        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = options.timeout
        nccl.global_ranks_in_group = options.global_ranks_in_group
        nccl.group_name = options.group_id
        inner = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl)
    inner._set_sequence_number_for_group()
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, inner)
    return inner, group


@contextmanager
def batches_on_nccl() -> Iterator[None]:
    """torch's batch_isend_irecv makes a batch only of its own kind of group: inside, it makes one of ours as well."""
    original = dist.batch_isend_irecv

    @wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group if p2p_op_list else None
        group = group or dist.group.WORLD
        if not isinstance(group, RecordedGroup) or group.backend != "nccl":
            return original(p2p_op_list)
        works: list[dist.Work] = []
        with group.batched(works):
            for op in p2p_op_list:
                work = op.op(op.tensor, op.peer, op.group, op.tag)
                if work is not None:
                    works.append(work)
        return works

    dist.batch_isend_irecv = batch_isend_irecv
    try:
        yield
    finally:
        dist.batch_isend_irecv = original


def start_together() -> None:
    """Wait for the other ranks, unrecorded: one may have found the group, or read the program, 20 ms before another, and a run of
    microseconds would show little else. (On NCCL a first barrier takes a second; there torch's own start has to do.)"""
    world = dist.group.WORLD
    assert isinstance(world, RecordedGroup)
    if world.backend == "gloo":
        world.inner.barrier().wait()


def own_device(backend: str, local_rank: int) -> None:
    """Give a rank its device: on NCCL the GPU with its number, as torch's default; on gloo one thread, or ranks fight over cores."""
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        torch.set_default_device(torch.device("cuda", local_rank))
    else:
        torch.set_num_threads(1)
