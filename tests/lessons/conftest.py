"""Ranks get a test file's functions by value: if they imported the file, each of them would read
the lesson again.
"""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest


@pytest.fixture(autouse=True, scope="module")
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
