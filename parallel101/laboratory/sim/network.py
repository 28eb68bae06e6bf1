"""The network between virtual ranks: how long messages take, and in which order they get its links.

    switch     rank ──link out──▶ ( switch ) ──link in──▶ rank
    ring       rank ──link──▶ rank ──link──▶ rank; a torus has such a ring along every axis, or
               without wraparound a line
    two level  rank ──▶ ( node ) ──slow link──▶ ( switch ) ──slow link──▶ ( node ) ──▶ rank
               a node has one slow link each way, or several, its rails

Each link carries one message at a time. Once a message has its links, it takes latency + bytes /
bandwidth. It holds them all that time, or with `latency_overlaps` for bytes / bandwidth only.
Messages that need the same link take turns, first come first served. This file has only
the times; message_matching.py moves the bytes. torch's own collectives do not use the links: their
times are in torch_collectives.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol


class NetworkRoute(NamedTuple):
    """The route of a message: its speed, and the links it occupies. Links are numbers."""

    latency: float  # seconds
    bandwidth: float  # bytes per second
    # one after the other; the links of one hop are taken together. Empty: a message to oneself
    hops: tuple[tuple[int, ...], ...]


Router = Callable[[int, int], NetworkRoute]


# ── Topologies: which links there are, and which of them are between two ranks


class Topology(Protocol):
    """The links between ranks, without their speed."""

    def router(self, network: Network, world_size: int) -> Router: ...


@dataclass(frozen=True)
class SwitchTopology:
    """A switch that is never busy, with one outgoing and one incoming link for every rank."""

    def router(self, network: Network, world_size: int) -> Router:
        def route(src: int, dst: int) -> NetworkRoute:
            return NetworkRoute(network.latency, network.bandwidth, ((src, world_size + dst),))

        return route


@dataclass(frozen=True)
class TorusTopology:
    """Ranks on a grid whose axes are closed to rings, or open; the last axis runs fastest.

    A ring is a torus with one axis. Without `wraparound` there is no link between the two ends of
    an axis: it is a line, on which a message has only one way.

    A message travels along the first axis until its coordinate is right, then along the second, and
    so on (dimension-ordered routing, Dally and Seitz 1987). If links go both ways, it takes the
    shorter way round. If both ways are equally long, a source with an even coordinate goes up and
    one with an odd coordinate goes down. So both directions carry half.

    A message gets its links one after the other: its head asks for the next link as soon as it has
    one, and does not wait for its tail (virtual cut-through, Kermani and Kleinrock 1979). It holds
    each link for latency + bytes / bandwidth. So a message that meets no other takes latency +
    bytes / bandwidth, however far it goes.
    """

    shape: tuple[int, ...] | None  # ranks along each axis; None: one ring of all ranks
    bidirectional: bool = True
    wraparound: bool = True

    def __post_init__(self) -> None:
        lengths: Any = self.shape
        if lengths is not None and not (
            isinstance(lengths, tuple)
            and lengths
            and all(type(n) is int and n >= 1 for n in lengths)
        ):
            raise ValueError(
                "shape must be a tuple of axis lengths, each an int of 1 or more, such as (4, 4); "
                f"got {lengths!r}"
            )
        _check("bidirectional", self.bidirectional, *FLAG)
        _check("wraparound", self.wraparound, *FLAG)
        if not self.bidirectional and not self.wraparound:
            raise ValueError(
                "bidirectional=False, wraparound=False: on a line with links to the right only, no "
                "message gets to the left. Leave one of them True"
            )

    def router(self, network: Network, world_size: int) -> Router:
        shape = self.shape or (world_size,)
        if math.prod(shape) != world_size:
            raise ValueError(
                f"a torus of shape {shape} has {math.prod(shape)} ranks, but this run has "
                f"{world_size}. Change the shape or world_size"
            )
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

        def route(src: int, dst: int) -> NetworkRoute:
            hops, here = [], src
            for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
                start, goal = src // stride % n, dst // stride % n
                ahead = (goal - start) % n
                up = not self.bidirectional or 2 * ahead < n or (2 * ahead == n and start % 2 == 0)
                if not self.wraparound:
                    up = goal >= start
                for hop in range(ahead if up else n - ahead):
                    at = (start + hop if up else start - hop) % n
                    here += (at - here // stride % n) * stride
                    hops.append(((2 * axis + (not up)) * world_size + here,))
                here += (goal - here // stride % n) * stride
            return NetworkRoute(network.latency, network.bandwidth, tuple(hops))

        return route


@dataclass(frozen=True)
class TwoLevelTopology:
    """A topology of nodes of `ranks_per_node` ranks.

    Each node has a fast switch inside, and `rails` outgoing and as many incoming links to the other
    nodes, which share the node's bandwidth equally. Such a link is a network card, and its wiring
    is a rail.

    The network's own latency and bandwidth are those between nodes; the bandwidth is a node's, with
    all of its rails. The i-th rank of a node uses rail i mod `rails` out and in, and shares it with
    the other ranks of that rail. A message from rank i of one node to rank j of another leaves by
    i's rail and arrives by j's: the switches outside join the rails, and that takes no extra time.
    It does not occupy the ranks' links inside their nodes. If `ranks_per_node` does not divide the
    world size, the last node is smaller.
    """

    ranks_per_node: int
    inside_latency: float
    inside_bandwidth: float
    rails: int = 1

    def __post_init__(self) -> None:
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            raise ValueError(
                f"ranks_per_node must be an int of 1 or more; got {self.ranks_per_node!r}"
            )
        if type(self.rails) is not int or not 1 <= self.rails <= self.ranks_per_node:
            raise ValueError(
                f"rails must be an int from 1 to {self.ranks_per_node}, the ranks of a node, since "
                f"each rank uses one rail; got {self.rails!r}"
            )
        _check("inside_latency", self.inside_latency, *LATENCY)
        _check("inside_bandwidth", self.inside_bandwidth, *BANDWIDTH)

    def router(self, network: Network, world_size: int) -> Router:
        nodes, of_a_rail = -(-world_size // self.ranks_per_node), network.bandwidth / self.rails
        out = 2 * world_size
        into = out + nodes * self.rails

        def rail(rank: int) -> int:
            node, local = divmod(rank, self.ranks_per_node)
            return node * self.rails + local % self.rails

        def route(src: int, dst: int) -> NetworkRoute:
            if src // self.ranks_per_node == dst // self.ranks_per_node:
                return NetworkRoute(
                    self.inside_latency, self.inside_bandwidth, ((src, world_size + dst),)
                )
            return NetworkRoute(network.latency, of_a_rail, ((out + rail(src), into + rail(dst)),))

        return route


@dataclass(frozen=True)
class Network:
    """The network of a run on the sim backend.

    Args:
        latency: seconds that a message takes in addition to bytes / bandwidth.
        bandwidth: bytes per second of a link; with `math.inf`, bytes take no time.
        eager: messages of at most this many bytes start before their receive is posted; with 0
            none does, as on gloo.
        topology: `SwitchTopology()`, or what `Network.ring`, `Network.torus` and
            `Network.two_level` put here.
        latency_overlaps: whether a link is free for the next message after bytes / bandwidth, as
            on real networks, where the latencies of small messages overlap: then `direct` can beat
            `ring`. By default a message occupies its links for its latency too, as in the usual
            cost model, in which a rank takes one step after another.

    The defaults, 5 µs and 50 GB/s, are about those of a 400 Gbit/s network card. With
    `Network(latency=1.0, bandwidth=math.inf)` a run's makespan is its number of steps. With
    `Network(latency=0.0, bandwidth=1.0)` it is the number of bytes on the critical path.

    Example:
        >>> def program():
        ...     p101.all_reduce(torch.ones(8), algorithm="ring")
        >>> steps = p101.Network(latency=1.0, bandwidth=float("inf"))
        >>> p101.launch(program, world_size=8, backend="sim", network=steps).trace.makespan
        14.0
    """

    latency: float = 5e-6
    bandwidth: float = 50e9
    eager: float = 0
    topology: Topology = field(default_factory=SwitchTopology)
    latency_overlaps: bool = False

    def __post_init__(self) -> None:
        _check("latency", self.latency, *LATENCY)
        _check("bandwidth", self.bandwidth, *BANDWIDTH)
        _check("eager", self.eager, *EAGER)
        _check("latency_overlaps", self.latency_overlaps, *FLAG)
        topology: object = self.topology
        if isinstance(topology, Network) or not hasattr(topology, "router"):
            raise ValueError(
                f"topology must be a topology; got {self.topology!r}. For other networks call "
                "Network.ring(…), Network.torus(…) or Network.two_level(…)"
            )

    @classmethod
    def ring(cls, *, bidirectional: bool = True, wraparound: bool = True, **speed: Any) -> Network:
        """Return a network in which every rank has a link to its right neighbour.

        If `bidirectional`, it has one to its left neighbour too. Without `wraparound` the last rank
        has none to the first: a line. `speed`: latency, bandwidth, eager and latency_overlaps, as
        Network takes them.
        """
        return cls(topology=TorusTopology(None, bidirectional, wraparound), **speed)

    @classmethod
    def torus(
        cls,
        shape: Sequence[int],
        *,
        bidirectional: bool = True,
        wraparound: bool = True,
        **speed: Any,
    ) -> Network:
        """Return a network with a ring along each axis of `shape`, or without `wraparound` a line.

        Its product is the world size; the last axis runs fastest, as in a DeviceMesh. `speed`:
        latency, bandwidth, eager and latency_overlaps, as Network takes them.
        """
        lengths = tuple(shape) if isinstance(shape, Sequence) else shape
        return cls(topology=TorusTopology(lengths, bidirectional, wraparound), **speed)

    @classmethod
    def two_level(
        cls,
        ranks_per_node: int,
        *,
        inside_latency: float = 2e-6,
        inside_bandwidth: float = 450e9,
        rails: int = 1,
        **speed: Any,
    ) -> Network:
        """Return a network of nodes of `ranks_per_node` ranks.

        Args:
            ranks_per_node: of each node; the last one may be smaller.
            inside_latency, inside_bandwidth: inside a node, by default about NVLink's 450 GB/s each
                way.
            rails: the network cards of a node. Each has bandwidth / rails, and the i-th rank of a
                node uses card i mod rails, to send and to receive. A node of eight H100 has eight
                cards of 50 GB/s: `two_level(8, bandwidth=400e9, rails=8)`.
            speed: latency and bandwidth between nodes, eager and latency_overlaps, as Network takes
                them. The bandwidth is a node's, shared by its ranks.
        """
        nodes = TwoLevelTopology(ranks_per_node, inside_latency, inside_bandwidth, rails)
        return cls(topology=nodes, **speed)

    def router(self, world_size: int) -> Router:
        """Return the function that gives the route between any two of `world_size` ranks.

        Raises ValueError if the topology needs another number of ranks.
        """
        between = self.topology.router(self, world_size)

        @functools.lru_cache(maxsize=1 << 16)
        def route(src: int, dst: int) -> NetworkRoute:
            return between(src, dst) if src != dst else NetworkRoute(0.0, math.inf, ())

        return route


def _check(name: str, value: Any, fits: Callable[[Any], bool], expected: str) -> None:
    if not fits(value):
        raise ValueError(f"{name} must be {expected}; got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# whether a value is one, and what is expected
FLAG = (lambda value: isinstance(value, bool)), "True or False"
LATENCY = (
    lambda value: _is_number(value) and 0 <= value < math.inf,
    "a finite number of seconds, 0 or more",
)
BANDWIDTH = (
    lambda value: _is_number(value) and value > 0,
    "in bytes per second, more than 0 (with math.inf, bytes take no time)",
)
EAGER = (
    lambda value: _is_number(value) and value >= 0,
    "a size in bytes, 0 or more: messages up to it do not wait for their receive",
)


# ── Arbitration: first come, first served, and never two messages on one link


class LinkTransfer(Protocol):
    """A message as the links see it."""

    hops: tuple[tuple[int, ...], ...]
    duration: float  # how long it holds each of its links, in seconds, and its latency is a part
    latency: float  # of that, for which it doesn't hold them if latencies overlap

    def start(self, now: float) -> None: ...
    def arrive(self) -> None: ...


# (time of the request, sender's order, sender, unique number, message, hop, the link at which it
# queued before or -1)
Request = tuple[float, int, int, int, LinkTransfer, int, int]


class Links:
    """Keeps which links are busy, and which messages queue for each."""

    def __init__(
        self,
        schedule: Callable[[float, Callable[[], None]], None],
        latency_overlaps: bool = False,
    ):
        self.schedule = schedule  # schedule(time, event): event() is called at that time
        self.latency_overlaps = latency_overlaps
        self.requests: list[Request] = []  # messages add theirs once they are ready to start
        self.freed: list[int] = []
        self.busy: set[int] = set()
        self.queues: dict[int, list[Request]] = {}

    def waiting(self) -> list[LinkTransfer]:
        """Return the messages that do not have all of their links yet."""
        requests = itertools.chain(self.requests, *self.queues.values())
        return [request[4] for request in requests]

    def free(self, hop: tuple[int, ...]) -> None:
        """Free the links of a hop that a message has left.

        A message calls it when it arrives, unless latencies overlap: then they are free before.
        """
        for link in hop:
            self.busy.discard(link)
            if link in self.queues:
                self.freed.append(link)

    def arbitrate(self, now: float) -> None:
        """Give the free links to messages, in order.

        A message that got the links of a hop asks for those of the next hop at once.
        """
        waiting, self.requests = self.requests, []
        freed, self.freed = self.freed, []
        waiting.sort(reverse=True)
        more: list[Request] = []  # requests that come up during this call
        for link in freed:
            self._take_from_queue(link, more)
        heapify(more)
        busy = self.busy
        while waiting or more:
            request = (
                heappop(more) if more and (not waiting or more[0] < waiting[-1]) else waiting.pop()
            )
            _, order, sender, number, message, nth, queued_at = request
            hops = message.hops
            hop = hops[nth] if hops else ()
            for link in hop:
                if link in busy:
                    heappush(self.queues.setdefault(link, []), (*request[:6], link))
                    if queued_at >= 0 and queued_at not in busy:
                        # it could not use that link, so the next in the queue may
                        self._take_from_queue(queued_at, more)
                    break
            else:
                busy.update(hop)
                if nth == 0:
                    message.start(now)
                free_again = now + message.duration
                last = nth + 1 >= len(hops)
                if last:
                    self.schedule(free_again, message.arrive)
                else:
                    heappush(more, (now, order, sender, number, message, nth + 1, -1))
                if self.latency_overlaps:
                    free_again = now + (message.duration - message.latency)
                # the message's tail leaves a hop in the middle of its path
                if self.latency_overlaps or not last:
                    self.schedule(free_again, functools.partial(self.free, hop))

    def _take_from_queue(self, link: int, into: list[Request]) -> None:
        queue = self.queues.get(link)
        if queue:
            heappush(into, heappop(queue))
        if queue is not None and not queue:
            del self.queues[link]
