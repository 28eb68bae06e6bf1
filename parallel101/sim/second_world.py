"""`unrecorded()` on the sim: the ranks inside use a second world with a clock of its own, of which nothing is kept.

    the run's world      rank 0 ── send ──┐                              ┌── recv ──▶
    the second world                      └── messages, compute, spans ──┘

Inside, each process group of the rank posts to its counterpart in the second world. Its network takes no time. Everything else is the same
code: matching, NCCL's queues, checks. So a deadlock inside is found as any other, and nothing of the run's own state has to be restored.

The run's clock stands still until no rank of the second world can go on. If a rank must still arrive in the block, and waits for a message
of the run before it, then time moves. At the end of the block each rank goes on at the time at which it entered, so time may go back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallel101.record.spans import record_into
from parallel101.sim.clock import VirtualRank, World
from parallel101.sim.group import SharedState, SimGroup
from parallel101.sim.network import Network

POSTS = ("send", "recv", "recv_anysource", "_collective", "_start_coalescing", "_end_coalescing")


class SecondWorld(World):
    """The world of the ranks that are in `unrecorded()`. They are the threads of the first world, which says whose turn it is."""

    def __init__(self, first: World):
        super().__init__(first.size, Network(latency=0.0, bandwidth=math.inf, eager=first.network.eager))
        self.first = first
        self._pollers = first._pollers

    def wake(self, rank: VirtualRank) -> None:
        self.first.wake(self.first.ranks[rank.number])

    def block(self, rank: VirtualRank) -> None:
        self.first.block(self.first.ranks[rank.number])
        rank.set_futures()

    def fail(self, error: BaseException, rank: VirtualRank | None = None) -> None:
        self.first.fail(error, rank)

    def on_main_thread(self, job: Callable[[], None]) -> None:
        self.first.on_main_thread(job)

    def only_rank_threads(self) -> bool:
        return self.first.only_rank_threads()


class SecondGroups:
    """The process groups of the second world: a counterpart for each group of the run."""

    def __init__(self, shared: SharedState):
        self.world = SecondWorld(shared.world)
        self.shared = type(shared)(self.world, payload_bytes=0)
        self.counterparts: dict[SimGroup, SimGroup] = {}
        shared.world.second, shared.world.unrecorded = self.world, self.unrecorded

    def counterpart(self, group: SimGroup) -> SimGroup:
        if group not in self.counterparts:
            rank = self.world.ranks[group.member.number]
            self.counterparts[group] = type(group)(self.shared, rank, group.label, group.ranks, group.torch_name)
        return self.counterparts[group]

    @contextmanager
    def unrecorded(self, rank: VirtualRank) -> Iterator[None]:
        """Inside, a rank of the run posts to the second world. At the end it goes on at the time at which it has entered."""
        world, entered = rank.world, rank.now()
        groups = [group for members in world.limits.views.values() for group in members if group.member is rank]
        own = [{name: vars(group).pop(name) for name in POSTS if name in vars(group)} for group in groups]  # see limits.py
        for group in groups:
            other = self.counterpart(group)
            vars(group).update({name: getattr(other, name) for name in POSTS if hasattr(other, name)})
        record_into(self.world.ranks[rank.number], this_thread_only=True)
        try:
            yield
        finally:
            record_into(rank, this_thread_only=True)
            for group, attributes in zip(groups, own, strict=True):
                for name in POSTS:
                    vars(group).pop(name, None)
                vars(group).update(attributes)
            self.world.events.clear()
        world.schedule(entered, rank)
        world.block(rank)
        while world.now != entered:
            world.block(rank)
