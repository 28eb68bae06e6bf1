"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and others. What they are fed with is computed when the page is written.

A new tool is one more line in TOOL_PAGES. `parallel101 lessons` writes its page, and the index
lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

from parallel101.extras import needs_extra

with needs_extra("A page that plays"):
    from parallel101.laboratory.publish.tools import (
        collectives_atlas_page,
        memory_page,
        schedule_builder_page,
    )


class ToolPage(NamedTuple):
    """A page that plays in the browser."""

    address: str  # of its page
    title: str
    text: str  # what the reader does there, in a sentence
    # its body, and what it loads: text by path in the site
    make: Callable[[], tuple[str, Mapping[str, str]]]
    module: ModuleType  # that makes it
    also: str = ""  # other words by which the search finds it
    invitation: str = ""  # what its button at the top of the index says


TOOL_PAGES = (
    ToolPage(
        collectives_atlas_page.ADDRESS,
        collectives_atlas_page.TITLE,
        "Play recorded runs of all collectives and algorithms, two side by side.",
        collectives_atlas_page.collectives_atlas,
        collectives_atlas_page,
        "watch animation compare",
        "Play with an all-reduce",
    ),
    ToolPage(
        schedule_builder_page.ADDRESS,
        schedule_builder_page.TITLE,
        "Order the work of a pipeline by hand, and compare your schedule with published ones.",
        lambda: (schedule_builder_page.schedule_builder_page(), {}),
        schedule_builder_page,
        "pipeline schedules zero bubble editor",
    ),
    ToolPage(
        memory_page.ADDRESS,
        memory_page.TITLE,
        "Choose a model, GPUs and a layout, and see what fills the memory of each GPU.",
        lambda: (memory_page.memory_page(), {}),
        memory_page,
        "how much GPU memory do I need, out of memory, OOM, calculator, does my model fit",
        "Does my model fit?",
    ),
)
