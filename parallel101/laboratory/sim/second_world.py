"""`unrecorded()` on the sim: the ranks inside use a second world of which nothing is kept.

That world has a clock of its own.

    the run's world      rank 0 ── send ──┐                              ┌── recv ──▶
    the second world                      └── messages, compute, spans ──┘

Inside, each process group of the rank posts to its counterpart in the second world, whose network
takes no time. Everything else is the same code: matching, NCCL's queues, checks. So a deadlock
inside is found as any other, and nothing of the run has to be restored.

The run's clock moves only when no rank of the second world can go on: then a rank that must still
arrive waits for a message of the run. At the end each rank goes on at the time at which it entered,
so the run's time may go back. The times are then those of the same run without the block, with one
exception. While the time was between that of an early rank and that of a late one, messages of
others used some links: the early rank's messages and those would have waited for each other, and
have not. This takes links that several ranks share, as on a torus, eager messages, or ranks outside
of the block that communicate with those inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallel101.laboratory.sim.clock import VirtualRank, World
from parallel101.laboratory.sim.group import SharedState, SimGroup
from parallel101.laboratory.sim.network import Network
from parallel101.spans import record_into

POSTS = (
    *("send", "recv", "recv_anysource", "_collective"),
    *("_start_coalescing", "_end_coalescing"),
)


class SecondWorld(World):
    """The world of the ranks that are in `unrecorded()`.

    They are the threads of the first world, which says whose turn it is.
    """

    def __init__(self, first: World):
        super().__init__(
            first.size,
            Network(latency=0.0, bandwidth=math.inf, eager=first.network.eager),
            first.mirrors,
        )
        self.first = first
        self._pollers = first._pollers

    def wake(self, rank: VirtualRank) -> None:
        self.first.wake(self.first.ranks[rank.index])

    def block(self, rank: VirtualRank) -> None:
        self.first.block(self.first.ranks[rank.index])
        rank.set_futures()

    def fail(self, error: BaseException, rank: VirtualRank | None = None) -> None:
        self.first.fail(error, rank)

    def without_modes(self, job: Callable[[], None]) -> None:
        self.first.without_modes(job)

    def only_rank_threads(self) -> bool:
        return self.first.only_rank_threads()


class SecondGroups:
    """The process groups of the second world: a counterpart for each group of the run."""

    def __init__(self, shared: SharedState):
        self.world = SecondWorld(shared.world)
        self.shared = type(shared)(self.world, payload_bytes=0)
        self.counterparts: dict[SimGroup, SimGroup] = {}
        # when they entered: the time, and the round at that time
        self.leaving: list[tuple[float, int]] = []
        shared.world.second, shared.world.unrecorded = self.world, self.unrecorded

    def counterpart(self, group: SimGroup) -> SimGroup:
        if group not in self.counterparts:
            rank = self.world.ranks[group.member.index]
            self.counterparts[group] = type(group)(
                self.shared, rank, group.label, group.ranks, group.torch_name
            )
        return self.counterparts[group]

    @contextmanager
    def unrecorded(self, rank: VirtualRank) -> Iterator[None]:
        """Let a rank of the run post to the second world, inside the block.

        At the end it goes on at the time at which it entered.
        """
        world, groups = rank.world, list(rank.groups)
        entered = rank.now(), world.round if rank.clock <= world.now else 0
        for group in groups:
            other = self.counterpart(group)
            vars(group).update(
                {name: getattr(other, name) for name in POSTS if hasattr(other, name)}
            )
        record_into(self.world.ranks[rank.index], this_thread_only=True)
        try:
            yield
        finally:
            record_into(rank, this_thread_only=True)
            for group in groups:
                for name in POSTS:
                    vars(group).pop(name, None)
            self.world.events.clear()
            self.leaving.append(entered)
            gone_on: list[bool] = []

            def go_on() -> None:
                """Let the rank go on, after those that entered in an earlier round at that time."""
                if entered > min(self.leaving):
                    world.schedule(world.now, go_on)
                else:
                    gone_on.append(True)
                    world.wake(rank)

            world.schedule(entered[0], go_on)
            while not gone_on:
                world.block(rank)
            self.leaving.remove(entered)
