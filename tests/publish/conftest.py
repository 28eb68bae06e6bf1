"""In these tests, the atlas of collectives has one run. All runs take half a minute."""

from __future__ import annotations

import pytest

from parallel101.publish.tools import collectives_atlas_page
from parallel101.publish.tools.recorded_collectives import Choice


@pytest.fixture(autouse=True)
def one_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice("broadcast", "flat", 8, "switch")
    monkeypatch.setattr(collectives_atlas_page, "START", choice)
    monkeypatch.setattr(collectives_atlas_page, "all_choices", lambda: [choice])
