"""The reference solutions of homework 1."""

import torch
import torch.distributed as dist


def ring_shift(x: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return x.clone()
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    sending.wait()
    return received
