"""Launches that must fail: within the promised time, and in such a way that the next launch
works.
"""

from __future__ import annotations

import inspect
import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

import parallel101 as p101
from parallel101.ranks import diagnosis

SOON = 2.0  # seconds: the promised time for deadlocks and deaths on gloo


def line_of(function, text: str) -> str:
    """ "file:line" of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def fails(error, function, **kwargs):
    """Launch, expect the error within SOON, and see that the next launch works."""
    began = time.monotonic()
    # however busy this machine is
    with pytest.raises(error) as raised, patch.object(diagnosis, "work_per_core", lambda: 0.0):
        p101.launch(function, **{"world_size": 4, **kwargs})
    assert time.monotonic() - began < SOON
    assert p101.launch(lambda: dist.get_rank(), world_size=2).results == [0, 1]
    return raised.value
