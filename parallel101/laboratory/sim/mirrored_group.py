"""Process groups in which some ranks have no thread: see mirrored.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.sim.async_work import SimWork
from parallel101.laboratory.sim.clock import World
from parallel101.laboratory.sim.group import SharedState, SimGroup
from parallel101.laboratory.sim.message_matching import MessageWork, UnmatchedMessages
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.spans import Collective

# the collectives that give a rank what others have, as it is: by symmetry that is its own
GIVE = ("all_gather", "all_gather_async", "barrier", "broadcast")


def mirrors_of(world: World) -> MirroredAxes:
    assert world.mirrors is not None
    return world.mirrors


class MirroredLine:
    """The ranks of a collective, and which of their messages meet.

    Position p's message to position p + k meets the receive of position p from p − k.
    """

    def __init__(self, ranks: Sequence[int], number: int, world: World):
        mirrors = mirrors_of(world)
        self.number = number
        self.position = {rank: position for position, rank in enumerate(ranks)}
        self.stands = [mirrors.representative(rank) for rank in ranks]
        # those that have a thread, in order, and the place of each among them
        self.threads = list(dict.fromkeys(self.stands))
        self.index = {rank: index for index, rank in enumerate(self.threads)}
        self.whole = len(self.threads) == len(ranks)

    def channel(self, src: int, dst: int, sent: bool, tag: int) -> tuple:
        """Return the properties that both sides of a message share.

        `sent`: asked by its sender.
        """
        if self.whole:
            return tag, src, dst
        ranks, threads = len(self.stands), len(self.threads)
        steps = (self.position[dst] - self.position[src]) % ranks
        if 2 * steps > ranks:  # the other way round is shorter
            steps -= ranks
        offset = self.index[self.stands[abs(steps)]] * (1 if steps > 0 else -1)
        if sent:
            dst = self.threads[(self.index[src] + offset) % threads]
        else:
            src = self.threads[(self.index[dst] - offset) % threads]
        return tag, src, dst, steps, self.number


class MirroredMessages(UnmatchedMessages):
    """Messages of which one side may stand for that of another rank."""

    def match(self, send: MessageWork, channel: list, receive: MessageWork) -> None:
        if (send.peer, receive.peer) == (receive.rank.number, send.rank.number):
            super().match(send, channel, receive)
            return
        differs = send.dtype != receive.dtype or bool(send.pointer) != bool(receive.pointer)
        if send.pointer and not differs:  # with numbers, which must be those of the other ranks
            differs = send.nbytes != receive.nbytes or bool(
                send.within and send.within[0] not in GIVE
            )
        if differs:
            error = MisuseError(
                f"rank {receive.rank.number} stands for ranks that have no thread, and its message "
                "isn't what they would send it: expected the dtype and device of its own message "
                "to them, and numbers only in operations that give each rank the same. Use the "
                f"meta device, or a run with all ranks\n  {receive.call().brief}\n  "
                f"{send.call().brief}",
                receive.rank.number,
            )
            send.world.raise_in(receive.rank, error)
        self.matched(send, channel, receive)


class MirroredState(SharedState):
    """The state that all groups of such a run share."""

    def __init__(self, world: World, payload_bytes: int):
        super().__init__(world, payload_bytes)
        world.find_misuse = self.find_misuse
        self.unmatched = MirroredMessages(world.network.eager)
        self.lines: dict[tuple[int, ...], MirroredLine] = {}

    def line(self, ranks: tuple[int, ...]) -> MirroredLine:
        if ranks not in self.lines:
            self.lines[ranks] = MirroredLine(ranks, len(self.lines), self.world)
        return self.lines[ranks]

    def find_misuse(self) -> MisuseError | None:
        """Return a misuse when nothing goes on: a rank may wait for one that has no thread."""
        mirrors = mirrors_of(self.world)
        waits = [rank.waiting.call() for rank in self.world.ranks if rank.waiting is not None]
        absent = (call for call in waits if not set(call.peers).issubset(mirrors.present))
        if (call := next(absent, None)) is None:
            return None
        return MisuseError(
            f"rank {call.rank} waits forever: {call.brief}. Only {len(mirrors.present)} of the "
            f"{self.world.size} ranks have a thread, and stand for the others along "
            f"{', '.join(mirrors.mirrored)}. There, a message to the rank k positions further must "
            "come with a receive from the rank k positions before, as in the algorithms 'direct', "
            "'ring' and 'bruck' (with no empty blocks): trees and doubling need all ranks",
            call.rank,
        )


class MirroredGroup(SimGroup):
    """One rank's view of a group, some of whose members have no thread."""

    shared: MirroredState

    def __init__(self, shared: MirroredState, *args: Any):
        super().__init__(shared, *args)
        self.line: MirroredLine | None = None  # of the collective whose messages are posted
        mirrors = mirrors_of(shared.world)
        stand = {*map(mirrors.representative, self.ranks)}
        self.callers = [rank for rank in self.ranks if rank in stand]

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SimWork:
        with torch_private.no_function_modes():
            return super().send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> SimWork:
        with torch_private.no_function_modes():
            return super().recv(tensors, src, tag)

    def set_collective(self, collective: Collective | None) -> None:
        super().set_collective(collective)
        self.line = None if collective is None else self.shared.line(collective.ranks)

    def post(self, work: MessageWork, src: int, dst: int) -> SimWork:
        """Let a send or a receive meet its other side, or that of a rank for which it stands."""
        if self.line is not None:
            channel = self.line.channel(src, dst, work.kind == "send", work.tag)
        else:
            mirrors = mirrors_of(self.world)
            ends = mirrors.representative(src), mirrors.representative(dst)
            steps = mirrors.moved(dst, src, -1) - ends[1]  # along mirrored axes
            channel = work.tag, *ends, steps, "message"
        self.unmatched.meet(work, self.channels[channel])
        return work
