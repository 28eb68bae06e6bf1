"""Predicted cost: steps, bytes, memory and seconds, in closed form.

Nothing here runs or measures a program.

closed_forms.py    steps and bytes of each algorithm on a switch, rings, a torus and nodes: exactly
                   those of a run on the simulator; bytes of ring attention and Ulysses
times.py           seconds of all-gather, reduce-scatter, all-reduce and all-to-all on TPUs and
                   GPUs, and of a local matrix product
layer_activations.py   bytes of a transformer layer's activations, with tp and recomputation
model_states.py    bytes of weights, gradients and optimizer state on each rank, with ZeRO
hardware.py        the public figures with which these compute

A step of training, for the planner:
model_shape.py, parallel_layout.py, software.py     what is trained, and how; operations of a step
cluster.py         the GPUs, and seconds of a collective along an axis of a layout
kernels.py         seconds of one kernel; virtual GPUs compute with the same
layer_seconds.py   the kernels and messages of a layer, and their seconds
update_seconds.py  seconds from gradients to new weights: accumulation, dp, optimizer
step_time.py       seconds of a step by part
step_memory.py     peak bytes of a step on each rank along pp
"""

from parallel101.collectives.segments import best_segments
from parallel101.cost.closed_forms import (
    AttentionBytes,
    AttentionShape,
    Cost,
    TwoLevelCost,
    closed_form,
    ring_attention_bytes,
    torus_form,
    two_level_form,
    ulysses_bytes,
)
from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import CHIPS, Chip, KernelFigures, Level, Torus
from parallel101.cost.layer_activations import (
    LayerShape,
    kept_by_our_gpt,
    layer_activations,
)
from parallel101.cost.model_shape import ModelShape, hardware_flops, model_flops
from parallel101.cost.model_states import PRECISIONS, ModelStates, model_states
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import MEGATRON_2021, TRAINERS, Software
from parallel101.cost.step_memory import StageMemory, step_memory
from parallel101.cost.step_time import StepTime, step_time
from parallel101.cost.times import (
    Time,
    all_gather,
    all_reduce,
    all_to_all,
    matmul,
    reduce_scatter,
)

__all__ = ["Cost", "TwoLevelCost", "best_segments", "closed_form", "torus_form", "two_level_form"]
__all__ += ["AttentionBytes", "AttentionShape", "ring_attention_bytes", "ulysses_bytes"]
__all__ += ["Time", "all_gather", "all_reduce", "all_to_all", "matmul", "reduce_scatter"]
__all__ += ["CHIPS", "Chip", "KernelFigures", "Level", "Torus"]
__all__ += ["LayerShape", "kept_by_our_gpt", "layer_activations"]
__all__ += ["PRECISIONS", "ModelStates", "model_states"]
__all__ += ["ModelShape", "ParallelLayout", "hardware_flops", "model_flops"]
__all__ += ["MEGATRON_2021", "TRAINERS", "Cluster", "Software"]
__all__ += ["StageMemory", "StepTime", "step_memory", "step_time"]
