"""Whole programs run under launch, their own set-up and clean-up included.

def main(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)     the group is there already: this only checks
    …
    dist.destroy_process_group()                                          launch will, when all have returned
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from parallel101.backends.real import batches_on_nccl


@contextmanager
def own_setup_accepted() -> Iterator[None]:
    """Inside, making the default group that is there already, and ending it, do nothing. Numbers that are not the launch's are an error."""
    make, end = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> None:
        for name, asked, is_ in (("rank", rank, dist.get_rank()), ("world_size", world_size, dist.get_world_size())):
            if asked not in (-1, is_):
                raise ValueError(f"init_process_group({name}={asked}) on rank {dist.get_rank()} of a launch, where {name} is {is_}")

    @functools.wraps(end)
    def destroy_process_group(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            end(group)

    dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
    try:
        with batches_on_nccl():
            yield
    finally:
        dist.init_process_group, dist.destroy_process_group = make, end
