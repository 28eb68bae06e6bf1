"""The options of all trainers in one frozen object, which is checked where it is made.

HybridTrainer(…, mesh=mesh, zero_stage=1)         all of them
DataParallelTrainer(…, group=group, overlap=False)    those of one axis; the others have defaults
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel101.autograd import algorithms
from parallel101.trainers.layout import Axes
from parallel101.trainers.recompute import Recompute

if TYPE_CHECKING:
    from parallel101.trainers.schedules.schedule import Schedule
    from parallel101.trainers.tensor.styles import TensorPlan

EXPERTS = "experts"  # the style of modules that ep cuts, and their usual name
CONTEXTS = ("zigzag", "contiguous", "ulysses")


@dataclass(frozen=True)
class Options:
    """The options of a trainer: see `HybridTrainer`.

    Raises ValueError for values that make no sense, whatever the mesh.
    """

    zero_stage: int = 0
    overlap: bool = True
    bucket_bytes: int | None = None
    layers: Sequence[type[nn.Module]] | None = None
    algorithm: str | Mapping[str, str] | None = None
    plan: TensorPlan | None = "auto"
    sequence_parallel: bool = False
    regather: bool = False
    context: str = "zigzag"
    schedule: str | Schedule = "1f1b"
    microbatches: int | None = None
    chunks: int = 1
    layers_per_stage: Sequence[int] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    recompute: Recompute = "none"
    precision: str | None = None
    gradient_dtype: torch.dtype | None = None
    sync: bool = False
    sync_batch_norm: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        def expect(name: str, right: bool, expected: str) -> None:
            if not right:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

        nbytes, clip, dtype = self.bucket_bytes, self.clip_norm, self.autocast
        stages = "1 (optimizer state is sharded), 2 (gradients too) or 3 (weights too), or 0: none"
        expect("zero_stage", self.zero_stage in (0, 1, 2, 3), stages)
        right = nbytes is None or (isinstance(nbytes, int) and nbytes >= 0)
        expect("bucket_bytes", right, "a number of bytes, 0 for one gradient at a time, or None")
        right = type(self.accumulate) is int and self.accumulate > 0
        expect("accumulate", right, "the number of microbatches in a step, 1 or more")
        right = clip is None or (isinstance(clip, int | float) and clip > 0)
        expect("clip_norm", right, "the largest norm that the gradients may have, or None")
        right = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        expect("autocast", right, "a floating-point dtype such as torch.bfloat16, or None")
        expect("context", self.context in CONTEXTS, f"one of {', '.join(map(repr, CONTEXTS))}")
        right = self.sequence_parallel or not self.regather
        expect("regather", right, "sequence_parallel=True too, which gathers inputs")

    def check_axes(self, axes: Axes) -> None:
        """Raise ValueError for an option of an axis that the mesh doesn't have."""
        of_pipelines = ("schedule", "microbatches", "chunks", "layers_per_stage")
        axis_of = {"sequence_parallel": "tp", "context": "cp"} | dict.fromkeys(of_pipelines, "pp")
        for field in fields(self):
            value, axis = getattr(self, field.name), axis_of.get(field.name, "dp")
            if value != field.default and axis not in axes.sizes:
                raise for_another_axis(field.name, value, axis, axes)
        for plan, axis in ((self.tensor_plan, "tp"), (self.experts_plan or None, "ep")):
            if plan not in (None, "auto") and axis not in axes.sizes:
                raise for_another_axis("plan", plan, axis, axes)

    @property
    def experts_plan(self) -> dict[str, str]:
        """The part of `plan` that places experts; empty: automatically."""
        styles = self.plan if isinstance(self.plan, Mapping) else {}
        return {name: EXPERTS for name, style in styles.items() if style == EXPERTS}

    @property
    def tensor_plan(self) -> TensorPlan | None:
        """The rest of `plan`; "auto" if it says nothing else than where experts are."""
        experts = self.experts_plan
        if not experts or not isinstance(self.plan, Mapping):
            return self.plan
        return {n: style for n, style in self.plan.items() if n not in experts} or "auto"

    def algorithms(self, axes: Axes) -> Mapping[str, str]:
        """Return operation → the algorithm of each that a trainer uses; empty for the defaults.

        Raises ValueError for an unknown one, or one that can't overlap with computing.
        """
        if self.algorithm is None:
            return {}
        what = f"algorithm={self.algorithm!r}"
        reduces = ("dp" in axes.sizes and not self.zero_stage) or "tp" in axes.sizes
        gathers = self.zero_stage or self.sequence_parallel
        operations = ["all_reduce"] * bool(reduces)
        operations += ["reduce_scatter", "all_gather"] * bool(gathers)
        chosen = self.algorithm
        if isinstance(chosen, str):
            chosen = dict.fromkeys(operations, chosen)
        for operation, name in chosen.items():
            if operation not in operations or name not in algorithms(operation):
                raise ValueError(
                    f"{what}: expected one name, or a dict, out of "
                    f"{', '.join(f'{o}: {list(algorithms(o))}' for o in operations)}"
                )
        if self.overlap:
            raise ValueError(
                f"{what} can't overlap with computing: say overlap=False, or leave it out"
            )
        return chosen


def for_another_axis(name: str, value: object, axis: str, axes: Axes) -> ValueError:
    return ValueError(
        f"{name}={value!r} is for the axis {axis!r}, but the mesh has only "
        f"{', '.join(axes.sizes)}: add the axis, or leave {name} out"
    )


def check_names(trainer: object, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise TypeError for an option that this trainer hasn't."""
    if unknown := options.keys() - {*names}:
        raise TypeError(
            f"{type(trainer).__name__} has no option {min(unknown)!r}: expected some of "
            f"{', '.join(names)}"
        )


def takes(constructor: Callable[..., None], names: Iterable[str], **defaults: Any) -> None:
    """Let help() and editors show these options as arguments of a constructor(…, **options)."""
    signature = inspect.signature(constructor)
    options = {field.name: field for field in fields(Options)}
    constructor.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *list(signature.parameters.values())[:-1],
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(name, options[name].default),
                    annotation=options[name].type,
                )
                for name in names
            ),
        ]
    )
