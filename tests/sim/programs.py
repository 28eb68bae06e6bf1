"""Small programs over isend and irecv for the sim's tests, and functions that run them and
raise any failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.simulate import SimResult, simulate


def run(
    rank_main: Callable[[int], Any], world_size: int, network: Network | None = None, **options: Any
) -> SimResult:
    """A simulation that must succeed."""
    result = simulate(rank_main, world_size, network, **options)
    if result.error is not None:
        raise result.error
    return result


def trace(result: SimResult) -> Trace:
    return Trace.from_rows(result.events, len(result.results), "sim")


def makespan(
    rank_main: Callable[[int], Any], world_size: int, network: Network | None = None
) -> float:
    return trace(run(rank_main, world_size, network)).makespan


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


def flat_broadcast(rank: int, numel: int = 1) -> list[float]:
    x = torch.full((numel,), 7.0 if rank == 0 else 0.0)
    if rank == 0:
        wait_for([dist.isend(x, peer) for peer in range(1, dist.get_world_size())])
    else:
        dist.recv(x, 0)
    return x.tolist()


def tree_broadcast(rank: int, numel: int = 1) -> list[float]:
    x = torch.full((numel,), 7.0 if rank == 0 else 0.0)
    step, n = 1, dist.get_world_size()
    while step < n:
        if rank < step and rank + step < n:
            dist.send(x, rank + step)
        elif step <= rank < 2 * step:
            dist.recv(x, rank - step)
        step *= 2
    return x.tolist()


def ring_all_gather(rank: int, numel: int = 1, ring: list[int] | None = None) -> list[float]:
    """The ranks of `ring` (all ranks) pass their shards on to the right."""
    ring = ring or list(range(dist.get_world_size()))
    n, me = len(ring), ring.index(rank)
    x = torch.zeros(n, numel)
    x[me] = me + 1.0
    for step in range(n - 1):
        wait_for(
            [
                dist.isend(x[(me - step) % n], ring[(me + 1) % n]),
                dist.irecv(x[(me - step - 1) % n], ring[(me - 1) % n]),
            ]
        )
    return x[:, -1].tolist() if numel else []


def ring_all_reduce(x: torch.Tensor, ring: list[int], rank: int) -> None:
    """Sum x over the ranks of `ring`, in place. Its length is a multiple of their number."""
    n, me = len(ring), ring.index(rank)
    right, left = ring[(me + 1) % n], ring[(me - 1) % n]
    chunks, inbox = list(x.chunk(n)), torch.empty(x.numel() // n, dtype=x.dtype)
    for step in range(n - 1):
        sent = dist.isend(chunks[(me - step) % n], right)
        dist.recv(inbox, left)
        chunks[(me - step - 1) % n].add_(inbox)
        sent.wait()
    for step in range(n - 1):
        wait_for(
            [
                dist.isend(chunks[(me + 1 - step) % n], right),
                dist.irecv(chunks[(me - step) % n], left),
            ]
        )


def bidirectional_all_gather(rank: int, numel: int = 1) -> None:
    """Half of the shards come from the left, the other half from the right."""
    n = dist.get_world_size()
    x = torch.zeros(n, numel)
    x[rank] = rank + 1.0
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n // 2):
        works = [
            dist.isend(x[(rank - step) % n], right),
            dist.irecv(x[(rank - step - 1) % n], left),
        ]
        if step < (n - 1) // 2:
            works += [
                dist.isend(x[(rank + step) % n], left, tag=1),
                dist.irecv(x[(rank + step + 1) % n], right, tag=1),
            ]
        wait_for(works)
    assert x[:, 0].tolist() == [r + 1 for r in range(n)]


def direct_all_to_all(rank: int, numel: int = 1) -> None:
    """Everything posted at once: rank r's k-th message goes to r + k."""
    n = dist.get_world_size()
    x, out = torch.arange(float(n))[:, None].repeat(1, numel) + 100 * rank, torch.zeros(n, numel)
    out[rank] = x[rank]
    works = []
    for k in range(1, n):
        works += [
            dist.isend(x[(rank + k) % n], (rank + k) % n),
            dist.irecv(out[(rank - k) % n], (rank - k) % n),
        ]
    wait_for(works)
    assert out[:, 0].tolist() == [100 * r + rank for r in range(n)]
