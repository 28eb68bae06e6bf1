"""The axis dp (with cp and ep): how gradients are summed, chosen from a trainer's options.

zero_stage 0, overlap          Overlapped        1, 2    ZeRO12
              bucket_bytes 0   Naive             3       ZeRO3
              else             Bucketed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import tensors_of
from parallel101.trainers.axis import Axis, OneStage, Syncs
from parallel101.trainers.data_parallel import Bucketed, Naive, Overlapped
from parallel101.trainers.gradient_sync import GradientSync, Parameters, default_bucket_bytes
from parallel101.trainers.layout import DATA, Axes, Pieces
from parallel101.trainers.options import Options
from parallel101.trainers.precision import Precision
from parallel101.trainers.support.arguments import Trainer

if TYPE_CHECKING:
    from parallel101.trainers.zero.flat import LiveBytes


class DataAxis(Axis):
    """The synchronizations of a model's gradients. Cutting the model builds them.

    Args:
        trainer: which is being built.
        others: the axes that cut the model before.

    Attributes:
        local: name → parameter or buffer on this rank, whole or a shard.
        syncs: (stages, the synchronization of the parameters that are on just these).
        after: the `sums` of the other axes.
    """

    name = "dp"
    local: Mapping[str, Tensor]
    syncs: Syncs

    def __init__(self, trainer: Trainer, options: Options, others: Sequence[Axis]):
        self.axes: Axes = trainer.axes
        self.precision: Precision = trainer.precision
        self.agree, self.trained = trainer.agree, trainer.trained
        self.options, self.others = options, others
        self.algorithms = options.algorithms(self.axes)
        # Along cp and ep the model's backward sends, too. If ranks take different ways through the
        # model, gradients that leave meanwhile would meet those messages.
        alone = options.zero_stage == 3 or self.axes.size(["cp", "ep"]) == 1
        self.overlap = options.overlap and alone

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        tensors, on_stages = dict(tensors_of(model)), stages.on_stages
        self.local = {
            name: tensors[name] for name, of in on_stages.items() if stages.mine.intersection(of)
        }
        here = [name for name in self.trained if name in self.local]
        self.after = [names for axis in self.others for names in axis.sums(here)]
        data = [axis for axis in self.axes.sizes if axis in DATA]
        over = {name: tuple(a for a in data if not self.cuts(a, name)) for name in self.trained}
        lines = {names: self.axes.along(names) for names in set(over.values())}
        by_stages: dict[frozenset[int], dict[str, nn.Parameter]] = {}
        for name in here:
            p, of = self.local[name], stages.mine.intersection(on_stages[name])
            assert isinstance(p, nn.Parameter)
            by_stages.setdefault(of, {})[name] = p
        groups = {name: lines[over[name]] for name in here}

        def synchronize() -> Syncs:
            return [
                (of, sync)
                for of, parameters in by_stages.items()
                for sync in self.of_stages([stages.parts[s] for s in of], parameters, groups)
            ]

        # without stages all ranks have the same modules, and so the same errors
        doing, alike = "prepare its part of the model", self.axes.size(["pp"]) == 1
        self.syncs = synchronize() if alike else self.agree.all_or_none(doing, synchronize)
        if self.options.zero_stage:
            pieces = {name: p for _, sync in self.syncs for name, p in sync.placements.items()}
            self.placements = {
                name: pieces.get(name, Pieces(0, 0))._replace(axes=over[name])
                for name in self.trained
            }

    def cuts(self, axis: str, name: str) -> bool:
        return any(other.name == axis and name in other.placements for other in self.others)

    def of_stages(
        self, parts: Sequence[nn.Module], parameters: Parameters, groups: Mapping[str, Group]
    ) -> list[GradientSync]:
        """Return the synchronizations of some parameters.

        Args:
            parts: the stages that have them.
            groups: name → the ranks over which the gradient is summed.
        """
        self.precision.gradients_of(list(parameters.values()))
        stage = self.options.zero_stage
        if not stage:
            by_group: dict[Group, dict[str, nn.Parameter]] = {}
            for name, p in parameters.items():
                by_group.setdefault(groups[name], {})[name] = p
            return [self.data_parallel(some, group) for group, some in by_group.items()]
        from parallel101.trainers.zero.flat import ZeROGroup
        from parallel101.trainers.zero_1_2_3 import ZeRO3, ZeRO12

        # what is summed over other ranks, or once more afterwards, has arrays of its own
        after = {name: i for i, (names, _) in enumerate(self.after) for name in names}
        labels = {name: f"{group.axes} {after.get(name)}" for name, group in groups.items()}
        zero = ZeROGroup(groups, self.overlap, labels, self.algorithms, self.live)
        if stage < 3:
            size = self.bucket(parameters, 4)
            return [ZeRO12(parameters, zero, zero_stage=stage, bucket_bytes=size)]
        (part,) = parts  # weights tied between two stages on a rank are refused before
        return [ZeRO3(part, parameters, zero, self.options.layers, self.precision.autocast)]

    def how(self) -> str:
        """Return how gradients are synchronized, in words."""
        master = "; it updates master weights" * self.precision.master
        return "; ".join(dict.fromkeys(sync.how for _, sync in self.syncs)) + master

    @cached_property
    def live(self) -> LiveBytes:
        from parallel101.trainers.zero.flat import LiveBytes

        return LiveBytes()

    def data_parallel(self, parameters: Parameters, group: Group) -> GradientSync:
        algorithm, size = self.algorithms.get("all_reduce", "direct"), self.bucket(parameters, 2)
        if group.size == 1:
            return GradientSync(parameters)
        if self.overlap:
            return Overlapped(parameters, group, size)
        if size:
            return Bucketed(parameters, group, size, algorithm)
        return Naive(parameters, group, algorithm)

    def bucket(self, parameters: Parameters, buckets: int) -> int:
        given = self.options.bucket_bytes
        return default_bucket_bytes(parameters, buckets) if given is None else given
