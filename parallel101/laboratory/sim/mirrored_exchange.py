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
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call, operation_on_ranks
from parallel101.laboratory.record.program_lines import where as where_from
from parallel101.laboratory.sim.message_matching import dtype_name, plain_shape
from parallel101.spans import Collective


class Exchange(NamedTuple):
    """The sends that a rank posts at once. Other ranks send the same to this one.

    Attributes:
        collective, tag, dtype: of all messages.
        runs: for each run of messages that hold the same links: these, and how many there are.
        peers, nbytes, shapes: of each send, in order; a peer is a rank of the world.
        seconds: how long each holds its links.
    """

    collective: Collective | None
    tag: int
    dtype: torch.dtype
    runs: tuple[tuple[tuple[tuple[int, ...], ...], int], ...]
    peers: tuple[int, ...]
    nbytes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    seconds: tuple[float, ...]


class ExchangeTransfer:
    """Messages that hold the same links, one after another. It is `done` when they have started.

    Attributes:
        ends: of each message; empty before the start.
    """

    __slots__ = ("done", "duration", "ends", "first", "hops", "posted", "seconds", "started")
    latency = 0.0  # mirrored.py refuses networks on which latencies overlap

    def __init__(
        self, posted: PostedExchange, hops: tuple[tuple[int, ...], ...], first: int, count: int
    ):
        self.posted, self.hops, self.first = posted, hops, first
        self.seconds = posted.exchange.seconds[first : first + count]
        self.duration = sum(self.seconds)
        self.started, self.done = 0.0, False
        self.ends: list[float] = []

    def start(self, now: float) -> None:
        """Start the messages: the first one has its links. The rank may wait for it already."""
        self.started, self.done = now, True
        self.ends = list(accumulate(self.seconds, initial=now))[1:]
        self.duration = self.ends[-1] - now  # to the last bit, as one message after another
        rank = self.posted.rank
        if rank.waiting is self:
            self.posted.world.schedule(now, rank)

    def fire(self) -> None:
        """End the transfer, because its last message has ended."""
        for hop in self.hops[-1:]:
            self.posted.world.links.free(hop)
        self.posted.rank.in_flight -= len(self.ends)
        if self.posted.world.recording:
            self.posted.record(self)

    def call(self) -> Call:
        return self.posted.call(self.first)

    def missing(self) -> set[int]:
        return set()


class PostedExchange:
    """All messages of an exchange, in flight. Each is known by its index in it.

    Args:
        group: a MirroredGroup, which posts them.
    """

    def __init__(self, group: Any, exchange: Exchange):
        self.group, self.exchange = group, exchange
        self.world, self.rank = world, rank = group.world, group.member
        if rank.clock > world.now or world.failure is not None:
            world.enter(rank)
        self.where, self.when = where_from(sys._getframe(1)), world.now
        self.left = len(exchange.peers)  # to wait for
        self.transfers: list[ExchangeTransfer] = []
        for hops, count in exchange.runs:
            first = sum(len(other.seconds) for other in self.transfers)
            transfer = ExchangeTransfer(self, hops, first, count)
            self.transfers.append(transfer)
            order = rank.send_order + 1 if rank.in_flight else 0
            rank.send_order = order + count - 1
            rank.in_flight += count
            group.unmatched.number = number = group.unmatched.number + 2 * count
            world.links.request(world.now, order, rank.number, number, transfer)

    @property
    def waited(self) -> bool:
        return self.left <= 0

    def wait_for(self, index: int) -> None:
        """Return when this message has ended. If that is later, the rank's clock is set to it."""
        self.left -= 1
        transfers = self.transfers
        transfer = transfers[0]
        if len(transfers) > 1:
            transfer = next(each for each in reversed(transfers) if each.first <= index)
        if not transfer.done:
            self.world.wait(self.rank, transfer)
        self.rank.clock = max(self.rank.clock, transfer.ends[index - transfer.first])

    def wait(self) -> bool:
        """Wait for all messages."""
        for transfer in self.transfers:
            self.wait_for(transfer.first + len(transfer.seconds) - 1)
        self.left = 0
        return True

    def record(self, transfer: ExchangeTransfer) -> None:
        exchange, group, start = self.exchange, self.group, transfer.started
        for index, end in enumerate(transfer.ends, start=transfer.first):
            peer = exchange.peers[index]
            row = (  # the fields of a MessageRow
                self.rank.number,
                peer,
                exchange.tag,
                exchange.nbytes[index],
                start,
                end,
                group.event_group_of(exchange.collective),
                group.next_seq(exchange.collective, exchange.tag, peer),
                plain_shape(exchange.shapes[index]),
                dtype_name(exchange.dtype),
                None,
                self.where,
                self.when,
                self.where,
                self.when,
            )
            self.world.events.append(row)
            start = end

    def call(self, index: int) -> Call:
        """Return a message as a Call, for a report."""
        exchange = self.exchange
        return Call(
            rank=self.rank.number,
            kind="send",
            peers=(exchange.peers[index],),
            tag=exchange.tag,
            group=self.group.label,
            seq=0,
            nbytes=exchange.nbytes[index],
            shape=plain_shape(exchange.shapes[index]),
            dtype=dtype_name(exchange.dtype),
            where=self.where,
            within=operation_on_ranks(exchange.collective),
        )


