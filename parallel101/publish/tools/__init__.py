"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and others. What they are fed with is computed when the page is written.

A new tool is one more line in TOOLS. `parallel101 lessons` writes its page, and the index lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from parallel101.publish.tools import memory_page, schedule_builder_page


class Tool(NamedTuple):
    """A page that plays in the browser."""

    address: str  # of its page
    title: str
    text: str  # what the reader does there, in a sentence
    body: Callable[[], str]  # of its page
    files: Callable[[], Mapping[str, str]] = dict  # what the page loads: text by path in the site


TOOLS = (
    Tool(
        schedule_builder_page.ADDRESS,
        schedule_builder_page.TITLE,
        "Order the work of a pipeline by hand, and compare your schedule with published ones.",
        schedule_builder_page.schedule_builder_page,
    ),
    Tool(
        memory_page.ADDRESS,
        memory_page.TITLE,
        "Choose a model, GPUs and a layout, and see what fills the memory of each GPU.",
        memory_page.memory_page,
    ),
)
