"""p101.plan(model, gpus=1024): the layouts of a model on a cluster, fastest first.

    plan = p101.plan("llama-3-70b", gpus=1024, device="H100")
    plan                            # in a notebook: a picture; print(plan) shows tables
    plan.best.seconds, plan.best.mfu, plan.best.memory[0].total
    plan.best.call                  # the HybridTrainer that has this layout, as text
    plan.why_not                    # what was refused, and why

All layouts are ranked by a quick model (cost/step_time.py, cost/step_memory.py). Then the best few
are run on virtual GPUs, by the trainer itself (simulated_step.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import CHIPS
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import StageMemory
from parallel101.cost.step_time import StepTime
from parallel101.planner.known_models import batch_of_model, shape_of_model
from parallel101.planner.layout_rules import KEYS, check_fixed
from parallel101.planner.search import Found, nothing_fits, search
from parallel101.planner.trainer_call import build_trainer, call_text, why_no_model

if TYPE_CHECKING:
    from parallel101.planner.simulated_step import SimulatedStep
    from parallel101.viz.scene import Scene

BATCH_TOKENS = 2**22  # of a step, if neither the user nor the model's source gives a number


@dataclass(frozen=True)
class Planned:
    """A layout that fits, and what a step with it costs.

    Attributes:
        shape, cluster, layout: what was planned.
        time: the quick model's, see cost/step_time.py.
        memory: peak bytes on each rank along pp, see cost/step_memory.py.
        simulated: the step on virtual GPUs; None if it was not run.
    """

    shape: ModelShape
    cluster: Cluster
    layout: ParallelLayout
    time: StepTime
    memory: tuple[StageMemory, ...]
    simulated: SimulatedStep | None = None

    @property
    def seconds(self) -> float:
        """Of a step, by the quick model."""
        return self.time.seconds

    @property
    def low(self) -> float:
        return self.time.low

    @property
    def high(self) -> float:
        return self.time.high

    @property
    def mfu(self) -> float:
        """The model's FLOPs over what the GPUs could do in this time."""
        return self.time.mfu

    @property
    def hfu(self) -> float:
        """The same with the FLOPs that are computed again in backward."""
        return self.time.hfu

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second

    @property
    def limit(self) -> str:
        """What limits the step, in words."""
        return self.time.limit

    @property
    def parts(self) -> dict[str, float]:
        """Name → seconds; together they are `seconds`. Communication counts where it is exposed."""
        return self.time.parts

    @property
    def headroom(self) -> float:
        """Bytes that are left on the fullest GPU."""
        return self.cluster.memory_bytes - max(stage.total for stage in self.memory)

    @property
    def difference(self) -> float | None:
        """The simulated step over the quick model's, minus one; None if it was not run."""
        return self.simulated.seconds / self.seconds - 1 if self.simulated else None

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


class WhyNot(NamedTuple):
    """Why layouts were refused: `count` meshes, or layouts of the other meshes."""

    reason: str
    count: int
    what: str  # "meshes" or "layouts"
    example: ParallelLayout