class MirroredMessage:
    """A send to the rank k positions further, and the receive from the rank k positions before."""

    __slots__ = ("comm", "inbox", "index", "outbox", "posted", "waited", "works")

    def __init__(self, comm: MirroredComm):
        self.comm = comm
        self.outbox: torch.Tensor | None = None
        self.inbox: torch.Tensor | None = None
        self.posted: Any = None  # the exchange
        self.works: list[Any] | None = None  # or its own works
        self.waited, self.index = False, 0

    def wait(self) -> None:
        if self.waited:
            return
        if self.posted is None and self.works is None:
            self.comm.flush()
        self.waited = True
        if self.works is None:
            self.posted.wait_for(self.index)
        else:
            for work in self.works:
                work.wait()


class MirroredComm:
    """A Comm of parallel101.collectives whose messages are posted at once.

    All its ranks have one and the same thread, and its tensors are on the meta device.

    Args:
        comm: the Comm of parallel101.collectives that it replaces.
        group: the MirroredGroup that posts.
    """

    def __init__(self, comm: Any, group: Any):
        self.comm, self.process_group = comm, group
        self.rank, self.size = comm.rank, comm.size
        self._messages: dict[int, MirroredMessage] = {}  # by the steps to the receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def isend(self, tensor: torch.Tensor, to: int) -> MirroredMessage:
        steps = (to - self.rank) % self.size
        message = self._messages.get(steps)
        if message is None or message.outbox is not None:
            message = self._another(steps)
        message.outbox = tensor
        return message

    def irecv(self, tensor: torch.Tensor, source: int) -> MirroredMessage:
        steps = (self.rank - source) % self.size
        message = self._messages.get(steps)
        if message is None or message.inbox is not None:
            message = self._another(steps)
        message.inbox = tensor
        return message

    def _another(self, steps: int) -> MirroredMessage:
        if steps in self._messages:
            self.flush()
        message = self._messages[steps] = MirroredMessage(self)
        return message

    def flush(self) -> None:
        """Post the messages that have been given since the last time."""
        messages, self._messages = self._messages, {}
        if not messages:
            return
        with torch_private.no_function_modes():
            exchange = self.exchange_of(messages)
        if exchange is not None:
            posted = self.process_group.exchange(exchange)
            for index, message in enumerate(messages.values()):
                message.posted, message.index = posted, index
                message.outbox = message.inbox = None
            return
        # no rotation, or an empty tensor
        for steps, message in messages.items():
            message.works = []
            if message.inbox is not None:
                source = (self.rank - steps) % self.size
                message.works.append(self.comm.irecv(message.inbox, source))
            if message.outbox is not None:
                to = (self.rank + steps) % self.size
                message.works.append(self.comm.isend(message.outbox, to))

    def exchange_of(self, messages: dict[int, MirroredMessage]) -> Exchange | None:
        """Combine these messages into one exchange; None if one has no counterpart."""
        outboxes = [message.outbox for message in messages.values()]
        inboxes = [message.inbox for message in messages.values()]
        both = [x for x in (*outboxes, *inboxes) if x is not None]
        if len(both) < 2 * len(messages):
            return None
        dtype = both[0].dtype
        if not all(x.dtype == dtype and x.nbytes for x in both):
            return None
        me, ranks = self.process_group.member.number, self.comm.group.ranks
        peers = tuple(ranks[(self.rank + steps) % self.size] for steps in messages)
        routes = [self.process_group.world.route(me, peer) for peer in peers]
        nbytes = tuple(x.nbytes for x in both[: len(messages)])
        return Exchange(
            self.comm.collective,
            self.comm.tag,
            dtype,
            tuple((hops, len([*run])) for hops, run in groupby(route.hops for route in routes)),
            peers,
            nbytes,
            tuple(x.shape for x in both[: len(messages)]),
            tuple(
                latency + size / bandwidth
                for (latency, bandwidth, _), size in zip(routes, nbytes, strict=True)
            ),
        )
