"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and others. What they are fed with is computed when the page is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parallel101.publish.tools import memory_page, schedule_builder_page


class ToolPage(NamedTuple):
    """A page that `parallel101 lessons` writes beside the lessons."""

    address: str
    title: str
    body: Callable[[], str]


TOOL_PAGES = (
    ToolPage(
        schedule_builder_page.ADDRESS,
        schedule_builder_page.TITLE,
        schedule_builder_page.schedule_builder_page,
    ),
    ToolPage(memory_page.ADDRESS, memory_page.TITLE, memory_page.memory_page),
)
