"""Odd but correct solutions of homework 1: they keep full points."""

import torch
import torch.distributed as dist


def ring_shift__batch(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return x.clone()
    received = torch.full_like(x, 7)
    ops = [dist.P2POp(dist.irecv, received, (rank - 1) % n), dist.P2POp(dist.isend, x, (rank + 1) % n)]
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    return received
