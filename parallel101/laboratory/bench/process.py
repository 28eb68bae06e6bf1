"""Helpers for one rank's process in a benchmark, whether launch or torch has started it."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist


def configure_spawned_rank(rank: int, backend: str) -> None:
    """Give a rank that torch has started the settings of launch: one thread and, on NCCL, one GPU.

    Call it before the group exists.
    """
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")


def synchronize() -> None:
    """Wait until every rank is here and, on NCCL, until its GPU is idle."""
    dist.barrier()
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Return the most memory that this process has had so far, in bytes.

    (The system counts it in KiB on Linux and in bytes on macOS.)
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
