"""Wrong solutions of homework 1. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "ring_shift__sends_first": "everyone sends first",
    "ring_shift__wait_forgotten": "receive's wait forgotten",
    "ring_shift__thrown_away": "works thrown away",
}


def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % n, (rank - 1) % n


def ring_shift__sends_first(x):
    after, before = neighbours()
    received = torch.empty_like(x)
    dist.send(x, after)
    dist.recv(received, before)
    return received


def ring_shift__wait_forgotten(x):
    after, before = neighbours()
    received = torch.empty_like(x)
    dist.irecv(received, before)
    dist.isend(x, after).wait()
    return received


def ring_shift__thrown_away(x):
    after, before = neighbours()
    received = torch.empty_like(x)
    dist.isend(x, after)
    dist.irecv(received, before)
    return received
