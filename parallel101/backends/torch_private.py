"""Everything in this project that touches a private part of torch, and nothing else.

Each function says what it relies on. tests/backends/test_torch_private.py fails with a plain message when torch moves it.
"""

from __future__ import annotations

import torch.distributed.distributed_c10d as c10d


def name_backend(name: str) -> None:
    """Let `dist.get_backend()` answer "gloo" for a group that RecordedGroup wraps: programs ask it to choose a device.

    Relies on `_world.pg_map`: group -> (backend's name, store).
    """
    world = c10d._world
    for group, (_, store) in list(world.pg_map.items()):
        world.pg_map[group] = (name, store)
