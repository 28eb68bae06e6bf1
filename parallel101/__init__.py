"""parallel101: run parallel training programs on several ranks, record and draw what happened.

import torch

import parallel101 as p101

run = p101.launch(lambda: p101.all_reduce(torch.ones(4)), world_size=4, trace=True)
run.results, run.animate()
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel101 import cost, keras, layers, sharding
    from parallel101.autograd import (
        algorithms,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from parallel101.autograd.point_to_point import receive, send
    from parallel101.autograd.replicated import (
        copy_to_group,
        gather_from_group,
        reduce_from_group,
        scatter_to_group,
    )
    from parallel101.mesh import split_sizes
    from parallel101.ranks.launch import Run, launch
    from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed
    from parallel101.record.events import Event, Message
    from parallel101.record.spans import compute, span
    from parallel101.record.trace import Trace
    from parallel101.sim.network import Network
    from parallel101.trainers.hybrid import HybridTrainer, PipelineTrainer, TensorParallelTrainer
    from parallel101.trainers.one_axis import DataParallelTrainer
    from parallel101.trainers.schedules.actions import ScheduleError
    from parallel101.trainers.schedules.schedule import Schedule, schedule
    from parallel101.trainers.sharded import ShardedTrainer
    from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
    from parallel101.trainers.tensor.styles import column
    from parallel101.trainers.trainer import Trainer
    from parallel101.trainers.verify.report import NotEqualError
    from parallel101.viz.watch import watch
from parallel101.record.notebook import in_notebook

__version__ = "0.1.0"

_WHERE = {
    "parallel101.autograd": (
        "algorithms all_gather all_reduce all_to_all barrier broadcast gather reduce "
        "reduce_scatter scatter"
    ),
    "parallel101.sim.network": "Network",
    "parallel101.record.errors": "DeadlockError LaunchTimeout MisuseError RankFailed",
    "parallel101.mesh": "split_sizes",
    "parallel101.trainers.one_axis": "DataParallelTrainer",
    "parallel101.trainers.hybrid": "HybridTrainer PipelineTrainer TensorParallelTrainer",
    "parallel101.trainers.sharded": "ShardedTrainer",
    "parallel101.trainers.schedules.actions": "ScheduleError",
    "parallel101.trainers.schedules.schedule": "Schedule schedule",
    "parallel101.trainers.tensor.loss": "vocabulary_cross_entropy",
    "parallel101.trainers.tensor.styles": "column",
    "parallel101.trainers.trainer": "Trainer",
    "parallel101.trainers.verify.report": "NotEqualError",
    "parallel101.autograd.point_to_point": "receive send",
    "parallel101.ranks.launch": "Run launch",
    "parallel101.autograd.replicated": "copy_to_group gather_from_group reduce_from_group scatter_to_group",
    "parallel101.record.events": "Event Message",
    "parallel101.record.trace": "Trace",
    "parallel101.record.spans": "compute span",
    "parallel101.viz.watch": "watch",
}
_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}
_MODULES = ("cost", "keras", "layers", "sharding")  # not in __all__: keras needs Keras
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, because `parallel101 doctor` must also run where
    torch is missing.
    """
    if name in _MODULES:
        return import_module(f"parallel101.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'parallel101' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_MODULES]


# the fork server imports torch while the reader reads on: the first launch needs it
if in_notebook() and find_spec("torch") is not None:
    import_module("parallel101.ranks.processes").preload([])
