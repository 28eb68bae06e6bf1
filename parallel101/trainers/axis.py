"""An axis of the mesh: what it does to a model, in the same few methods for all of them.

         cuts                 around a forward      sums besides dp       file
    tp   blocks of matrices                         with time cut, norms  tensor/plan.py
    ep   experts                                                          experts_plan.py
    pp   layers                                     tied weights          pipeline/stages.py
    dp   flat pieces (ZeRO)                                               data_axis.py
    cp   a batch along time   attention over ranks                        context/cut_time.py

A constructor refuses what can't be, before anything is changed. Then the axes cut the model one
after the other, in this order, which is torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import tensors_of
from parallel101.trainers.gradient_sync import GradientSync, together
from parallel101.trainers.layout import Axes, Placement
from parallel101.trainers.options import Options
from parallel101.trainers.step import Accumulation
from parallel101.trainers.support.batches import Batch

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
        on_stages: name of each parameter and buffer → the stages that use it.
        mine: this rank's stages. parts: stage → its modules, once the model is cut.
        microbatches: in a step.
    """

    name, mine = "pp", frozenset({0})

    def __init__(self, model: nn.Module, axes: Axes, options: Options):
        self.on_stages: Mapping[str, Sequence[int]] = {name: [0] for name, _ in tensors_of(model)}
        self.parts: Mapping[int, nn.Module] = {0: model}
        self.microbatches = options.accumulate
        # a rank without samples computes its experts for others
        self.always = axes.size(["ep"]) > 1

    def entries(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are called one after the other, the first with the inputs."""
        return [model]

    def names(self, model: nn.Module) -> set[str]:
        """Return the names of the entries that this rank has; "" is the whole model."""
        return {""}

    def runner(self, syncs: Syncs, axes: Axes, around: Callable[[], Any]) -> Any:
        """Return the object that runs forward and backward of a share."""
        sync = together([sync for _, sync in syncs])
        return Accumulation(self.parts[0], sync, self.microbatches, around, self.always)
