"""In these tests, the atlas of collectives has one run. All runs take half a minute."""

from __future__ import annotations

import pytest

from parallel101.publish.tools import collectives_atlas_page, recorded_collectives


@pytest.fixture(autouse=True)
def one_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = recorded_collectives.Choice("broadcast", "flat", 8, "switch")
    monkeypatch.setattr(collectives_atlas_page, "START", choice)
    for name, value in (
        ("OPERATIONS", {"broadcast": "Broadcast"}),
        ("algorithms", lambda _: {"flat": recorded_collectives.algorithms("broadcast")["flat"]}),
        ("choices", lambda *_: [choice]),
    ):
        monkeypatch.setattr(collectives_atlas_page, name, value)
