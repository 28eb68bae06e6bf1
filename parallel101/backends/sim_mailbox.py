"""Where the sim's sends and receives find each other: by group, sender, receiver and tag, in the order in which they were posted.

Both sides must agree (this is a checked run), and must be given tensors that can be sent at all.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from parallel101.backends.describe import unfit
from parallel101.backends.sim_clock import World
from parallel101.backends.sim_messages import WHOLE, RecvWork, SendWork, block, contents
from parallel101.backends.sim_rank import Rank
from parallel101.errors import MisuseError
from parallel101.trace.calls import disagreement, member_at
from parallel101.trace.spans import part
from parallel101.trace.where import where as where_from


class Mailbox:
    """Sends and receives that have not found each other yet, in the order in which they were posted."""

    def __init__(self) -> None:
        self.number = 0  #  of what was posted last
        #  by group, then by (tag * size + src) * size + dst of the world: how many matched, then who waits (all send or all receive)
        self.channels: dict[str, dict[int, list]] = {}
        self.from_anyone: dict[tuple, list[RecvWork]] = {}  #  by (group, dst, tag)

    def unfinished(self) -> list[tuple]:
        """What has not found its other side, as fields of Events that end now."""
        channels = [channel for group in self.channels.values() for channel in group.values()]
        rows = [work.row(channel[0] + i) for channel in channels for i, work in enumerate(channel[1:], start=1)]
        return rows + [work.row(i) for works in self.from_anyone.values() for i, work in enumerate(works, start=1)]

    def matches(self, send: SendWork, channel: list, receive: RecvWork) -> None:
        """A send and a receive belong together: they must agree."""
        fit = send.nbytes == receive.nbytes and send.dtype == receive.dtype and send.shape == receive.shape
        if not fit or (send.part != receive.part and send.part and receive.part):
            #  where their collectives do not agree, that is why
            error = send.world.referee.verdict() or MisuseError(f"{disagreement(send.call(), receive.call())}", receive.rank.number)
            send.world.fail(error, receive.rank)
            raise error
        send.seq = channel[0] = channel[0] + 1
        send.receive = receive
        receive.source = send.group.position


class Messenger(dist.ProcessGroup):
    """The half of a process group that sends and receives. `member` is the rank whose view of the group it is."""

    def __init__(self, world: World, mailbox: Mailbox, member: Rank, label: str, ranks: list[int], payload_bytes: int):
        super().__init__(ranks.index(member.number), len(ranks))  # type: ignore[call-arg]
        self.world = world
        self.mailbox = mailbox
        self.channels = mailbox.channels.setdefault(label, {})
        self.member = member
        self.label = label
        self.ranks = ranks
        self.position = ranks.index(member.number)
        self.count = len(ranks)
        self.payload_bytes = payload_bytes
        self.eager = world.network.eager or -1

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SendWork:
        """Post a send to the position `dst` of the group."""
        if not 0 <= dst < self.count:
            member_at(self.member.number, "send", dst, self.ranks)
        world, rank, tensor, mailbox = self.world, self.member, tensors[0], self.mailbox
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        work = SendWork()
        work.world = world
        work.rank = rank
        work.future = None
        work.done = work.ended = work.waited = False
        work.where = where_from(sys._getframe(1))
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            refuse(tensor, "send", rank, work.where)
        work.group = self
        work.tensor = tensor
        work.peer = peer = self.ranks[dst]
        work.tag = tag
        work.part = part()
        work.posted = now = world.now
        work.nbytes = nbytes = tensor.nbytes
        work.shape = tensor.shape
        work.dtype = tensor.dtype
        work.pointer = pointer = tensor.data_ptr()
        work.seen = block(nbytes).from_address(pointer).raw if nbytes <= WHOLE else contents(pointer, nbytes)
        work.payload = tensor.detach().reshape(-1).tolist() if nbytes <= self.payload_bytes else None
        work.receive = None
        latency, bandwidth, work.stages = world.route(rank.number, peer)
        work.duration = latency + nbytes / bandwidth
        work.order = rank.order = rank.order + 1 if rank.sending else 0
        rank.sending += 1
        mailbox.number = work.number = mailbox.number + 1
        key = (tag * world.size + rank.number) * world.size + peer
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = [0]
        receive = channel[1] if len(channel) > 1 and channel[1].kind == "recv" else None
        anyone = mailbox.from_anyone.get((self.label, peer, tag)) if mailbox.from_anyone else None
        if anyone and (receive is None or anyone[0].number < receive.number):  #  the receive that was posted first gets it
            mailbox.matches(work, channel, anyone.pop(0))
        elif receive is not None:
            mailbox.matches(work, channel, channel.pop(1))
        else:
            channel.append(work)
            if nbytes > self.eager:
                return work
        world.links.ask(now, work.order, rank.number, work.number, work)
        return work

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> RecvWork:
        """Post a receive from the position `src` of the group."""
        if not 0 <= src < self.count:
            member_at(self.member.number, "recv", src, self.ranks)
        return self._receive(tensors[0], self.ranks[src], tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> RecvWork:
        """Post a receive from whoever sends first."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> RecvWork:
        world, rank, mailbox = self.world, self.member, self.mailbox
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        work = RecvWork()
        work.world = world
        work.rank = rank
        work.future = None
        work.done = work.waited = False
        work.where = where_from(sys._getframe(2))
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():  #  a complex one comes as pairs of real numbers
            refuse(tensor, "recv", rank, work.where)
        work.group = self
        work.tensor = tensor
        work.peer = peer
        work.tag = tag
        work.part = part()
        work.posted = now = world.now
        work.nbytes = tensor.nbytes
        work.shape = tensor.shape
        work.dtype = tensor.dtype
        work.pointer = tensor.data_ptr()
        mailbox.number = work.number = mailbox.number + 1
        if peer is None:
            channel = self._oldest(tag)
            if channel is None:
                mailbox.from_anyone.setdefault((self.label, rank.number, tag), []).append(work)
                return work
        else:
            key = (tag * world.size + peer) * world.size + rank.number
            channel = self.channels.get(key)
            if channel is None:
                channel = self.channels[key] = [0]
            if len(channel) == 1 or channel[1].kind == "recv":
                channel.append(work)
                return work
        send = channel.pop(1)
        mailbox.matches(send, channel, work)
        if send.ended:  #  it went ahead, and is here
            send.deliver(work)
        elif send.nbytes > self.eager:
            world.links.ask(now, send.order, send.rank.number, send.number, send)
        return work

    def _oldest(self, tag: int) -> list | None:
        """The channel with the send to this rank that was posted first, whoever it comes from."""
        size = self.world.size
        channels = (self.channels.get((tag * size + src) * size + self.member.number) for src in self.ranks)
        waiting = [channel for channel in channels if channel is not None and len(channel) > 1 and channel[1].kind == "send"]
        return min(waiting, key=lambda channel: channel[1].number, default=None)


def refuse(tensor: torch.Tensor, kind: str, rank: Rank, where: str) -> None:
    """Say what is wrong with a tensor that must not be sent or received."""
    if tensor.is_cpu:
        problem = unfit(tensor, kind)
    else:
        problem = f"a tensor on {tensor.device} to {kind}; virtual ranks have the CPU only: leave out the device, or take backend='nccl'"
    error = MisuseError(f"rank {rank.number} passes {problem}. At {where}", rank.number)
    rank.world.fail(error, rank)
    raise error
