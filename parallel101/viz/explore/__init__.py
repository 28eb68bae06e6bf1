"""Explorers: controls, a prediction, and the result beside it.

Each change runs the program or the formula again.

explorer.py      what all explorers are: controls, a prediction, a table and a picture
collectives.py   a collective runs, and its record is drawn            schedules.py   a pipeline schedule is timed
memory.py        bytes of weights, gradients and optimizer state     prediction.py   whether a prediction is right
"""

from parallel101.viz.explore.collectives import explore_collective
from parallel101.viz.explore.explorer import Explorer
from parallel101.viz.explore.memory import explore_memory
from parallel101.viz.explore.schedules import explore_schedule

__all__ = ["Explorer", "explore_collective", "explore_memory", "explore_schedule"]
