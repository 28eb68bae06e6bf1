"""The arguments of all trainers, checked before the first message, so that a mistake is an error at
once.

model       a module whose weights have values, on a device that the group can send from
loss_fn     a function
options     one frozen object, which is checked where it is made:

    HybridTrainer(…, mesh=mesh, zero_stage=1)           all of them
    DataParallelTrainer(…, group=group, overlap=False)  those of one axis; the rest have defaults
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallel101.autograd import algorithms
from parallel101.mesh import Group
from parallel101.trainers.agreement import named_tensors
from parallel101.trainers.expect import expect
from parallel101.trainers.layout import Axes
from parallel101.trainers.recompute import Recompute

if TYPE_CHECKING:
    from parallel101.trainers.schedules.schedule import Schedule
    from parallel101.trainers.tensor.plan import TensorPlan

EXPERTS = "experts"  # the style of modules that ep cuts, and their usual name


@dataclass(frozen=True)
class Options:
    """The options of a trainer: see `HybridTrainer`.

    Raises ValueError for values that make no sense, whatever the mesh.
    """

    zero_stage: int = 0
    overlap: bool = True
    bucket_bytes: int | None = None
    algorithm: str | None = None
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
    verify: bool | int = True

    def __post_init__(self) -> None:
        nbytes, clip, dtype = self.bucket_bytes, self.clip_norm, self.autocast
        stages = "1 (optimizer state is sharded), 2 (gradients too) or 3 (weights too), or 0: none"
        expect("zero_stage", self.zero_stage, self.zero_stage in (0, 1, 2, 3), stages)
        right = nbytes is None or (isinstance(nbytes, int) and nbytes >= 0)
        expect("bucket_bytes", nbytes, right, "a number of bytes, 0 for one at a time, or None")
        right = type(self.accumulate) is int and self.accumulate > 0
        expect("accumulate", self.accumulate, right, "the number of microbatches, 1 or more")
        right = clip is None or (isinstance(clip, int | float) and clip > 0)
        expect("clip_norm", clip, right, "the largest norm that the gradients may have, or None")
        right = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        expect("autocast", dtype, right, "a floating-point dtype such as torch.bfloat16, or None")
        ways = "one of 'zigzag', 'contiguous', 'ulysses'"
        expect("context", self.context, self.context in ("zigzag", "contiguous", "ulysses"), ways)
        right = isinstance(self.verify, int) and self.verify >= 0
        expect("verify", self.verify, right, "True, False, or how many steps to compare")
        right = self.sequence_parallel or not self.regather
        expect("regather", self.regather, right, "sequence_parallel=True too, which gathers inputs")

    def check_axes(self, axes: Axes) -> None:
        """Raise ValueError for an option of an axis that the mesh doesn't have, and for an
        algorithm that one of the trainer's collectives doesn't have.
        """
        of_pipelines = ("schedule", "microbatches", "chunks", "layers_per_stage")
        axis_of = {"sequence_parallel": "tp", "context": "cp"} | dict.fromkeys(of_pipelines, "pp")
        asked = [(name, getattr(self, name), axis) for name, axis in axis_of.items()]
        asked = [one for one in asked if one[1] != getattr(Options, one[0])]
        for plan, axis in ((self.tensor_plan, "tp"), (self.experts_plan or None, "ep")):
            asked += [("plan", plan, axis)] * (plan not in (None, "auto"))
        for name, value, axis in asked:
            if axis not in axes.sizes:
                raise ValueError(
                    f"{name}={value!r} is for the axis {axis!r}, but the mesh has only "
                    f"{', '.join(axes.sizes)}: add the axis, or leave {name} out"
                )

        if (chosen := self.algorithm) is not None:
            reduces = ("dp" in axes.sizes and not self.zero_stage) or "tp" in axes.sizes
            operations = ["all_reduce"] * reduces
            if self.zero_stage or self.sequence_parallel:
                operations += ["reduce_scatter", "all_gather"]
            common = set.intersection(*({*algorithms(operation)} for operation in operations))
            names = f"None, or a name out of {', '.join(sorted(common))}"
            expect("algorithm", chosen, chosen in common, names)
            once = "overlap=False too, since it can't overlap with computing"
            expect("algorithm", chosen, not self.overlap, once)

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


def check_names(trainer: object, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise TypeError for an option that this trainer hasn't."""
    if unknown := options.keys() - {*names}:
        raise TypeError(
            f"{type(trainer).__name__} has no option {min(unknown)!r}: expected some of "
            f"{', '.join(names)}"
        )


