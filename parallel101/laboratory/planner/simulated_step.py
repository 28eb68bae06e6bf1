"""A training step of a layout, run by the trainer itself on virtual GPUs.

    simulate_step(shape, layout, cluster)   the step that follows the first one

Most ranks do the same at the same time, so one stands for them: the first of each stage of the
pipeline and of each position along ep has a thread, and the others along dp, cp and tp are
mirrored (sim/mirrored.py). Ranks along ep tell each other how many rows they send.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel101 import models
from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.played_microbatches import replay
from parallel101.laboratory.planner.trainer_call import (
    mesh_of,
    model_of,
    trainer_options,
)
from parallel101.laboratory.ranks.launch import Run, launch
from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.virtual_gpu import VirtualGPU
from parallel101.spans import recorder
from parallel101.trainers.hybrid import HybridTrainer
from parallel101.trainers.layout import Axes
from parallel101.trainers.tensor.loss import vocabulary_cross_entropy

STEPS = 2  # the first announces shapes and makes the optimizer's state; the second is timed


@dataclass(frozen=True)
class SimulatedStep:
    """The measurements of a step on virtual GPUs.

    Attributes:
        seconds: from the end of the step before, on the slowest rank, to its own end.
        peak_bytes: on a rank of each stage of the pipeline.
        mfu, hfu: model and hardware FLOPs utilization, see cost/step_time.py.
        run: the run, with its record.
        wall_seconds: that the simulation took.
    """

    seconds: float
    peak_bytes: tuple[int, ...]
    mfu: float
    hfu: float
    run: Run = field(repr=False)
    wall_seconds: float


def simulate_step(
    shape: ModelShape,
    layout: ParallelLayout,
    cluster: Cluster,
    *,
    full: bool = False,
    trace: bool = False,
    network: Network | None = None,
    played: bool | None = None,
    **options: Any,
) -> SimulatedStep:
    """Run a step of this model and layout on virtual GPUs.

    Args:
        full: run every rank, and every microbatch.
        trace: record the run, for pictures. A full one is always recorded.
        network: instead of the cluster's.
        played: whether most microbatches are played from the first ones
            (played_microbatches.py); None: unless `full`.
        options: of HybridTrainer, in addition to the layout's: clip_norm.
    """
    began = time.perf_counter()
    sizes = mesh_of(layout)
    mirrors = None if full else MirroredAxes(sizes, tuple({*sizes} - {"pp", "ep"}))
    run = launch(
        program,
        shape,
        layout,
        options,
        not full if played is None else played,
        world_size=layout.gpus,
        backend="sim",
        device=cluster.chip.name,
        network=network or Network.two_level(**cluster.network_arguments()),
        mirrors=mirrors,
        trace=trace,
        timeout=3600.0,
    )
    ends = [max(of_ranks) for of_ranks in zip(*(ends for ends, _ in run.results), strict=True)]
    seconds = ends[-1] - ends[-2]
    each = len(run.results) // layout.pp
    peaks = [peak for _, peak in run.results]
    quick = step_time(shape, layout, cluster)
    return SimulatedStep(
        seconds=seconds,
        peak_bytes=tuple(max(peaks[i * each : (i + 1) * each]) for i in range(layout.pp)),
        mfu=quick.mfu * quick.seconds / seconds,
        hfu=quick.hfu * quick.seconds / seconds,
        run=run,
        wall_seconds=time.perf_counter() - began,
    )


def program(
    shape: ModelShape, layout: ParallelLayout, options: dict[str, Any], played: bool
) -> tuple[list[float], int]:
    """Run one rank's steps, and return when they ended and the peak bytes since the first began."""
    rank: Any = recorder()
    gpu = next(mode for mode in torch_private.dispatch_modes() if isinstance(mode, VirtualGPU))
    trainer = HybridTrainer(
        model_of(shape),
        models.balanced_next_token_loss if shape.experts else vocabulary_cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        mesh=Axes(None, mesh_of(layout)),
        verify=False,
        **trainer_options(shape, layout) | options,
    )
    if played:
        replay(trainer, rank, gpu)
    gpu.peak = gpu.live  # building the whole model doesn't count
    tokens = torch.zeros(
        layout.microbatch * layout.microbatches, shape.time, dtype=torch.long, device="meta"
    )
    ends = []
    for _ in range(STEPS):
        trainer.step(tokens, tokens)
        ends.append(rank.now())
    return ends, gpu.peak
