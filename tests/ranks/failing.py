"""Launches that must fail at once. (That the next one works: test_left_behind.py.)"""

from __future__ import annotations

import inspect
import time

import pytest

import parallel101 as p101

SOON = 20.0  # seconds, however busy the machine is; the time limit of a launch is 60 s


def line_of(function, text: str) -> str:
    """ "file:line" of the line of a function that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{number}"


def fails(error, function, **kwargs):
    """Launch, and expect the error within SOON."""
    began = time.monotonic()
    with pytest.raises(error) as raised:
        p101.launch(function, **{"world_size": 4, **kwargs})
    assert time.monotonic() - began < SOON
    return raised.value
