"""`make quick` tries something of every room: tests/quick.txt has a folder, a file or a test on
each line. tests/thorough.txt has tests with other values than those that `make test` runs.
"""

from __future__ import annotations

from pathlib import Path

from tests.project.test_arrows import MODULES, room

ROOT = Path(__file__).parents[2]
QUICK, REPEATS = (
    (ROOT / "tests" / f"{name}.txt").read_text().splitlines() for name in ("quick", "thorough")
)


def test_every_room_has_a_quick_test():
    rooms = {room(module) for module, path in MODULES.items() if path.name == "__init__.py"}
    tried = {line.split("/")[1] for line in QUICK} | {"__init__", "laboratory"}
    assert {"homework" if room == "exercises" else room for room in rooms} <= tried


def test_every_line_names_a_test():
    for line in [*QUICK, *REPEATS]:
        path, _, name = line.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), line
        assert not name or f"def {name}(" in (ROOT / path).read_text(), line
