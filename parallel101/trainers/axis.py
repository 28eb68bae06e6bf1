"""An axis of the mesh: what it does to a model, in the same few methods for all of them.

         cuts                 around a forward      sums besides dp       file
    tp   blocks of matrices                         with time cut, norms  tensor/tensor_axis.py
    ep   experts                                                          expert_parallel.py
    pp   layers                                     tied weights          pipeline/stages.py
    dp   flat pieces (ZeRO)                                               here, below
    cp   a batch along time   attention over ranks                        context/cut_time.py

A constructor refuses what can't be, before anything is changed. Then the axes cut the model one
after the other, in this order, which is torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import named_tensors
from parallel101.trainers.batches import Batch
from parallel101.trainers.data_parallel import Bucketed, Naive, Overlapped
from parallel101.trainers.gradient_sync import (
    GradientSync,
    Parameters,
    default_bucket_bytes,
    together,
)
from parallel101.trainers.layout import DATA, Axes, Pieces, Placement
from parallel101.trainers.model_layers import layers_of
from parallel101.trainers.options import Options, Trainer
from parallel101.trainers.precision import Precision
from parallel101.trainers.step import Accumulation

Syncs = Sequence[tuple[frozenset[int], GradientSync]]  # of the parameters on just these stages


class Axis:
    """An axis that does nothing.

    Attributes:
        placements: name → how the axis cuts this parameter or buffer of the whole model.
        cuts_logits: whether the loss is given a part of the logits, along the vocabulary.
        least: how many samples each rank needs, and why.
        forward: gives the context in which a forward runs; None: in no other than without the axis.
        check_batch: raises ValueError for a share (inputs, targets) that this axis can't cut.
        cut_batch: returns this rank's part of a share, and how much of each sample that is.
    """

    name = ""
    placements: Mapping[str, Placement] = {}
    cuts_logits = False
    least: tuple[int, str] = (0, "")
    forward: Callable[[], AbstractContextManager] | None = None
    check_batch: Callable[[Batch, Batch], None] | None = None
    cut_batch: Callable[[Batch, Batch], tuple[Batch, Batch, float]] | None = None

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        """Keep this rank's part of the model, in place."""

    def sums(self, names: Sequence[str]) -> Iterator[tuple[list[str], Group]]:
        """Yield those of this rank's parameters whose gradients are also summed over these ranks,
        in the same order on all of them.
        """
        return iter(())

    def describe(self) -> Iterator[str]:
        """Yield what it does, in words."""
        return iter(())


class OneStage(Axis):
    """A model that is not cut into stages: what an axis pp is without one.

    Attributes:
        sequence: the modules that are called one after the other, the first with the inputs.
        on_stages: name of each parameter and buffer → the stages that use it.
        local: this rank's stages. parts: stage → its modules, once the model is cut.
        microbatches: in a step.
    """

    name, local = "pp", frozenset({0})

    def __init__(self, model: nn.Module, axes: Axes, options: Options):
        self.on_stages: Mapping[str, Sequence[int]] = {n: [0] for n, _ in named_tensors(model)}
        self.parts: Mapping[int, nn.Module] = {0: model}
        self.sequence = [model]
        self.microbatches = options.accumulate
        # a rank without samples computes its experts for others, which send it some
        self.always = axes.size(["ep"]) > 1

    def names(self, model: nn.Module) -> set[str]:
        """Return the names of the entries that this rank has; "" is the whole model."""
        return {""}

    def runner(self, syncs: Syncs, axes: Axes, around: Callable[[], Any]) -> Any:
        """Return the object that runs forward and backward of a share."""
        sync = together([sync for _, sync in syncs])
        return Accumulation(self, sync, around)