@dataclass(frozen=True)
class Plan:
    """The best layouts, fastest first. It can be indexed and iterated over.

    Attributes:
        shape, cluster, batch: what was planned for; batch in samples.
        layouts: the best, as many as `top`.
        fitting: how many layouts fit.
        why_not: why others were refused, most of them first.
        fixed: what the user fixed of the layout.
    """

    shape: ModelShape
    cluster: Cluster
    batch: int
    layouts: tuple[Planned, ...]
    fitting: int
    why_not: tuple[WhyNot, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Planned:
        return self.layouts[0]

    def __iter__(self) -> Iterator[Planned]:
        return iter(self.layouts)

    def __getitem__(self, index: int) -> Planned:
        return self.layouts[index]

    def __len__(self) -> int:
        return len(self.layouts)

    def __str__(self) -> str:
        from parallel101.planner.plan_report import plan_text

        return plan_text(self)

    def picture(self) -> Scene:
        """A still picture: where the time goes, what fills the memory, and who is on which node."""
        from parallel101.planner.plan_picture import plan_scene

        return plan_scene(self)

    def _repr_html_(self) -> str:
        return self.picture().html()

    def save(self, path: str | os.PathLike) -> Path:
        """Write everything as JSON. Returns the path."""
        from parallel101.planner.plan_report import plan_json

        path = Path(path)
        path.write_text(plan_json(self), encoding="utf-8")
        return path


def plan(
    model: str | os.PathLike | Mapping[str, Any] | ModelShape,
    *,
    gpus: int,
    device: str = "H100",
    batch_tokens: int | None = None,
    memory: float | None = None,
    nodes_of: int = 8,
    attention: str = "fused",
    precision: str = "bf16-mixed",
    layout: Mapping[str, Any] | ParallelLayout | None = None,
    simulate: int = 3,
    top: int = 10,
    time: int | None = None,
    progress: bool = True,
) -> Plan:
    """Plan how to train a model on a cluster. All layouts that fit are ranked.

    Args:
        model: a name such as "llama-3-70b" (see planner/known_models.py), the path of a JSON file,
            "h,L,a,V,s", or a ModelShape.
        gpus, device, nodes_of, memory: how many GPUs of which kind, how many of them in a node, and
            the bytes of each; None: the device's.
        batch_tokens: of a step; None: the model's own, or 4,194,304 rounded to whole samples.
        attention: "fused" or "unfused".
        precision: as HybridTrainer's.
        layout: fields of ParallelLayout that are fixed, such as {"tp": 8, "recompute": "full"}. A
            ParallelLayout fixes all of them.
        simulate: how many of the best are run on virtual GPUs.
        top: how many are returned.
        time: tokens of a sample; None: the model's own.
        progress: show bars for what takes longer than a second.

    Raises ValueError, in words, for what can't be, and NoLayoutError if no layout fits: it says
    what is missing, and has the smallest number of GPUs that would do.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    shape = shape_of_model(name, time=time, attention=attention)
    known = [chip.name for chip in CHIPS.values() if chip.kernels is not None]
    if device not in known:
        raise ValueError(
            f"device={device!r}: expected one of {', '.join(map(repr, known))}, whose kernels are "
            "in cost/hardware.py"
        )
    cluster = Cluster(CHIPS[device], gpus, nodes_of, memory)
    if gpus > nodes_of and gpus % nodes_of:
        raise ValueError(
            f"{gpus:,} GPUs aren't whole nodes of {nodes_of}: expected a multiple, such as "
            f"{gpus // nodes_of * nodes_of:,}"
        )
    for what, count, least in (("simulate", simulate, 0), ("top", top, 1)):
        if type(count) is not int or count < least:
            raise ValueError(f"{what}={count!r}: expected a whole number, {least} or more")
    fixed = {"precision": precision, **fixed_fields(layout)}
    fixed = check_fixed(fixed)
    batch = samples(shape, name, batch_tokens, fixed)
    found = search(shape, cluster, batch, fixed, top=top, progress=progress)
    fixed = {key: value for key, value in fixed.items() if key != "precision"}
    if not found.best:
        raise nothing_fits(shape, cluster, batch, fixed, found)
    layouts = [Planned(shape, cluster, *evaluated) for evaluated in found.best]
    layouts[:simulate] = simulated(layouts[:simulate], progress)
    return Plan(shape, cluster, batch, tuple(layouts), found.fitting, why_not_of(found), fixed)


def fixed_fields(layout: Mapping[str, Any] | ParallelLayout | None) -> dict[str, Any]:
    if isinstance(layout, ParallelLayout):
        return asdict(layout)
    if layout is None or isinstance(layout, Mapping):
        return dict(layout or {})
    raise ValueError(
        f"layout={layout!r}: expected a dict of some of {', '.join(KEYS)}, or a ParallelLayout"
    )


def samples(
    shape: ModelShape, model: Any, batch_tokens: int | None, fixed: Mapping[str, Any]
) -> int:
    """The samples of a step. Raises ValueError if the tokens aren't whole samples."""
    if batch_tokens is None:
        if {"dp", "microbatch", "microbatches"} <= set(fixed):
            return fixed["dp"] * fixed.get("ep", 1) * fixed["microbatch"] * fixed["microbatches"]
        return batch_of_model(model) or max(BATCH_TOKENS // shape.time, 1)
    if type(batch_tokens) is not int or batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens!r}: expected a whole number, 1 or more")
    whole, rest = divmod(batch_tokens, shape.time)
    if rest:
        near = [n * shape.time for n in (whole, whole + 1) if n]
        raise ValueError(
            f"batch_tokens={batch_tokens:,} aren't whole samples of {shape.time:,} tokens: "
            f"expected a multiple, such as {' or '.join(f'{n:,}' for n in near)}"
        )
    return whole


def simulated(layouts: list[Planned], progress: bool) -> list[Planned]:
    """The same layouts, each run on virtual GPUs, if this package has a model of that shape."""
    if not layouts or why_no_model(layouts[0].shape):
        return layouts
    from tqdm import tqdm

    from parallel101.planner.simulated_step import simulate_step

    bar = tqdm(layouts, desc="running on virtual GPUs", unit="", delay=1, disable=not progress)
    with bar:
        return [
            replace(one, simulated=simulate_step(one.shape, one.layout, one.cluster)) for one in bar
        ]


def why_not_of(found: Found) -> tuple[WhyNot, ...]:
    rows = [
        WhyNot(reason, count, what, refusals.examples[reason])
        for what, refusals in (("meshes", found.meshes), ("layouts", found.layouts))
        for reason, count in refusals.counts.most_common()
    ]
    if found.smallest is not None:
        rows.append(
            WhyNot("more memory than a GPU has", found.too_large, "layouts", found.smallest[1])
        )
    return tuple(rows)
