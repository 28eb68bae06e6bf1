"""backend="sim": the same torch.distributed program on virtual ranks, in one process, on a virtual clock.

    sim_clock        whose turn it is, and what time it is             network, sim_links    how long a message takes, and who gets a link
    sim_mailbox, sim_messages, sim_work     sends and receives         sim_group             what torch.distributed sees
    sim_collectives  torch's own collectives                           sim_random            each rank its own random numbers

A message starts when its send and its receive are both posted and its links are free, and holds them for latency + bytes/bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  #  now: its functions' default is the default group at its import, and no rank's is right for the others

from parallel101.record import torch_private
from parallel101.record.errors import DeadlockError, MisuseError
from parallel101.record.events import Row
from parallel101.sim.clock import World
from parallel101.sim.group import SimGroup, Traffic
from parallel101.sim.network import Network
from parallel101.sim.random_states import RandomStates
from parallel101.sim.work import meanwhile, until

STACK = 2 << 20  #  bytes of stack a rank's thread may use; what it does not touch costs nothing


@dataclass
class Outcome:
    """What a simulation came to. Virtual times are in seconds from its start."""

    results: list[Any]  #  what each rank returned; None where it did not come to that
    errors: dict[int, BaseException]  #  the exception of the rank that failed first, in virtual time
    events: list[Row]
    unfinished: list[Row]  #  of a run that failed: what was posted and had not ended
    error: DeadlockError | MisuseError | None = field(default=None)


def simulate(
    rank_main: Callable[[int], Any],
    world_size: int,
    network: Network | None = None,
    *,
    payload_bytes: int = 0,
    watched_by: Callable[[Traffic], None] = lambda _: None,
) -> Outcome:
    """Run `rank_main(rank)` on virtual ranks, each with torch.distributed initialised, and say what happened.

    Args:
        rank_main: one rank's program. It may use torch.distributed as on gloo, with CPU tensors; anything it shares with other ranks
            through Python objects is its own affair, as all ranks live in this process (in turns, never at once).
        world_size: how many virtual ranks.
        network: what lies between them; None: `Network()`.
        payload_bytes: events keep the values of messages of up to so many bytes.
        watched_by: is given the run's traffic before it begins, to look at it meanwhile from another thread.

    While it runs, torch.distributed, the random generators and the default dtype of this process are the ranks'; they are given back
    at the end. Other settings that torch keeps a process (such as use_deterministic_algorithms) are common to all ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size is a number of ranks, 1 or more; got {world_size!r}")
    network = Network() if network is None else network
    views = [torch_private.RankWorld() for _ in range(world_size)]
    random_states: RandomStates | None = None

    def switch(old: int, new: int) -> None:
        torch_private.use_world(views[new])
        assert random_states is not None
        random_states.switch(old, new)

    world = World(world_size, network, switch)
    traffic = Traffic(world, payload_bytes)
    watched_by(traffic)
    store = dist.HashStore()

    def main(number: int) -> Any:
        group = SimGroup(traffic, world.ranks[number], "world", range(world_size), "0")
        views[number].add_default(group, "0", "sim", store, world_size)
        try:
            return rank_main(number)
        finally:
            torch_private.forget_groups()

    if not hasattr(dist.Backend, "SIM"):
        dist.Backend.register_backend("sim", _sub_group, extended_api=True, devices=["cpu"])
    stack, threads, collector = threading.stack_size(STACK), torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)  #  a pool of threads for each of hundreds of ranks would be too many
    gc.set_threshold(collector[0] * world_size, *collector[1:])  #  as seldom as if each rank had a process, and a collector, of its own
    random_states = RandomStates(world_size)
    before = torch_private.use_world(views[0])
    torch_private.name_groups_by_thread(True)
    try:
        with on_one_core(), torch_private.ahead_of_futures(until, meanwhile):
            results = world.run(main)
    finally:
        torch_private.name_groups_by_thread(False)
        torch_private.use_world(before)
        random_states.restore()
        gc.set_threshold(*collector)
        torch.set_num_threads(threads)
        threading.stack_size(stack)
    outcome = Outcome(results, {}, world.events, traffic.unfinished() if world.failure is not None else [])
    if isinstance(world.failure, DeadlockError | MisuseError):
        outcome.error = world.failure
    elif world.failure is not None:
        outcome.errors[world.failed_rank or 0] = world.failure
    return outcome


def _sub_group(options: Any, _: Any = None) -> SimGroup:
    """What dist.new_group calls in torch versions that do not ask the default group (torch 2.13 does)."""
    world = dist.group.WORLD
    if not isinstance(world, SimGroup):
        raise RuntimeError("virtual ranks are made by parallel101.launch(..., backend='sim'), not by init_process_group")
    return world.part(options.global_ranks_in_group, options.group_id)


# ── One core for all virtual ranks: only one runs at a time, and to pass the baton from core to core costs three times as much.


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those it starts meanwhile, on the core it is on, as batch work. Afterwards it is as it was."""
    if sys.platform != "linux":
        yield
        return
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    try:
        with contextlib.suppress(OSError, AttributeError):  #  a container may forbid either: it is slower then, and nothing else
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