class DataAxis(Axis):
    """The synchronizations of a model's gradients. Cutting the model builds them.

    Args:
        trainer: which is being built.
        others: the axes that cut the model before.

    Attributes:
        local: name → parameter or buffer on this rank, whole or a shard.
        syncs: (stages, the synchronization of the parameters that are on just these).
        zero: their ZeROGroup, on stages 1 to 3.
        after: the `sums` of the other axes.
    """

    name = "dp"
    local: Mapping[str, Tensor]
    syncs: Syncs
    zero: Any = None

    def __init__(self, trainer: Trainer, options: Options, others: Sequence[Axis]):
        self.axes: Axes = trainer.axes
        self.precision: Precision = trainer.precision
        self.trained, self.options, self.others = trainer.trained, options, others
        # Along cp and ep the model's backward sends, too. If ranks take different ways through the
        # model, gradients that leave meanwhile would meet those messages.
        alone = options.zero_stage == 3 or self.axes.size(["cp", "ep"]) == 1
        self.overlap = options.overlap and alone

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        tensors, on_stages = dict(named_tensors(model)), stages.on_stages
        self.local = {n: tensors[n] for n, used in on_stages.items() if stages.local & {*used}}
        here = [name for name in self.trained if name in self.local]
        self.after = [names for axis in self.others for names in axis.sums(here)]
        data = [axis for axis in self.axes.sizes if axis in DATA]
        cut = {(axis.name, name) for axis in self.others for name in axis.placements}
        over = {name: tuple(a for a in data if (a, name) not in cut) for name in self.trained}
        lines = {names: self.axes.along(names) for names in set(over.values())}
        # by the stages that have it and, without ZeRO, the ranks over which its gradient is summed
        parts: dict[tuple[frozenset[int], Group | None], dict[str, nn.Parameter]] = {}
        for name in here:
            p, used = self.local[name], stages.local.intersection(on_stages[name])
            assert isinstance(p, nn.Parameter)
            p.grad_dtype = self.precision.gradients or p.dtype  # in which backward adds up
            group = None if self.options.zero_stage else lines[over[name]]
            parts.setdefault((used, group), {})[name] = p
        # what is summed over other ranks, or once more afterwards, has arrays of its own in ZeRO
        after = {name: i for i, (names, _) in enumerate(self.after) for name in names}
        sums = {name: (lines[over[name]], after.get(name)) for name in here}
        if self.options.zero_stage:
            from parallel101.trainers.flat import ZeROGroup

            self.zero = ZeROGroup(sums, self.overlap, self.options.algorithm)
        self.syncs = [
            (used, self.sync_of(parameters, group, [stages.parts[s] for s in used]))
            for (used, group), parameters in parts.items()
        ]
        if self.zero:
            pieces = {name: p for _, sync in self.syncs for name, p in sync.placements.items()}
            pieces = dict.fromkeys(self.trained, Pieces(0, 0)) | pieces
            self.placements = {n: piece._replace(axes=over[n]) for n, piece in pieces.items()}

    def sync_of(
        self, parameters: Parameters, group: Group | None, parts: Sequence[nn.Module]
    ) -> GradientSync:
        """Return the synchronization of some parameters.

        Args:
            group: the ranks over which their gradients are summed; None: those of `zero`.
            parts: the stages that have them.
        """
        stage, size = self.options.zero_stage, self.options.bucket_bytes
        algorithm = self.options.algorithm or "direct"
        if size is None:
            size = default_bucket_bytes(parameters, 4 if stage else 2)
        if group is None:
            from parallel101.trainers.zero_1_2_3 import ZeRO3, ZeRO12

            if stage < 3:
                return ZeRO12(parameters, self.zero, zero_stage=stage, bucket_bytes=size)
            (part,) = parts  # weights tied between two stages on a rank are refused before
            return ZeRO3(dict(layers_of(part)), parameters, self.zero)
        if group.size == 1:
            return GradientSync(parameters)
        if self.overlap:
            return Overlapped(parameters, group, size)
        if size:
            return Bucketed(parameters, group, size, algorithm)
        return Naive(parameters, group, algorithm)
