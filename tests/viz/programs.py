"""Runs to draw: collectives, right and wrong, on the sim backend, with values that carry their
origin.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import parallel101 as p101
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network, NetworkRoute, Router
from tests.sim.programs import run, trace

ONE_SECOND = Network(latency=1.0, bandwidth=float("inf"))  # each message takes one second

ring_all_reduce = partial(p101.all_reduce, algorithm="ring")
ring_reduce_scatter = partial(p101.reduce_scatter, algorithm="ring")
ring_all_gather = partial(p101.all_gather, algorithm="ring")
both_ways_all_reduce = partial(p101.all_reduce, algorithm="bidirectional_ring")
both_ways_all_gather = partial(p101.all_gather, algorithm="bidirectional_ring")
doubling_all_reduce = partial(p101.all_reduce, algorithm="recursive_doubling")
doubling_all_gather = partial(p101.all_gather, algorithm="recursive_doubling")
chain_broadcast = partial(p101.broadcast, algorithm="pipelined_chain", segment_bytes=8)
binomial_broadcast = partial(p101.broadcast, algorithm="binomial")
binomial_reduce = partial(p101.reduce, algorithm="binomial")
flat_scatter = partial(p101.scatter, algorithm="flat")
flat_gather = partial(p101.gather, algorithm="flat")
pairwise_all_to_all = partial(p101.all_to_all, algorithm="pairwise")


@functools.lru_cache(maxsize=256)
def recorded(
    program: Callable[[Tensor], object],
    n: int,
    numel: int,
    *,
    payload: bool = True,
    uneven: bool = False,
) -> tuple[Trace, list[object]]:
    """The trace and the results of program(x) on n virtual ranks, as `collective_scene` takes them.

    `uneven`: ranks start at different times, links differ, and the times are those that gloo
    records. numel 0: x is plain ones.
    """
    network = replace(ONE_SECOND, topology=UnevenLinks()) if uneven else ONE_SECOND
    ran = run(lambda _: _rank(program, numel, uneven), n, network, payload_bytes=payload << 20)
    record = trace(ran)
    if uneven:
        record = Trace([e._replace(start=e.posted) for e in record.events], n, "gloo")
    return record, ran.results


def _rank(program: Callable[[Tensor], object], numel: int, uneven: bool) -> object:
    rank, n = dist.get_rank(), dist.get_world_size()
    if uneven:
        p101.compute(random.Random(rank).random())
    return program(origin_tensor(rank, n, numel) if numel else torch.ones(1, dtype=torch.int64))


@dataclass(frozen=True)
class UnevenLinks:
    """Links whose latency differs by up to four fifths, so that no two ranks keep the same pace."""

    def router(self, network: Network, world_size: int) -> Router:
        def route(src: int, dst: int) -> NetworkRoute:
            latency = network.latency * (1.0 + 0.8 * random.Random(src * world_size + dst).random())
            return NetworkRoute(latency, network.bandwidth, ((src, world_size + dst),))

        return route


def exchange(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> list[Tensor]:
    """Post all sends (to, tensor) and receives (from, tensor of the shape to expect), wait for
    them, return what arrived.
    """
    arrived = [(source, torch.empty_like(like)) for source, like in receives]
    works = [dist.irecv(buffer, source) for source, buffer in arrived]
    for work in works + [dist.isend(x.contiguous(), to) for to, x in sends]:
        work.wait()
    return [buffer for _, buffer in arrived]


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def broken_ring_all_reduce(
    x: Tensor, twice: tuple[int, int] | None = None, lost: tuple[int, int] | None = None
) -> Tensor:
    """The textbook's ring.

    At `twice` = (rank, step) a rank adds what it received two times, at `lost` it copies it.
    """
    (rank, n), x = me(), x.clone()
    parts = x.tensor_split(n)
    for step in range(n - 1):
        out, into = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        (got,) = exchange([((rank + 1) % n, out)], [((rank - 1) % n, into)])
        if (rank, step) == lost:
            into.copy_(got)
        else:
            into += got * (2 if (rank, step) == twice else 1)
    for step in range(n - 1):
        out, into = parts[(rank + 1 - step) % n], parts[(rank - step) % n]
        into.copy_(exchange([((rank + 1) % n, out)], [((rank - 1) % n, into)])[0])
    return x


def eager_scatter(x: Tensor) -> Tensor:
    """A scatter whose root posts all its sends at once.

    Its link still lets one message through at a time.
    """
    rank, n = me()
    parts = x.tensor_split(n)
    if rank:
        return exchange([], [(0, parts[rank])])[0]
    exchange([(peer, parts[peer]) for peer in range(1, n)], [])
    return parts[0]
