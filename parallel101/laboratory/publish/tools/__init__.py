"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and others. What they are fed with is computed when the page is written.

A new tool is one more module in TOOLS, with PAGE, which the index lists, and files(), which returns
the page and what it loads: text by path in the site.
"""

from __future__ import annotations

from parallel101.extras import needs_extra

with needs_extra("A page that plays"):
    from parallel101.laboratory.publish.tools import (
        collectives_atlas_page,
        memory_page,
        schedule_builder_page,
    )

TOOLS = (collectives_atlas_page, schedule_builder_page, memory_page)
