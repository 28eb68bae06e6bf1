"""parallel101: see how neural networks are trained on many machines, on ranks that really run.

    import parallel101 as p101
    run = p101.launch(lambda: p101.all_reduce(torch.ones(4)), world_size=4)
"""

from parallel101.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed
from parallel101.ranks.launch import launch
from parallel101.ranks.run import Run
from parallel101.trace.events import Event, Message, Trace
from parallel101.trace.spans import compute, span

__version__ = "0.1.0"
