"""An explorer: controls, a prediction, and the result beside it. Each change runs a program again.

explorer.py             controls, a prediction, a table and a picture
collective_explorer.py  runs a collective, or a function of the reader's own, and draws its record
"""

from parallel101.extras import needs_extra

with needs_extra("An explorer"):
    from parallel101.laboratory.viz.explore.collective_explorer import explore_collective
    from parallel101.laboratory.viz.explore.explorer import Explorer

__all__ = ["Explorer", "explore_collective"]
