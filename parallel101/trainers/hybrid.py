"""Every way to train a model on many ranks: one Trainer, put together from the axes of a mesh.

    dp   each position has a share of the batch            gradients.py, zero/
    tp   each has a block of every matrix                  tensor/
    pp   each has some of the layers                       pipeline/, schedules/

    mesh (dp 2, tp 2, pp 2), row by row: rank 5 is at dp 1, tp 0, pp 1

The other trainers are this one on a single axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.collectives.comm import comm_of
from parallel101.mesh import Group, GroupLike, group_of
from parallel101.trainers.gradient_sync import GradientSync, Parameters
from parallel101.trainers.layout import Axes
from parallel101.trainers.one_axis import replicated
from parallel101.trainers.pipeline.split import cut_points, names_by_stage
from parallel101.trainers.prepare import MakeSync
from parallel101.trainers.schedules.schedule import Schedule, schedule_for
from parallel101.trainers.sharded import sharded
from parallel101.trainers.support.arguments import (
    LossFn,
    OptimizerFn,
    check_accumulate,
    check_model,
)
from parallel101.trainers.tensor.plan import Plan
from parallel101.trainers.trainer import Trainer

AXES = ("dp", "tp", "pp")


class HybridTrainer(Trainer):
    """Trains one model on a mesh of ranks with up to three axes; equal to one process with the
    whole batch.

    Args: model, loss_fn, optimizer, clip_norm, autocast, sync, sync_batch_norm, verify: see
        `Trainer`. mesh: a DeviceMesh whose axes are named out of "dp", "tp" and "pp", in any order.
        zero_stage: 0: every position along dp has all of its stage's and shard's weights; 1, 2, 3:
        see `ShardedTrainer`. overlap, bucket_bytes, layers: how gradients are synchronised along
        dp; see `DataParallelTrainer` and `ShardedTrainer`. plan, sequence_parallel: how modules are
        cut along tp; see `TensorParallelTrainer`. schedule, microbatches, chunks, layers_per_stage:
        how the model is cut along pp, and what runs when; see `PipelineTrainer`. accumulate:
        microbatches in a step, without pp. With pp, `microbatches` are the accumulation.

    Ranks that differ only along tp or pp are given the same samples; `share` cuts a batch along dp
    alone. Raises ValueError, the same on every rank, for a mesh with other axes, or a model that
    can't be cut as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        mesh: DeviceMesh,
        zero_stage: int = 0,
        overlap: bool = True,
        bucket_bytes: int | None = None,
        layers: Sequence[type[nn.Module]] | None = None,
        plan: Plan | None = "auto",
        sequence_parallel: bool = False,
        schedule: str | Schedule = "1f1b",
        microbatches: int | None = None,
        chunks: int = 1,
        layers_per_stage: Sequence[int] | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        sync: bool = False,
        sync_batch_norm: bool = False,
        verify: bool = True,
    ):
        axes = Axes(mesh, axis_sizes(mesh))
        for axis, what, given in (
            ("tp", "plan", plan if plan != "auto" else None),
            ("tp", "sequence_parallel", sequence_parallel or None),
            ("pp", "layers_per_stage", layers_per_stage),
        ):
            if given is not None and axis not in axes.sizes:
                raise ValueError(
                    f"{what}={given!r} is for the axis {axis!r}, and the mesh has "
                    f"{', '.join(axes.sizes)}: add the axis, or leave it out"
                )
        chosen = choose_schedule(axes, model, schedule, microbatches, chunks, accumulate)
        if zero_stage == 3:
            check_untied(model, chosen, layers_per_stage)
        super().__init__(
            model,
            loss_fn,
            optimizer,
            axes=axes,
            make_sync=synchronise(
                zero_stage, overlap, bucket_bytes, layers, autocast, goes_on=not sync_batch_norm
            ),
            schedule=chosen,
            plan=plan if "tp" in axes.sizes else None,
            sequence_parallel=sequence_parallel,
            layers_per_stage=layers_per_stage,
            clip_norm=clip_norm,
            autocast=autocast,
            sync=sync,
            sync_batch_norm=sync_batch_norm,
            verify=verify,
        )


