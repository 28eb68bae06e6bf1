"""Ranks get a test file's functions by value: if they imported the file, each of them would read
the lesson again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import cloudpickle
import pytest

from tests.lessons.lesson import LESSONS

sys.path.append(str(LESSONS))  # lesson 08 imports three_axes.py


@pytest.fixture(autouse=True, scope="module")
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
