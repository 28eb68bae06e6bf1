"""All messages that a rank of a mirrored collective posts at once, as one event on each link.

    rank 0 sends to 1, 2, …, 127        which all stand in for rank 0, so these 127 messages hold
    and receives from 127, 126, …, 1    rank 0's own link, one after another: one transfer

The end of each message is known when the first one starts: a link that they hold passes from one
to the next, since all asked for it at the same time and before any other. So a rank that waits for
the third sets its clock to the third one's end, and the record has every message with its own start
and end. Only messages that ask for the same link at the very same time, from another rank, now come
after all of them.

`parallel101.collectives` finds a MirroredComm by `MirroredGroup.comm_for`. It keeps what is posted
until `flush`, or until the first wait.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from parallel101.record import torch_private
from parallel101.record.calls import Call, collective_terms
from parallel101.record.spans import Collective
from parallel101.record.where import where as where_from
from parallel101.sim.clock import VirtualRank, World
from parallel101.sim.message_matching import dtype_name, plain_shape

if TYPE_CHECKING:
    from parallel101.sim.mirrored_group import MirroredGroup


class ExchangedMessage(NamedTuple):
    """A message to a rank that is mirrored. Another rank sends the same to this one."""

    peer: int  # its receiver, in the world
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class Exchange(NamedTuple):
    """What a rank posts at once: its sends, which are its receives as well.

    Attributes:
        collective, tag: of all messages.
        links: the hops of each run of messages that hold the same links, and how many there are.
        messages, seconds: in the order of the sends; how long each holds its links.
    """

    collective: Collective | None
    tag: int
    links: tuple[tuple[tuple[tuple[int, ...], ...], int], ...]
    messages: tuple[ExchangedMessage, ...]
    seconds: tuple[float, ...]


class ExchangeTransfer:
    """Messages that hold the same links, one after another. It is `done` when they have started.

    Attributes:
        ends: of each message; empty before the start.
    """

    __slots__ = (
        *("done", "duration", "ends", "exchange", "first", "group", "hops"),
        *("posted", "rank", "seconds", "started", "where", "world"),
    )

    def __init__(
        self,
        group: MirroredGroup,
        exchange: Exchange,
        hops: tuple[tuple[int, ...], ...],
        first: int,
        count: int,
        where: str,
    ):
        self.group, self.exchange, self.hops, self.first = group, exchange, hops, first
        self.world: World = group.world
        self.rank: VirtualRank = group.member
        self.seconds = exchange.seconds[first : first + count]
        self.duration = sum(self.seconds)
        self.where, self.posted = where, self.world.now
        self.started, self.done = 0.0, False
        self.ends: list[float] = []

    def start(self, now: float) -> None:
        """The first message has its links. The rank may wait for it already."""
        self.started, self.done = now, True
        self.ends = list(accumulate(self.seconds, initial=now))[1:]
        if self.rank.waiting is self:
            self.world.schedule(now, self.rank)

    def fire(self) -> None:
        """The last message has ended."""
        for hop in self.hops[-1:]:
            self.world.links.free(hop)
        self.rank.in_flight -= len(self.seconds)
        group, exchange, me = self.group, self.exchange, self.rank.number
        start = self.started
        for i, end in enumerate(self.ends, start=self.first):
            message = exchange.messages[i]
            self.world.events.append(
                (  # the fields of a MessageRow
                    me,
                    message.peer,
                    exchange.tag,
                    message.nbytes,
                    start,
                    end,
                    group.event_group_of(exchange.collective),
                    group.next_seq(exchange.collective, exchange.tag, message.peer),
                    message.shape,
                    message.dtype,
                    None,
                    self.where,
                    self.posted,
                    self.where,
                    self.posted,
                )
            )
            start = end

    def call(self) -> Call:
        """The first message, for a report."""
        message = self.exchange.messages[self.first]
        return Call(
            rank=self.rank.number,
            kind="send",
            peers=(message.peer,),
            tag=self.exchange.tag,
            group=self.group.label,
            seq=0,
            nbytes=message.nbytes,
            shape=message.shape,
            dtype=message.dtype,
            where=self.where,
            within=collective_terms(self.exchange.collective),
        )

    def missing(self) -> set[int]:
        return set()


class ExchangeWork:
    """One message of an exchange."""

    __slots__ = ("place", "transfer", "waited")

    def __init__(self, transfer: ExchangeTransfer, place: int):
        self.transfer, self.place, self.waited = transfer, place, False

    def wait(self) -> bool:
        """Return when the message has ended; for messages to come, the rank's clock is set."""
        self.waited = True
        transfer = self.transfer
        rank = transfer.rank
        if not transfer.done:
            transfer.world.wait(rank, transfer)
        rank.clock = max(rank.clock, transfer.ends[self.place])
        return True