class TensorParallelTrainer(Trainer):
    """Trains one model on all ranks of a group, each of which has a block of every matrix; equal to
    one process.

    Args: model, loss_fn, optimizer, clip_norm, autocast, sync, verify: see `Trainer`. A model whose
        head is cut ("vocabulary") needs
            loss_fn=vocabulary_cross_entropy.
        group: the ranks that train together; see `group_of`. All are given the same samples.
        plan: name of a module → style, `*` for any part of a name; what no name matches is
            replicated. "auto": from the model's structure.
            "column": the outputs are cut, and backward sums the inputs' gradients. "row": the
            inputs are cut, and forward sums the outputs.
            "column_gather": the outputs are cut and then gathered. "vocabulary": an embedding's
            rows, or the head's columns.
            `column(parts=3, heads=h)`: a fused query, key and value, cut by heads.
            `column(heads="num_heads")`: so many as that
            attribute of the module around says, and its code counts them.
        sequence_parallel: between a row layer and the next column layer, cut activations (batch,
            time, features) along time. All modules there must act on each position alone.
        accumulate: microbatches in a step.

    An MLP pair sends one all-reduce of the activations forward and one backward. Sources: Shoeybi
    et al., "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198),
    section 4.2.2. Raises ValueError, on every rank, for a plan that does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        plan: Plan = "auto",
        sequence_parallel: bool = False,
        accumulate: int = 1,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        sync: bool = False,
        verify: bool = True,
    ):
        axes = Axes(group, {"dp": 1, "tp": group_of(group).size})
        super().__init__(
            model,
            loss_fn,
            optimizer,
            axes=axes,
            make_sync=synchronise(),
            schedule=choose_schedule(axes, model, accumulate=accumulate),
            plan=plan,
            sequence_parallel=sequence_parallel,
            clip_norm=clip_norm,
            autocast=autocast,
            sync=sync,
            verify=verify,
        )


class PipelineTrainer(Trainer):
    """Trains one model on all ranks of a group, each of which has some of the layers; equal to one
    process.

    Args: model: an nn.Sequential, or one with a method `.sequence()`: modules in order, whose
        composition is its forward. loss_fn, optimizer, clip_norm, autocast, sync, verify: see
        `Trainer`. group: the ranks that train together; see `group_of`. All are given the same
        samples: the first stage reads the inputs, the last one
            the targets.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2" or a Schedule.
        microbatches: how many in a step; a batch has at least as many samples. None: the
            schedule's, or one for each rank.
        chunks: stages on each rank, for "interleaved".
        layers_per_stage: how many modules of the sequence each stage has. None: as many modules
            with parameters as the other stages;
            a module without any goes with the one before it.

    Activations travel to the next stage and their gradients back, each once a microbatch. A tied
    weight lies on each stage that uses it, and its gradients are summed. Sources: Huang et al.,
    "GPipe" (2019); Narayanan et al. (arXiv 2104.04473), section 2.2; Qi et al. (arXiv 2401.10241).
    Raises ValueError, on every rank, for a model that can't be cut, and ScheduleError for a
    schedule that can't run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        schedule: str | Schedule = "1f1b",
        microbatches: int | None = None,
        chunks: int = 1,
        layers_per_stage: Sequence[int] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        sync: bool = False,
        verify: bool = True,
    ):
        axes = Axes(group, {"dp": 1, "pp": group_of(group).size})
        super().__init__(
            model,
            loss_fn,
            optimizer,
            axes=axes,
            make_sync=synchronise(),
            schedule=choose_schedule(axes, model, schedule, microbatches, chunks),
            layers_per_stage=layers_per_stage,
            clip_norm=clip_norm,
            autocast=autocast,
            sync=sync,
            verify=verify,
        )


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Name of an axis → its size; dp is always there.

    Raises TypeError or ValueError for other meshes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: expected a DeviceMesh with named axes, such as "
            'init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))'
        )
    names = tuple(mesh.mesh_dim_names or ())
    if not names or not set(names) <= set(AXES):
        have = f"a mesh with the axes {names}" if names else "a mesh whose axes have no names"
        raise ValueError(f"{have}: expected names out of {', '.join(AXES)} (mesh_dim_names=…)")
    return (
        {"dp": 1} | dict(zip(names, mesh.mesh.shape))
        if "dp" not in names
        else dict(zip(names, mesh.mesh.shape))
    )


def synchronise(
    zero_stage: int = 0,
    overlap: bool = True,
    bucket_bytes: int | None = None,
    layers: Sequence[type[nn.Module]] | None = None,
    autocast: torch.dtype | None = None,
    goes_on: bool = True,
) -> MakeSync:
    """How the gradients of a stage are synchronised along dp."""
    make = (
        sharded(zero_stage, overlap, bucket_bytes, layers, autocast, goes_on)
        if zero_stage
        else replicated(overlap, bucket_bytes)
    )

    def make_sync(
        part: nn.Module | None, parameters: Parameters, group: Group, apart: Mapping[str, str]
    ) -> GradientSync:
        return (
            make(part, parameters, group, apart)
            if zero_stage or group.size > 1
            else GradientSync(parameters)
        )

    return make_sync


def choose_schedule(
    axes: Axes,
    model: nn.Module,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    chunks: int = 1,
    accumulate: int = 1,
) -> Schedule:
    """What runs when. Raises ValueError or ScheduleError for what can't run on these ranks."""
    stages = axes.sizes.get("pp", 1)
    if "pp" not in axes.sizes:
        if microbatches is not None or chunks != 1 or schedule != "1f1b":
            raise ValueError(
                "schedule, microbatches and chunks are a pipeline's, and the mesh has no axis "
                "pp: use accumulate, or add pp"
            )
        return schedule_for("1f1b", 1, check_accumulate(accumulate), 1)
    if check_accumulate(accumulate) != 1:
        raise ValueError(
            f"accumulate={accumulate}: a pipeline's microbatches are the accumulation; say "
            f"microbatches={accumulate}"
        )
    chosen = schedule_for(schedule, stages, microbatches, chunks)
    batched = comm_of(axes.along(["pp"]), check_model(model), "pipeline").batched
    chosen.check("nccl" if batched else "gloo")
    return chosen


def check_untied(
    model: nn.Module, schedule: Schedule, layers_per_stage: Sequence[int] | None
) -> None:
    """Raises ValueError if a weight is tied between two stages on one rank: ZeRO-3 gathers
    weights stage by stage.
    """
    placement = schedule.placement
    if len(placement) > 1:
        names_of_stages = names_by_stage(model, cut_points(model, len(placement), layers_per_stage))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        on_rank: set[tuple[int, str]] = set()
        for stage, names in enumerate(names_of_stages):
            for name in names:
                if name in trained and (placement[stage], name) in on_rank:
                    raise ValueError(
                        f"{name!r} is tied between two stages on one rank, and zero_stage=3 "
                        "gathers weights stage by stage: "
                        "expected a schedule with such stages on two ranks, an untied model, "
                        "or zero_stage=2"
                    )
                on_rank.add((placement[stage], name))
