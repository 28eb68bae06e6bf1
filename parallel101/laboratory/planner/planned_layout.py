"""A plan: the best layouts, what each costs, and why others were refused.

plan = p101.plan("llama-3-70b", gpus=1024, device="H100")
plan                            # in a notebook: a picture; print(plan) shows tables
plan.best.seconds, plan.best.mfu, plan.best.memory[0].total
plan.best.call                  # the HybridTrainer that has this layout, as text
plan.why_not                    # what was refused, and why
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import OWN_RING
from parallel101.cost.step_memory import StageMemory
from parallel101.cost.step_time import StepTime, step_time
from parallel101.laboratory.planner.trainer_call import (
    call_text,
    mesh_of,
    trainer_options,
)
from parallel101.trainers.hybrid import HybridTrainer

if TYPE_CHECKING:
    from parallel101.laboratory.planner.simulated_step import SimulatedStep


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, and what a step with it costs.

    Attributes:
        time: the quick model's, see cost/step_time.py: also its range, the HFU and what limits it.
        memory: peak bytes on each rank along pp, see cost/step_memory.py.
        simulated: the step on virtual GPUs; None if it was not run.
        not_simulated: why the run failed, if it did.
        shape, layout, cluster, seconds, parts, mfu, tokens_per_second: those of `time`. Of
            communication, only what nothing hides counts.
    """

    time: StepTime
    memory: tuple[StageMemory, ...]
    simulated: SimulatedStep | None = None
    not_simulated: str = ""

    shape = property(lambda self: self.time.shape)
    layout = property(lambda self: self.time.layout)
    cluster = property(lambda self: self.time.cluster)
    seconds = property(lambda self: self.time.seconds)
    parts = property(lambda self: self.time.parts)
    mfu = property(lambda self: self.time.mfu)
    tokens_per_second = property(lambda self: self.time.tokens_per_second)

    @property
    def most(self) -> float:
        """The bytes on the fullest GPU."""
        return most_of(self.memory)

    @property
    def headroom(self) -> float:
        """The bytes that are left on the fullest GPU."""
        return self.cluster.memory_bytes - self.most

    @property
    def own_seconds(self) -> float:
        """The seconds of a step with HybridTrainer's own ring attention, as virtual GPUs run it."""
        return step_time(self.shape, self.layout, self.cluster, software=OWN_RING).seconds

    @property
    def difference(self) -> float | None:
        """The simulated step over `own_seconds`, minus one; None if it was not run."""
        return self.simulated.seconds / self.own_seconds - 1 if self.simulated else None

    @property
    def call(self) -> str:
        """The lines that build the model and its HybridTrainer on each rank.

        Raises ValueError if this package has no model of that shape.
        """
        return call_text(self.shape, self.layout)

    def trainer(
        self, model: Any, loss_fn: Any, optimizer: Callable[..., Any], **others: Any
    ) -> HybridTrainer:
        """Return the HybridTrainer of this layout. Every rank calls it.

        Args:
            model, loss_fn, optimizer: as HybridTrainer takes them.
            others: more of its options, such as clip_norm.

        Raises ValueError if the number of ranks is another.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.layout.gpus:
            raise ValueError(
                f"the layout is for {self.layout.gpus:,} GPUs, and there are {ranks:,} ranks: "
                "expected as many. Plan again with this number of GPUs"
            )
        sizes = mesh_of(self.layout)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        options = trainer_options(self.shape, self.layout) | others
        return HybridTrainer(model, loss_fn, optimizer, mesh=mesh, **options)


def most_of(memory: tuple[StageMemory, ...]) -> float:
    return max(stage.total for stage in memory)


@dataclass(frozen=True)
class WhyNot:
    """A reason why layouts were refused: `count` meshes, or layouts of the other meshes."""

    reason: str
    count: int
    of: str  # "meshes" or "layouts"
    example: ParallelLayout


@dataclass(frozen=True)
class RankedLayouts:
    """The best layouts, fastest first. They can be indexed and iterated over.

    Attributes:
        shape, cluster, batch: what was planned for; batch in samples.
        layouts: of each mesh the best; see `plan`.
        tried: how many layouts were compared.
        why_not: why others were refused, most of them first.
        fixed: what the user fixed of the layout.
    """

    shape: ModelShape
    cluster: Cluster
    batch: int
    layouts: tuple[PlannedLayout, ...]
    tried: int
    why_not: tuple[WhyNot, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model in words."""
        return self.shape.name or "The model"

    @property
    def gpus(self) -> str:
        """The GPUs in words, such as "1,024 H100s"."""
        return f"{self.cluster.gpus:,} {self.cluster.chip.name}{'s' * (self.cluster.gpus > 1)}"

    @property
    def best(self) -> PlannedLayout:
        return self.layouts[0]

    def __iter__(self) -> Iterator[PlannedLayout]:
        return iter(self.layouts)

    def __getitem__(self, index: int) -> PlannedLayout:
        return self.layouts[index]

    def __len__(self) -> int:
        return len(self.layouts)


def fixed_words(plan: RankedLayouts) -> str:
    """Return what is fixed, such as " with tp=8, recompute=full"; "" for nothing."""
    fixed = ", ".join(f"{key}={value}" for key, value in plan.fixed.items())
    return f" with {fixed}" if fixed else ""


def layout_text(layout: ParallelLayout) -> str:
    """Return a layout in one line: "dp 16 · tp 8 · microbatch 1 × 32 · 2 chunks · ZeRO 1"."""
    return " · ".join(layout_words(layout))


def layout_words(layout: ParallelLayout) -> tuple[str, str]:
    """Return a layout's axes, and its other options, as text."""
    axes = [f"{a} {n}" for a in ("dp", "tp", "pp", "cp", "ep") if (n := getattr(layout, a)) > 1]
    words = [f"microbatch {layout.microbatch} × {layout.microbatches}"]
    words += [f"{layout.chunks} chunks"] * (layout.chunks > 1)
    words += [f"{layout.schedule}"] * (layout.schedule not in ("1f1b", "interleaved"))
    words += [f"ZeRO {layout.zero_stage}"] * (layout.zero_stage > 0)
    words += ["sequence parallel"] * layout.sequence_parallel
    words += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    words += [layout.context] * (layout.cp > 1 and layout.context != "zigzag")
    words += ["no overlap"] * (not layout.overlap)
    return " · ".join(axes) or "1 GPU", " · ".join(words)


def bar(items: Sequence[Any], text: str, progress: bool) -> tqdm:
    """Return the items, with a progress bar if they take longer than a second."""
    return tqdm(items, text, unit="", delay=1, disable=not progress, leave=False, file=sys.stderr)
