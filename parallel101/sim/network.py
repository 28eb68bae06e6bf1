"""The network between virtual ranks, as data: how long a message takes, and which links it occupies meanwhile.

    switch     rank ──way out──▶ ( switch ) ──way in──▶ rank          one message each way at a time
    ring       rank ──link──▶ rank ──link──▶ rank                     a torus has such a ring along every axis
    two level  rank ──▶ ( node ) ──slow way out──▶ ( switch ) ──slow way in──▶ ( node ) ──▶ rank

A message takes latency + bytes / bandwidth once it has its links. Two messages that want one link take turns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol


class Route(NamedTuple):
    """How a message travels: its speed, and the links it holds. Links are numbered."""

    latency: float  #  seconds
    bandwidth: float  #  bytes a second
    stages: tuple[tuple[int, ...], ...]  #  one after the other; the links of a stage are taken together. Empty: to oneself, at once


Router = Callable[[int, int], Route]


class Topology(Protocol):
    """What the links are, apart from their speed."""

    def router(self, network: Network, world_size: int) -> Router: ...


@dataclass(frozen=True)
class Switch:
    """Every rank has one way out and one way in; between them there is room for all."""

    def router(self, network: Network, world_size: int) -> Router:
        def route(src: int, dst: int) -> Route:
            return Route(network.latency, network.bandwidth, ((src, world_size + dst),))

        return route


@dataclass(frozen=True)
class Torus:
    """Ranks in a box, the last axis running fastest, each axis closed to a ring. A ring is a torus of one axis.

    A message goes along the first axis until it stands right, then along the second, and so on (dimension-ordered routing, Dally and
    Seitz 1987), the shorter way round where links go both ways. Exactly half way round, a source with an even coordinate goes up and
    one with an odd coordinate goes down, so that both directions carry half.

    Its links are handed to it one after the other: the head of the message asks for the next link when it gets one, and does not wait
    for the tail (virtual cut-through, Kermani and Kleinrock 1979). Each link is held for latency + bytes/bandwidth from when it was
    granted, first come first served; so a message alone takes latency + bytes/bandwidth however far it goes.
    """

    shape: tuple[int, ...] | None  #  ranks along each axis; None: a ring of all ranks
    bidirectional: bool = True

    def router(self, network: Network, world_size: int) -> Router:
        shape = self.shape or (world_size,)
        if math.prod(shape) != world_size:
            raise ValueError(f"a torus of shape {shape} has {math.prod(shape)} ranks, and this run has {world_size}: they must be as many")
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

        def route(src: int, dst: int) -> Route:
            stages, here = [], src
            for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
                start, goal = src // stride % n, dst // stride % n
                ahead = (goal - start) % n
                up = not self.bidirectional or 2 * ahead < n or (2 * ahead == n and start % 2 == 0)
                for hop in range(ahead if up else n - ahead):
                    at = (start + hop if up else start - hop) % n
                    here += (at - here // stride % n) * stride
                    stages.append(((2 * axis + (not up)) * world_size + here,))
                here += (goal - here // stride % n) * stride
            return Route(network.latency, network.bandwidth, tuple(stages))

        return route


@dataclass(frozen=True)
class TwoLevel:
    """Nodes of `ranks_per_node` ranks: a fast switch inside each; between nodes, all ranks of a node share one way out and one way in.

    The network's own latency and bandwidth are those between nodes. A rank's fast ways stay free while it talks to another node.
    Where ranks_per_node does not divide the world size the last node is smaller.
    """

    ranks_per_node: int
    inside_latency: float
    inside_bandwidth: float

    def router(self, network: Network, world_size: int) -> Router:
        def route(src: int, dst: int) -> Route:
            a, b = src // self.ranks_per_node, dst // self.ranks_per_node
            if a == b:
                return Route(self.inside_latency, self.inside_bandwidth, ((src, world_size + dst),))
            return Route(network.latency, network.bandwidth, ((2 * world_size + a, 3 * world_size + b),))

        return route


@dataclass(frozen=True)
class Network:
    """The network of a run on the sim backend.

    Args:
        latency: seconds a message takes besides its bytes.
        bandwidth: bytes a second of a link; `math.inf` lets bytes cost nothing.
        eager: messages of at most so many bytes start without waiting for their receive to be posted; 0: none does (as on gloo).
        topology: `Switch()`, or what `Network.ring`, `Network.torus` and `Network.two_level` put here.

    The defaults, 5 µs and 50 GB/s, are about those of a 400 Gbit/s network card. `Network(latency=1.0, bandwidth=math.inf)` makes a
    run's makespan its number of steps, `Network(latency=0.0, bandwidth=1.0)` the bytes on its longest chain.
    """

    latency: float = 5e-6
    bandwidth: float = 50e9
    eager: float = 0
    topology: Topology = field(default_factory=Switch)

    def __post_init__(self) -> None:
        _check_latency("latency", self.latency)
        _check_bandwidth("bandwidth", self.bandwidth)
        if not _is_number(self.eager) or not self.eager >= 0:
            raise ValueError(f"eager is the size in bytes up to which messages go ahead of their receive, 0 or more; got {self.eager!r}")
        topology: object = self.topology
        if isinstance(topology, Network) or not hasattr(topology, "router"):
            raise ValueError(f"another topology is Network.ring(…), Network.torus(…) or Network.two_level(…); got {self.topology!r}")

    @classmethod
    def ring(cls, *, bidirectional: bool = True, latency: float = 5e-6, bandwidth: float = 50e9, eager: float = 0) -> Network:
        """Every rank has a link to its right neighbour and, where bidirectional, one to its left neighbour as well."""
        return cls(latency, bandwidth, eager, Torus(None, _checked_flag(bidirectional)))

    @classmethod
    def torus(
        cls, shape: Sequence[int], *, bidirectional: bool = True, latency: float = 5e-6, bandwidth: float = 50e9, eager: float = 0
    ) -> Network:
        """A ring along each axis of `shape`, whose product is the world size; the last axis runs fastest, as in a DeviceMesh."""
        if not isinstance(shape, Sequence) or not shape or not all(type(n) is int and n >= 1 for n in shape):
            raise ValueError(f"the shape of a torus is a tuple of axis lengths, each an int of 1 or more, such as (4, 4); got {shape!r}")
        return cls(latency, bandwidth, eager, Torus(tuple(shape), _checked_flag(bidirectional)))

    @classmethod
    def two_level(
        cls,
        ranks_per_node: int,
        *,
        latency: float = 5e-6,
        bandwidth: float = 50e9,
        inside_latency: float = 2e-6,
        inside_bandwidth: float = 450e9,
        eager: float = 0,
    ) -> Network:
        """Nodes of `ranks_per_node` ranks. `latency` and `bandwidth` are those between nodes (all ranks of a node share them), the
        others those inside a node, by default about NVLink's of 450 GB/s each way."""
        if type(ranks_per_node) is not int or ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is an int of 1 or more; got {ranks_per_node!r}")
        _check_latency("inside_latency", inside_latency)
        _check_bandwidth("inside_bandwidth", inside_bandwidth)
        return cls(latency, bandwidth, eager, TwoLevel(ranks_per_node, inside_latency, inside_bandwidth))

    def router(self, world_size: int) -> Router:
        """How messages go among `world_size` ranks. Raises ValueError where the topology has another number of ranks."""
        between = self.topology.router(self, world_size)

        @functools.lru_cache(maxsize=1 << 16)
        def route(src: int, dst: int) -> Route:
            return between(src, dst) if src != dst else Route(0.0, math.inf, ())

        return route