def takes(constructor: Callable[..., None], names: Iterable[str], **defaults: Any) -> None:
    """Let help() and editors show these options as arguments of a constructor(…, **options)."""
    options = inspect.signature(Options).parameters
    own = [*inspect.signature(constructor).parameters.values()][:-1]
    for name in names:
        default = defaults.get(name, options[name].default)
        own.append(options[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default))
    constructor.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]


LossFn = Callable[[Any, Any], Any]  # (outputs, targets) → the mean loss, or (sum, weight)
OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]

Trainer = Any  # a HybridTrainer, which hybrid.py puts together from what takes one

CUT = "cut_by_a_parallel101_trainer"  # attribute of modules


def mark_as_cut(model: nn.Module) -> None:
    """Mark the model so that `check_model` refuses it: only this trainer can gather its weights."""
    for module in model.modules():
        object.__setattr__(module, CUT, True)


def check_model(model: Any, loss_fn: Any) -> torch.device:
    """Return the device that the model is on.

    Raises TypeError or ValueError for a model that can't be trained, or a loss_fn that is neither a
    function nor None.
    """
    right = loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type))
    expected = (
        "a function of (outputs, targets) that returns their mean loss, such as "
        "torch.nn.functional.mse_loss or nn.MSELoss(), or None if the model returns its loss"
    )
    expect("loss_fn", loss_fn, right, expected, TypeError)
    expected = "an nn.Module that has been built, such as MLP([4, 8, 4])"
    expect("model", model, isinstance(model, nn.Module), expected, TypeError)
    if any(getattr(module, CUT, False) for module in model.modules()):
        raise ValueError(
            "the model's weights were already cut up by another trainer: "
            "build a new model for a new trainer (the old one's .state_dict() has the weights)"
        )
    for name, t in named_tensors(model):
        if is_lazy(t):
            first = "run the model once first, model(inputs)"
            raise ValueError(f"{name!r} has no shape yet, since its module is lazy: {first}")
    on_gpus = torch.get_default_device().type == "meta"  # a virtual one: launch(…, device=…)
    for name, p in model.named_parameters():
        if p.is_meta != on_gpus:
            raise ValueError(
                f"{name!r} is on {p.device}: expected a model on the meta device, which has no "
                "values, on ranks with virtual GPUs only (launch(…, device=…)). There, build it in "
                "the program, or call model.to('meta'); elsewhere model.to_empty(device=…) and its "
                "init give it values"
            )
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def need_numbers(trainer: Trainer, method: str) -> None:
    """Raise ValueError if the model is on the meta device, which has no numbers."""
    if trainer.device.type == "meta":
        raise ValueError(
            f"{method}() needs numbers, but the model is on the meta device, which has none: "
            "use step() and describe() there, or launch without device="
        )


def is_vocabulary_loss(loss_fn: object) -> TypeGuard[Callable[..., Tensor]]:
    """Return whether it is vocabulary_cross_entropy, or a functools.partial of it. It is known by
    its name, so that trainers without tensor parallel don't import it.
    """
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    own = getattr(function, "__module__", "").startswith("parallel101.trainers.")
    return own and getattr(function, "__name__", "") == "vocabulary_cross_entropy"


def loss_over(group: Group, loss_fn: LossFn | None) -> LossFn | None:
    """Return loss_fn for logits that are cut over this group, if it takes such logits."""
    return functools.partial(loss_fn, group=group) if is_vocabulary_loss(loss_fn) else loss_fn
