from __future__ import annotations

import pytest

from parallel101.laboratory.grade.homework import HomeworkSet, find_sets
from tests.grade.test_submissions import STUB, TESTS, handed_in


@pytest.fixture
def homework(tmp_path) -> HomeworkSet:
    handed_in(tmp_path / "homework" / "hw9_swap", {"test_hw9.py": TESTS, "hw9.py": STUB})
    return find_sets(tmp_path / "homework")[0]
