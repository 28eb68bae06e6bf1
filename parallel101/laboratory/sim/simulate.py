"""The "sim" backend: runs a torch.distributed program on virtual ranks, in one process.

    clock.py              which rank runs, and what time it is
    network.py            how long a message takes, which links it occupies, and which message
                          gets them first (network_text.py reads a network from text)
    message_matching.py   sends and receives
    async_work.py         what isend, irecv and async collectives return
    group.py              the process group that torch.distributed uses, and how ranks wait for
                          each other in its collectives
    torch_collectives.py  which bytes torch's own collectives move, and how long they take
    queues.py             rules="nccl": in which order a rank's operations start on NCCL (with
                          queue_notes.py, and nccl_warnings.py on what may hang)
    time_limits.py        time limits of groups and of wait()
    second_world.py       unrecorded(): calls that leave nothing in the run
    stores.py             torch's stores: waiting for a key lets time pass
    virtual_gpu.py        device="H100": operations on meta tensors take a GPU's time (with
                          operation_costs.py)
    mirrored.py           runs in which one rank stands for many (with mirrored_group.py)
    process_state.py      what each rank has to itself, as if it were a process, and what all
                          share

A message starts when its send and its receive are both posted and its links are free. It occupies
them for latency + bytes / bandwidth. This file sets up the process for virtual ranks, and restores
it afterwards. The process itself, and what ranks print, is in ranks/simworker.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# now: its functions take the default group at import as their default; a rank's group would suit no
# other rank
import torch.distributed.nn

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.sim.async_work import poll_future, wait_for_future
from parallel101.laboratory.sim.clock import World
from parallel101.laboratory.sim.group import SharedState, SimGroup
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.laboratory.sim.mirrored_group import MirroredGroup, MirroredState
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.process_state import ProcessStates
from parallel101.laboratory.sim.queue_notes import queue_notes
from parallel101.laboratory.sim.queues import QueuedGroup, QueuedState
from parallel101.laboratory.sim.second_world import SecondGroups
from parallel101.laboratory.sim.stores import Keys, SimStore, sim_stores

STACK_BYTES = 2 << 20  # of a rank's thread; stack that it does not touch costs nothing


@dataclass
class SimResult:
    """The result of a simulation. Virtual times are in seconds from its start."""

    results: list[Any]  # what each rank returned; None if it did not return
    events: list[EventRow]
    unfinished: list[EventRow]  # of a failed run: the events of what was posted and had not ended
    # sends and receives that the program never waited for; of a failed run, those whose works it
    # has dropped
    unwaited: list[Call]
    # a DeadlockError, a MisuseError, or the exception of the rank that failed first in virtual time
    error: BaseException | None
    # the rank that raised `error`; None for a DeadlockError or a MisuseError
    failed_rank: int | None
    warnings: list[str]  # under NCCL's rules: see nccl_warnings.py


def simulate(
    rank_main: Callable[[int], Any],
    world_size: int,
    network: Network | None = None,
    *,
    rules: str = "gloo",
    payload_bytes: int = 0,
    mirrors: MirroredAxes | None = None,
    recording: bool = True,
    keep_waiting: bool = False,
    on_start: Callable[[SharedState], None] = lambda _: None,
) -> SimResult:
    """Run `rank_main(rank)` on virtual ranks, each with torch.distributed initialized.

    Args:
        rank_main: one rank's program. It may use torch.distributed as on gloo, with CPU tensors.
            All ranks are threads of this process (one runs at a time). process_state.py says what
            each has to itself, and what they share.
        world_size: how many virtual ranks.
        network: what is between them; None: `Network()`.
        rules: what the program may rely on: "gloo" or "nccl" (see queues.py).
        payload_bytes: events keep the values of messages of up to this many bytes.
        mirrors: which ranks have a thread, and stand for the others (see mirrored.py); results are
            of those. None: all have one.
        recording: whether events are kept.
        keep_waiting: whether the program handles the time limits of its groups itself (see
            time_limits.py).
        on_start: called with the run's state before it begins, so that another thread can look at
            it during the run.

    At the end, this process is as it was before.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be a number of ranks, 1 or more; got {world_size!r}")
    network = Network() if network is None else network
    world = World(world_size, network, mirrors)
    world.time_limits.keep_waiting = keep_waiting
    if not recording:
        world.events = deque(maxlen=0)  # type: ignore[assignment]
    torch_worlds = [torch_private.RankWorld() for _ in world.ranks]
    kinds: tuple[str, type[SharedState], type[Any]] = "sim", SharedState, SimGroup
    if mirrors is not None:
        kinds = "sim", MirroredState, MirroredGroup
    elif rules == "nccl":
        kinds = "sim_nccl", QueuedState, QueuedGroup
    backend, state_kind, group_kind = kinds
    shared = state_kind(world, payload_bytes)
    second = SecondGroups(shared)
    both = (shared, second.shared)
    for state in both:
        if isinstance(state, QueuedState):
            state.world.deadlock_notes = partial(queue_notes, state)
    on_start(shared)
    keys, ranks = Keys(), {rank.number: rank for rank in world.ranks}

    def main(number: int) -> Any:
        # OpenMP counts for each thread: without this, a rank's first layers start a pool on the one
        # core
        torch.set_num_threads(1)
        rank = ranks[number]
        group = group_kind(shared, rank, "world", range(world_size), "0")
        store = SimStore(keys)
        torch_worlds[rank.index].add_default(group, "0", backend, store, world_size)
        try:
            return rank_main(number)
        finally:
            torch_private.forget_groups()

    if not hasattr(dist.Backend, backend.upper()):
        dist.Backend.register_backend(backend, _no_group, extended_api=True, devices=["cpu"])
    stack, threads = threading.stack_size(STACK_BYTES), torch.get_num_threads()
    collector = gc.get_threshold()
    torch.set_num_threads(1)  # hundreds of ranks with a thread pool each would be too many threads
    # as rarely as if each rank had its own process and collector
    gc.set_threshold(collector[0] * len(world.ranks), *collector[1:])
    states = ProcessStates(torch_worlds)
    torch_private.name_groups_by_thread(True)
    try:
        profiler = torch_private.around_profiler(states.use_profiler)
        futures = torch_private.ahead_of_futures(wait_for_future, poll_future)
        barrier = torch_private.called_instead(dist.monitored_barrier, _on_sim)
        with on_one_core(), futures, profiler, sim_stores(), barrier:
            results = world.run(main, states.switch)
    finally:
        torch_private.name_groups_by_thread(False)
        states.restore()
        gc.set_threshold(*collector)
        torch.set_num_threads(threads)
        threading.stack_size(stack)
    error = world.failure
    unfinished = [] if error is None else shared.unfinished()
    unwaited: list[Call] = []
    for state in both:
        unwaited += [w.call() for w in state.unwaited()] if error is None else state.dropped()
    of_one_rank = error is not None and not isinstance(error, DeadlockError | MisuseError)
    return SimResult(
        results,
        world.events if recording else [],
        unfinished,
        unwaited,
        error,
        (world.failed_rank or 0) if of_one_rank else None,
        shared.warnings.texts() if isinstance(shared, QueuedState) else [],
    )


def _no_group(*_: Any) -> NoReturn:
    """Refuse init_process_group, which calls this. (dist.new_group asks the default group.)"""
    raise RuntimeError(
        "backend 'sim' cannot be used with init_process_group: call parallel101.launch(..., "
        "backend='sim')"
    )


def _on_sim(original: Callable[..., None]) -> Callable[..., None]:
    """Return a monitored_barrier for the sim under gloo's rules. torch's own asks for gloo."""

    def monitored_barrier(group: Any = None, *args: Any, **named: Any) -> None:
        own: Any = group or dist.group.WORLD
        if getattr(own, "getBackendName", str)() == "sim":
            return own.monitored_barrier(*args, **named)
        return original(group, *args, **named)

    return monitored_barrier


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts inside, on one core (Linux only).

    They have batch scheduling. Only one virtual rank runs at a time, and waking a thread on another
    core takes three times as long as on the same one.
    """
    if sys.platform != "linux":
        yield
        return
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    try:
        # a container may forbid either; the run is only slower then
        with contextlib.suppress(OSError, AttributeError):
            here = ctypes.CDLL(None).sched_getcpu()
            if here in cores:
                os.sched_setaffinity(0, {here})
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, policy, os.sched_param(0))