def post(group: MirroredGroup, exchange: Exchange) -> list[ExchangeWork]:
    """Post all messages of an exchange. Returns a work for each send, which is a receive's too."""
    world, rank = group.world, group.member
    if rank.clock > world.now or world.failure is not None:
        world.enter(rank)
    where, works, first = where_from(sys._getframe(1)), [], 0
    for hops, count in exchange.links:
        transfer = ExchangeTransfer(group, exchange, hops, first, count, where)
        order = rank.send_order + 1 if rank.in_flight else 0
        rank.send_order = order + count - 1
        rank.in_flight += count
        group.unmatched.number = number = group.unmatched.number + 2 * count
        world.links.request(world.now, order, rank.number, number, transfer)
        works += [ExchangeWork(transfer, place) for place in range(count)]
        first += count
    return works


class PostedMessage:
    """A send or a receive of a MirroredComm, which is posted with others."""

    __slots__ = ("comm", "work")

    def __init__(self, comm: MirroredComm):
        self.comm = comm
        self.work: Any = None

    def wait(self) -> None:
        if self.work is None:
            self.comm.flush()
        if not self.work.waited:  # a send and the receive of as far the other way end together
            self.work.wait()


class MirroredComm:
    """A Comm of parallel101.collectives whose messages are posted at once.

    All its ranks have one and the same thread, and its tensors are on the meta device.
    """

    def __init__(self, comm: Any, group: MirroredGroup):
        self.comm, self.process_group = comm, group
        self.rank, self.size = comm.rank, comm.size
        self._posted: list[tuple[bool, torch.Tensor, int, PostedMessage]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def isend(self, tensor: torch.Tensor, to: int) -> PostedMessage:
        message = PostedMessage(self)
        self._posted.append((True, tensor, to, message))
        return message

    def irecv(self, tensor: torch.Tensor, source: int) -> PostedMessage:
        message = PostedMessage(self)
        self._posted.append((False, tensor, source, message))
        return message

    def flush(self) -> None:
        """Post what has been given since the last time."""
        posted, self._posted = self._posted, []
        if not posted:
            return
        with torch_private.no_function_modes():
            exchange = self.exchange_of(posted)
        if exchange is None:  # no rotation: a send has no receive from as far the other way
            for sends, tensor, peer, message in posted:
                give = self.comm.isend if sends else self.comm.irecv
                message.work = give(tensor, peer)
            return
        works, me = self.process_group.exchange(exchange), self.rank
        by_steps = {}
        sent = iter(works)
        for sends, _, peer, message in posted:
            if sends:
                message.work = by_steps[(peer - me) % self.size] = next(sent)
        for sends, _, peer, message in posted:
            if not sends:
                message.work = by_steps[(me - peer) % self.size]

    def exchange_of(self, posted: list) -> Exchange | None:
        """What these messages are together; None if they don't meet."""
        me, size, ranks = self.rank, self.size, self.comm.group.ranks
        sends = {(peer - me) % size: x for sent, x, peer, _ in posted if sent}
        receives = {(me - peer) % size: x for sent, x, peer, _ in posted if not sent}
        if sends.keys() != receives.keys() or 2 * len(sends) != len(posted):
            return None
        if any(x.dtype != receives[steps].dtype or not x.nbytes for steps, x in sends.items()):
            return None
        route = self.process_group.world.route
        links: list[list] = []
        messages, seconds = [], []
        for steps, x in sends.items():
            peer = ranks[(me + steps) % size]
            latency, bandwidth, hops = route(self.process_group.member.number, peer)
            if links and links[-1][0] == hops:
                links[-1][1] += 1
            else:
                links.append([hops, 1])
            nbytes = x.nbytes
            seconds.append(latency + nbytes / bandwidth)
            messages.append(
                ExchangedMessage(peer, nbytes, plain_shape(x.shape), dtype_name(x.dtype))
            )
        return Exchange(
            self.comm.collective,
            self.comm.tag,
            tuple((hops, count) for hops, count in links),
            tuple(messages),
            tuple(seconds),
        )
