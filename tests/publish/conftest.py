"""In these tests, the atlas of collectives has one run. All runs take half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel101.laboratory.publish.tools import collectives_atlas_page
from parallel101.laboratory.publish.tools.recorded_collectives import Choice


@pytest.fixture(autouse=True, scope="package")
def one_recorded_run() -> Iterator[None]:
    choice = Choice("broadcast", "flat", 8, "switch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives_atlas_page, "START", choice)
        patch.setattr(collectives_atlas_page, "all_choices", lambda: [choice])
        yield
