"""What the benchmarks ask of the rank that they run on, whoever has started it."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist


def as_launch_does(rank: int, backend: str) -> None:
    """Settings of a rank that torch itself has started, before its process group: one thread, and on NCCL a GPU of its own."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")


def settle() -> None:
    """Every rank is here, and its GPU has done what it was asked to."""
    dist.barrier()
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def peak_memory() -> int:
    """The most memory this process has had so far, in bytes. (The kernel counts it in KiB on Linux and in bytes on macOS.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
