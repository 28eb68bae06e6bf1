"""The choice of gradient synchronization over dp (with cp and ep), from a trainer's options.

zero_stage 0, overlap          Overlapped        1, 2    ZeRO12
              bucket_bytes 0   Naive             3       ZeRO3
              else             Bucketed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from parallel101.autograd import algorithms
from parallel101.mesh import Group
from parallel101.trainers.data_parallel import Bucketed, Naive, Overlapped
from parallel101.trainers.gradient_sync import (
    GradientSync,
    Parameters,
    Together,
    default_bucket_bytes,
)
from parallel101.trainers.layout import Axes
from parallel101.trainers.local_model import MakeSync
from parallel101.trainers.precision import Precision

Algorithms = Mapping[str, str]  # operation → algorithm


def operations_of(axes: Axes, zero_stage: int, sequence_parallel: bool) -> list[str]:
    """Return the collectives whose algorithm can be chosen."""
    reduces = ("dp" in axes.sizes and not zero_stage) or "tp" in axes.sizes
    gathers = zero_stage or sequence_parallel
    return ["all_reduce"] * bool(reduces) + ["reduce_scatter", "all_gather"] * bool(gathers)


def choose_algorithms(
    algorithm: str | Algorithms | None, operations: Sequence[str], overlap: bool
) -> Algorithms:
    """Return the algorithm of each operation that a trainer uses; empty for the defaults.

    Raises ValueError for an unknown one, or one that can't overlap with computing.
    """
    if algorithm is None:
        return {}
    chosen = dict.fromkeys(operations, algorithm) if isinstance(algorithm, str) else algorithm
    for operation, name in chosen.items():
        if operation not in operations:
            raise ValueError(
                f"algorithm={algorithm!r}: this trainer has no {operation}: expected one name, or "
                f"a dict with the keys {', '.join(operations)}"
            )
        if name not in algorithms(operation):
            raise ValueError(
                f"algorithm={algorithm!r}: {operation} has no {name!r}: expected one of "
                f"{', '.join(algorithms(operation))}"
            )
    if overlap:
        raise ValueError(
            f"algorithm={algorithm!r} can't overlap with computing: say overlap=False, or leave "
            "it out"
        )
    return chosen


def how_to_sync(
    zero_stage: int,
    overlap: bool,
    bucket_bytes: int | None,
    layers: Sequence[type[nn.Module]] | None,
    precision: Precision,
    chosen: Algorithms,
) -> MakeSync:
    """Return the function that builds the synchronization of a stage's parameters.

    Args: see `HybridTrainer`. Raises ValueError for other values.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(
            f"zero_stage={zero_stage!r}: expected 1 (optimizer state is sharded), 2 (gradients "
            "too) or 3 (weights too); 0 shards nothing"
        )
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes < 0):
        raise ValueError(
            f"bucket_bytes={bucket_bytes!r}: expected a number of bytes, 0 for one gradient at "
            "a time, or None"
        )

    def make_sync(
        part: nn.Module | None,
        parameters: Parameters,
        group: Group,
        experts: Mapping[str, Group],
        apart: Mapping[str, str],
    ) -> GradientSync:
        precision.gradients_of(list(parameters.values()))
        several = 4 if zero_stage else 2
        size = default_bucket_bytes(parameters, several) if bucket_bytes is None else bucket_bytes
        if zero_stage:
            from parallel101.trainers.zero.flat import Sharing
            from parallel101.trainers.zero_1_2_3 import ZeRO3, ZeRO12

            sharing = Sharing(group, overlap, apart, chosen, others=experts)
            if zero_stage < 3:
                return ZeRO12(parameters, sharing, zero_stage=zero_stage, bucket_bytes=size)
            assert part is not None, "weights tied between two stages on a rank are refused before"
            return ZeRO3(part, parameters, sharing, layers, precision.autocast)
        if experts:  # summed over fewer ranks
            dense = {name: p for name, p in parameters.items() if name not in experts}
            few = {name: p for name, p in parameters.items() if name in experts}
            one_group = next(iter(experts.values()))
            alone = GradientSync(few, zeros=True)
            syncs = [alone if one_group.size == 1 else make_sync(part, few, one_group, {}, apart)]
            if dense:
                syncs.insert(0, make_sync(part, dense, group, {}, apart))
            return Together(syncs)
        all_reduce = chosen.get("all_reduce", "direct")
        if group.size == 1:
            return GradientSync(parameters)
        if overlap:
            return Overlapped(parameters, group, size)
        if size:
            return Bucketed(parameters, group, size, all_reduce)
        return Naive(parameters, group, all_reduce)

    return make_sync
