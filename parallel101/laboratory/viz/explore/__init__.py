"""Explorers: controls, a prediction, and the result beside it.

Each change runs the program or the formula again.

explorer.py             what all explorers have: controls, a prediction, a table and a picture
collective_explorer.py  runs a collective, and draws its record
schedule_explorer.py    times a pipeline schedule
memory_explorer.py      bytes of weights, gradients and optimizer state
prediction.py           whether a prediction is right
"""

from parallel101.extras import needs_extra

with needs_extra("An explorer"):
    from parallel101.laboratory.viz.explore.collective_explorer import explore_collective
    from parallel101.laboratory.viz.explore.explorer import Explorer
    from parallel101.laboratory.viz.explore.memory_explorer import explore_memory
    from parallel101.laboratory.viz.explore.schedule_explorer import explore_schedule

__all__ = ["Explorer", "explore_collective", "explore_memory", "explore_schedule"]
