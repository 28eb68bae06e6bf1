"""parallel101: run parallel training programs on several ranks, record and draw what happened.

import torch

import parallel101 as p101

run = p101.launch(lambda: p101.all_reduce(torch.ones(4)), world_size=4, trace=True)
run.results, run.animate()
"""

import ast
import inspect
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from parallel101.laboratory.record.ipython import in_notebook

__version__ = "0.2.0"

# torch says so when it is imported; nothing in the core needs NumPy, and doctor says what does
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

if TYPE_CHECKING:  # the public names; each is imported when it is first used
    from parallel101 import cost, keras, layers, models, sharding
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
    from parallel101.laboratory.analysis.traffic import axis_traffic
    from parallel101.laboratory.grade.learner import check, hint, predict
    from parallel101.laboratory.planner.known_models import shape_of_model
    from parallel101.laboratory.planner.published import published_errors
    from parallel101.laboratory.planner.search import plan
    from parallel101.laboratory.planner.simulated_step import simulate_step
    from parallel101.laboratory.publish.tools.in_notebook import explore_memory, explore_schedule
    from parallel101.laboratory.ranks.launch import Run, launch
    from parallel101.laboratory.record.errors import (
        DeadlockError,
        LaunchTimeout,
        MisuseError,
        RankFailed,
    )
    from parallel101.laboratory.record.events import Event, Message
    from parallel101.laboratory.record.trace import Trace
    from parallel101.laboratory.record.units import decimal_bytes
    from parallel101.laboratory.sim.network import Network
    from parallel101.laboratory.viz.axis_timeline import axes_scene
    from parallel101.laboratory.viz.explore import explore_collective
    from parallel101.laboratory.viz.forward_backward import forward_backward_scene
    from parallel101.laboratory.viz.loss_curves import LiveLoss, loss_scene
    from parallel101.laboratory.viz.matrices import matrices_scene
    from parallel101.laboratory.viz.memory_over_step import activations_scene
    from parallel101.laboratory.viz.memory_per_rank import memory_scene
    from parallel101.laboratory.viz.node_links import node_scene
    from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene
    from parallel101.laboratory.viz.plots import bandwidth, sweep
    from parallel101.laboratory.viz.timeline import lanes_scene
    from parallel101.laboratory.viz.watch import watch
    from parallel101.mesh import split_sizes
    from parallel101.spans import compute, span
    from parallel101.trainers.context.time_layout import context_positions
    from parallel101.trainers.context.ulysses import ulysses_attention
    from parallel101.trainers.context_parallel import ring_attention
    from parallel101.trainers.expert_parallel import experts_over_ranks
    from parallel101.trainers.hybrid import HybridTrainer
    from parallel101.trainers.memory import count_activations
    from parallel101.trainers.one_axis import (
        DataParallelTrainer,
        PipelineTrainer,
        ShardedTrainer,
        TensorParallelTrainer,
    )
    from parallel101.trainers.schedules.actions import ScheduleError
    from parallel101.trainers.schedules.schedule import Schedule, schedule
    from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
    from parallel101.trainers.tensor.plan import column
    from parallel101.trainers.verify.report import NotEqualError
    from parallel101.trainers.weight_gradients import WeightGradients


def _public_names() -> dict[str, str]:
    """Name → module, from the imports above, which do not run.

    So `import parallel101` takes milliseconds, and `parallel101 doctor` runs where torch is
    missing, while type checkers and editors read ordinary imports.
    """
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    return {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.col_offset > 0  # inside of that block
        for alias in node.names
    }


_module_of = _public_names()
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
    return ["__version__", *_module_of]  # what a reader may complete, without our own imports


# the fork server imports torch while the reader reads on: the first launch needs it
if in_notebook() and find_spec("torch") is not None:
    import_module("parallel101.laboratory.ranks.processes").preload([])
