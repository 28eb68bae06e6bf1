"""The choice of gradient synchronization over dp (with cp and ep), from a trainer's options.

zero_stage 0, overlap          Overlapped        1, 2    ZeRO12
              bucket_bytes 0   Naive             3       ZeRO3
              else             Bucketed
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parallel101.mesh import Group
from parallel101.trainers.data_parallel import Bucketed, Naive, Overlapped
from parallel101.trainers.gradient_sync import (
    GradientSync,
    Parameters,
    Together,
    default_bucket_bytes,
)
from parallel101.trainers.layout import Axes
from parallel101.trainers.options import Options
from parallel101.trainers.precision import Precision


class MakeSync:
    """Builds the synchronizations of a trainer's gradients.

    Args: options: see `HybridTrainer`. Raises ValueError for an algorithm that can't be.
    """

    def __init__(self, options: Options, axes: Axes, precision: Precision):
        self.options, self.precision = options, precision
        self.algorithms = options.algorithms(axes)
        # Along cp and ep the model's backward sends, too. If ranks take different ways through the
        # model, gradients that leave meanwhile would meet those messages.
        alone = options.zero_stage == 3 or axes.size(["cp", "ep"]) == 1
        self.overlap = options.overlap and alone
        if options.zero_stage:
            from parallel101.trainers.zero.flat import LiveBytes

            self.live = LiveBytes()

    def __call__(
        self,
        part: nn.Module | None,
        parameters: Parameters,
        groups: Mapping[str, Group],
        labels: Mapping[str, str],
    ) -> GradientSync:
        """Return the synchronization of some parameters.

        Args:
            part: the stage that has them; None if several on this rank do.
            groups: name → the ranks over which the gradient is summed.
            labels: see `by_size`.
        """
        self.precision.gradients_of(list(parameters.values()))
        stage, syncs = self.options.zero_stage, []
        if stage:
            from parallel101.trainers.zero_1_2_3 import ZeRO3, ZeRO12, ZeROGroup

            zero = ZeROGroup(groups, self.overlap, labels, self.algorithms, self.live)
            if stage < 3:
                size = self.bucket(parameters, 4)
                return ZeRO12(parameters, zero, zero_stage=stage, bucket_bytes=size)
            assert part is not None, "weights tied between two stages on a rank are refused before"
            return ZeRO3(part, parameters, zero, self.options.layers, self.precision.autocast)
        for group in dict.fromkeys(groups.values()):
            of_group = {name: p for name, p in parameters.items() if groups[name] == group}
            syncs.append(self.data_parallel(of_group, group))
        return syncs[0] if len(syncs) == 1 else Together(syncs)

    def data_parallel(self, parameters: Parameters, group: Group) -> GradientSync:
        algorithm, size = self.algorithms.get("all_reduce", "direct"), self.bucket(parameters, 2)
        if group.size == 1:
            return GradientSync(parameters)
        if self.overlap:
            return Overlapped(parameters, group, size)
        return (
            Bucketed(parameters, group, size, algorithm)
            if size
            else Naive(parameters, group, algorithm)
        )

    def bucket(self, parameters: Parameters, buckets: int) -> int:
        given = self.options.bucket_bytes
        return default_bucket_bytes(parameters, buckets) if given is None else given
