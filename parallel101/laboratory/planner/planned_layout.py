"""A plan: the best layouts, what each costs, and why others were refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import OWN_RING
from parallel101.cost.step_memory import StageMemory
from parallel101.cost.step_time import StepTime, step_time
from parallel101.laboratory.planner.trainer_call import build_trainer, call_text

if TYPE_CHECKING:
    from parallel101.laboratory.planner.simulated_step import SimulatedStep


def most_of(memory: tuple[StageMemory, ...]) -> float:
    return max(stage.total for stage in memory)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, and what a step with it costs.

    Attributes:
        time: the quick model's, see cost/step_time.py: also its range, the HFU and what limits it.
        memory: peak bytes on each rank along pp, see cost/step_memory.py.
        simulated: the step on virtual GPUs; None if it was not run.
        not_simulated: why the run failed, if it did.
    """

    time: StepTime
    memory: tuple[StageMemory, ...]
    simulated: SimulatedStep | None = None
    not_simulated: str = ""

    @property
    def shape(self) -> ModelShape:
        return self.time.shape

    @property
    def layout(self) -> ParallelLayout:
        return self.time.layout

    @property
    def cluster(self) -> Cluster:
        return self.time.cluster

    @property
    def seconds(self) -> float:
        """The seconds of a step, by the quick model."""
        return self.time.seconds

    @property
    def mfu(self) -> float:
        """The model's FLOPs over what the GPUs could do in this time."""
        return self.time.mfu

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part by name, `seconds` in sum. Only exposed communication counts."""
        return self.time.parts

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
    ) -> Any:
        """Return the HybridTrainer of this layout. Every rank calls it.

        Args:
            model, loss_fn, optimizer: as HybridTrainer takes them.
            others: more of its options, such as clip_norm.
        """
        return build_trainer(self.shape, self.layout, model, loss_fn, optimizer, **others)


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
    def best(self) -> PlannedLayout:
        return self.layouts[0]

    def __iter__(self) -> Iterator[PlannedLayout]:
        return iter(self.layouts)

    def __getitem__(self, index: int) -> PlannedLayout:
        return self.layouts[index]

    def __len__(self) -> int:
        return len(self.layouts)


def bar(items: Sequence[Any], text: str, progress: bool) -> tqdm:
    """Return the items, with a progress bar if they take longer than a second."""
    return tqdm(items, text, unit="", delay=1, disable=not progress, leave=False, file=sys.stderr)