def _checked_flag(bidirectional: object) -> bool:
    if not isinstance(bidirectional, bool):
        raise ValueError(f"bidirectional is True or False; got {bidirectional!r}")
    return bidirectional


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_latency(name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is in seconds, a finite number of 0 or more; got {value!r}")


def _check_bandwidth(name: str, value: float) -> None:
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{name} is in bytes a second, more than 0 (math.inf: bytes cost nothing); got {value!r}")


# ── The links of the sim's network, and who gets them: first come, first served, and never two messages on one link.


class Happening(Protocol):
    """Something with a time: the end of a message, of a collective, of a rank's compute."""

    def happen(self) -> None: ...


class Transfer(Happening, Protocol):
    """A message as the links see it."""

    stages: tuple[tuple[int, ...], ...]
    duration: float  #  how long it holds each of its links, in seconds

    def start(self, now: float) -> None: ...


# (time of asking, sender's order, sender, unique number, message, stage, the link where it was parked or -1)
Request = tuple[float, int, int, int, Transfer, int, int]


class Links:
    """Which links are taken, and who waits for each."""

    def __init__(self, at: Callable[[float, Happening], None]):
        self.at = at  #  at(time, item): calls item.happen() then
        self.asking: list[Request] = []
        self.freed: list[int] = []
        self.taken: set[int] = set()
        self.parked: dict[int, list[Request]] = {}

    def ask(self, now: float, order: int, sender: int, number: int, message: Transfer) -> None:
        """A message is ready to start: it asks for the links of its first stage."""
        self.asking.append((now, order, sender, number, message, 0, -1))

    def waiting(self) -> list[Transfer]:
        """The messages that have not got all of their links yet."""
        return [request[4] for requests in (self.asking, *self.parked.values()) for request in requests]

    def free(self, stage: tuple[int, ...]) -> None:
        """The links of a stage have been held for as long as they had to be."""
        for link in stage:
            self.taken.discard(link)
            if link in self.parked:
                self.freed.append(link)

    def arbitrate(self, now: float) -> None:
        """Hand out what is free, in order; a message that got a link of its path asks for the next one at once."""
        waiting, self.asking = self.asking, []
        freed, self.freed = self.freed, []
        waiting.sort(reverse=True)
        more: list[Request] = []  #  those that come to ask while we are at it
        for link in freed:
            self._unpark(link, more)
        heapify(more)
        taken = self.taken
        while waiting or more:
            request = heappop(more) if more and (not waiting or more[0] < waiting[-1]) else waiting.pop()
            _, order, sender, number, message, place, parked_at = request
            stages = message.stages
            stage = stages[place] if stages else ()
            for link in stage:
                if link in taken:
                    heappush(self.parked.setdefault(link, []), (*request[:6], link))
                    if parked_at >= 0 and parked_at not in taken:
                        self._unpark(parked_at, more)  #  it had its turn there, and the next in that queue has one too
                    break
            else:
                taken.update(stage)
                if place == 0:
                    message.start(now)
                if place + 1 >= len(stages):
                    self.at(now + message.duration, message)
                else:
                    self.at(now + message.duration, _Passed(self, stage))
                    heappush(more, (now, order, sender, number, message, place + 1, -1))

    def _unpark(self, link: int, into: list[Request]) -> None:
        queue = self.parked.get(link)
        if queue:
            heappush(into, heappop(queue))
        if queue is not None and not queue:
            del self.parked[link]


class _Passed:
    """The tail of a message has passed a link in the middle of its path."""

    __slots__ = ("links", "stage")

    def __init__(self, links: Links, stage: tuple[int, ...]):
        self.links = links
        self.stage = stage

    def happen(self) -> None:
        self.links.free(self.stage)
