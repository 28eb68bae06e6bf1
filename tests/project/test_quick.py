"""`make quick` tries something of every room: tests/quick.txt has a folder, a file or a test on
each line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.test_arrows import MODULES, room

ROOT = Path(__file__).parents[2]
QUICK = (ROOT / "tests" / "quick.txt").read_text().split()


def test_every_room_has_a_quick_test():
    rooms = {room(module) for module, path in MODULES.items() if path.name == "__init__.py"}
    tried = {line.split("/")[1] for line in QUICK} | {"__init__", "laboratory"}
    assert {"homework" if room == "exercises" else room for room in rooms} <= tried


@pytest.mark.parametrize("line", QUICK)
def test_every_line_names_a_test(line):
    path, _, name = line.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()
