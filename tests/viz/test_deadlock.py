"""The picture of a deadlock shows what the error carries: every rank, every arrow, the cycle,
the lines of source.
"""

from __future__ import annotations

import pytest

from parallel101.laboratory.record.errors import DeadlockError
from tests.viz.drawn import elements, texts

PLACE = "program.py"


def ring(n: int) -> DeadlockError:
    return DeadlockError(
        {r: ("send", (r + 1) % n, f"{PLACE}:{r + 1}") for r in range(n)}, cycle=range(n)
    )


@pytest.mark.parametrize("n", [2, 3, 5, 16, 64])
def test_a_cycle_of_any_size(n):
    scene = ring(n).picture()
    for tag, look in (("path", "wait stuck"), ("circle", "node stuck")):
        assert len(elements(scene, tag, look)) == n
    assert ("0 → 1" in scene.svg()) == (n <= 8)


def test_the_line_of_source_is_shown_if_it_can_be_found():
    svg = DeadlockError({0: ("recv", 1, f"{__file__}:1")}, returned=[1]).picture().svg()
    assert "line 1: " in svg and "The picture of a deadlock" in svg
    assert "gone.py:7" in DeadlockError({0: ("recv", 1, "gone.py:7")}, returned=[1]).picture().svg()


def test_ranks_that_returned_and_receives_from_any_rank():
    waiting = {0: ("barrier", (2, 3), "a.py:1"), 1: ("recv", None, "a.py:2")}
    scene = DeadlockError(waiting, returned=[2]).picture()
    assert len(elements(scene, "circle", "node gone")) == 1
    # from rank 0 to both; a receive from anyone points nowhere
    assert len(elements(scene, "path", "wait ")) == 2
    calls = {"waits in barrier for ranks 2 and 3", "waits in recv from any rank"}
    assert {*calls, "returned"} <= {*texts(scene)}


@pytest.mark.parametrize("n", [2, 7, 16])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_notes_are_below_the_rows_and_inside_the_picture(n, count):
    notes = [(f"rank {k} posted a send that nobody receives", f"a.py:{k}") for k in range(count)]
    scene = DeadlockError(ring(n).waiting, range(n), notes=notes).picture()
    places = [text for text in texts(scene) if text.startswith("a.py")]
    assert places == [f"a.py:{k}" for k in range(min(count, 3))]
    assert max(float(text.get("y")) for text in elements(scene, "text")) < scene.height
