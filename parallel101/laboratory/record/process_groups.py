"""Process groups on gloo and NCCL that are recorded.

torch's own backend, made as torch makes it, is inside a RecordedGroup.

    dist.init_process_group("parallel101_gloo") ──▶ _create ──▶ RecordedGroup(ProcessGroupGloo)
    dist.new_group([0, 2])                      ──▶ the same, while the ranks wait for the members

Only the ranks of `launch` need this file. What it needs of torch's private parts is in
torch_private.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.clocks import GpuClock
from parallel101.laboratory.record.recorded_group import RecordedGroup
from parallel101.laboratory.record.recorder import RankRecorder, WatchedWork
from parallel101.laboratory.record.signatures import own_limit

# the time limits of gloo and NCCL would make the group unusable: launch has its own limit
FOREVER = timedelta(days=7)
SHARE_GPUS = "PARALLEL101_SHARE_GPUS"
# between ranks that share a GPU: through the loopback interface, with the smallest kernels
THROUGH_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "1"}

# of this process. torch keeps `_create` forever, but under torchrun a process may launch again
_recorder: list[RankRecorder] = []


def init(
    backend: str, recorder: RankRecorder, store: dist.Store, rank: int, world_size: int
) -> None:
    """Make torch's default group on "gloo" or "nccl", with every call recorded.

    `dist.get_backend()` still returns that name.
    """
    _recorder[:] = [recorder]
    if backend == "nccl" and recorder.recording:
        recorder.clock = GpuClock()
    name = f"parallel101_{backend}"
    if not hasattr(dist.Backend, name.upper()):
        make, devices = partial(_create, backend), ["cuda" if backend == "nccl" else "cpu"]
        dist.Backend.register_backend(name, make, extended_api=True, devices=devices)
        torch_private.leave_out_of_flight_recorder(name)
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=FOREVER)
    torch_private.name_backend(backend)
    torch_private.wrap_new_groups(backend, name, _making_group)


def _create(backend: str, options, _unused=None) -> dist.ProcessGroup:
    """Create the default group or a sub-group. torch calls it."""
    (recorder,) = _recorder
    members = list(options.global_ranks_in_group)
    label = str(options.group_id) if members else "world"
    inner, whole = _torch_groups(backend, options)
    group = RecordedGroup(
        inner, whole, label, members or range(options.group_size), recorder, backend
    )
    group.limit = own_limit(options.timeout) if members else None
    return group


@contextmanager
def _making_group(ranks: list[int] | None, members_only: bool) -> Iterator[None]:
    """Mark this rank as waiting for new_group's other members, inside the block.

    If one of them never calls it, or makes another group, that is a deadlock like any other.
    """
    (recorder,) = _recorder
    world = dist.group.WORLD
    assert isinstance(world, RecordedGroup)
    members = sorted(world.ranks if ranks is None else ranks)
    operation = f"new_group({members})"
    # torch numbers the groups that all ranks make, and names others by their members
    label = operation if members_only else "new_group"
    others = tuple(rank for rank in members if rank != recorder.rank)
    seq = recorder.count_collective(label, operation)
    call = Call(recorder.rank, "new_group", others, label, seq, "?")
    with recorder.blocked_in(WatchedWork(world, call)):
        yield


def _torch_groups(backend: str, options) -> tuple[Any, dist.ProcessGroup]:
    """Return torch's own backend, and a process group of torch's around it.

    The backend is faster to call, and the process group offers more methods.
    """
    inner: Any
    if backend == "gloo":
        kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        inner = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
    else:
        kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = options.timeout
        nccl.global_ranks_in_group = options.global_ranks_in_group
        nccl.group_name = options.group_id
        inner = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl)
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, inner)
    return inner, group


@contextmanager
def batches_on_nccl() -> Iterator[None]:
    """Let torch's batch_isend_irecv make real batches on our NCCL groups, inside the block.

    By itself it does so only on torch's own groups.
    """
    if not isinstance(dist.group.WORLD, RecordedGroup):  # on sim
        yield
        return

    def in_batches(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
            ops = p2p_op_list if isinstance(p2p_op_list, list) else []
            group, *others = {getattr(op, "group", None) for op in ops} or {None}
            if others or not isinstance(group, RecordedGroup) or group.backend != "nccl":
                return original(p2p_op_list)  # which also says what is wrong with the list
            return group.batch(p2p_op_list)

        return batch_isend_irecv

    with torch_private.called_instead(dist.batch_isend_irecv, in_batches):
        yield


def start_together() -> None:
    """Run an unrecorded barrier before the program starts.

    Without it, one rank may start 20 ms before another, and the record of a short run would show
    little else. NCCL has none, because its first barrier takes a second.
    """
    world = dist.group.WORLD
    assert isinstance(world, RecordedGroup)
    if world.backend == "gloo":
        world.inner.barrier().wait()


def own_device(backend: str, local_rank: int) -> None:
    """Set up a rank's device.

    On NCCL: the GPU of its number among those that it sees (a launcher may show each rank its own
    GPU only), also as torch's default device. On gloo: one thread, to share the cores.
    """
    if backend != "nccl":
        torch.set_num_threads(1)
        return
    if gpus_are_shared():
        # NCCL refuses two ranks of one host on one GPU, but not two ranks of different hosts
        os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
        for name, value in THROUGH_LOOPBACK.items():
            os.environ.setdefault(name, value)
    gpu = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    torch.set_default_device(gpu)


def gpus_are_shared() -> bool:
    """Return whether several ranks may use one GPU, which the user allows by SHARE_GPUS.

    It serves to try a program on NCCL with one GPU. The ranks take turns on the GPU, so that times
    say nothing.
    """
    return os.environ.get(SHARE_GPUS, "0") != "0"
