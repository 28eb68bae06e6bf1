"""parallel101: run parallel training programs on several ranks, record and draw what happened.

import torch

import parallel101 as p101

run = p101.launch(lambda: p101.all_reduce(torch.ones(4)), world_size=4, trace=True)
run.results, run.animate()
"""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from parallel101.record.ipython import in_notebook

__version__ = "0.1.0"


@contextmanager
def _imported_when_used() -> Iterator[dict[str, str]]:
    """Inside, this file's `from module import name` imports nothing. It notes name → module.

    So `import parallel101` takes milliseconds, `parallel101 doctor` runs where torch is missing,
    and type checkers and editors still read ordinary imports.
    """
    module_of: dict[str, str] = {}
    real_import = builtins.__import__

    def note(module: str, *args: Any, **named: Any) -> Any:
        if not args or args[0] is not globals():  # meanwhile, another thread imports something
            return real_import(module, *args, **named)
        names = args[2]
        module_of.update(dict.fromkeys(names, module))
        return SimpleNamespace(**dict.fromkeys(names))

    builtins.__import__ = note  # type: ignore[assignment]
    try:
        yield module_of
    finally:
        builtins.__import__ = real_import
    for name in module_of:
        del globals()[name]


with _imported_when_used() as _module_of:
    from parallel101 import cost, keras, layers, models, sharding
    from parallel101.analysis.axis_traffic import axis_traffic
    from parallel101.autograd import (
        algorithms,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        copy_to_group,
        gather,
        gather_from_group,
        receive,
        reduce,
        reduce_from_group,
        reduce_scatter,
        scatter,
        scatter_to_group,
        send,
    )
    from parallel101.collectives.asynchronous import (
        all_gather_async,
        all_reduce_async,
        reduce_scatter_async,
    )
    from parallel101.mesh import split_sizes
    from parallel101.ranks.launch import Run, launch
    from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed
    from parallel101.record.events import Event, Message
    from parallel101.record.spans import compute, span
    from parallel101.record.trace import Trace
    from parallel101.sim.network import Network
    from parallel101.trainers.hybrid import HybridTrainer
    from parallel101.trainers.one_axis import (
        DataParallelTrainer,
        PipelineTrainer,
        ShardedTrainer,
        TensorParallelTrainer,
    )
    from parallel101.trainers.schedules.actions import ScheduleError
    from parallel101.trainers.schedules.schedule import Schedule, schedule
    from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
    from parallel101.trainers.tensor.styles import column
    from parallel101.trainers.verify.report import NotEqualError
    from parallel101.trainers.weight_gradients import WeightGradients
    from parallel101.viz.axis_timeline import axes_scene
    from parallel101.viz.explore import explore_collective, explore_memory, explore_schedule
    from parallel101.viz.forward_backward import forward_backward_scene
    from parallel101.viz.lanes import lanes_scene
    from parallel101.viz.loss_curves import LiveLoss, loss_scene
    from parallel101.viz.matrices import matrices_scene
    from parallel101.viz.memory_per_rank import memory_scene
    from parallel101.viz.pipeline_timeline import pipeline_scene
    from parallel101.viz.plots import bandwidth, sweep
    from parallel101.viz.watch import watch

# not the modules: keras needs Keras
__all__ = sorted(name for name, module in _module_of.items() if module != __name__)


def __getattr__(name: str) -> Any:
    if name not in _module_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _module_of[name]
    if module == __name__:
        return import_module(f"{module}.{name}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_module_of]


# the fork server imports torch while the reader reads on: the first launch needs it
if in_notebook() and find_spec("torch") is not None:
    import_module("parallel101.ranks.processes").preload([])
