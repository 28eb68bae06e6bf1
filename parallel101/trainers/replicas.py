"""The check that copies of the model are still equal: before steps 2, 4, 8, 16, …, bit by bit.

    rank 0   dp 0, tp 0   weights, buffers ┐ the same hash
    rank 2   dp 1, tp 0   weights, buffers ┘

Without an error each rank would train a model of its own, and the loss would not show it.
"""

from __future__ import annotations

from functools import partial

from parallel101.trainers.agreement import Agreement, tensors_of
from parallel101.trainers.trainer import Trainer


def compare_copies(trainer: Trainer) -> None:
    """Raise ValueError, on every rank, if ranks that hold the same weights and buffers no longer
    hold the same bits.
    """
    axes = [axis for axis in ("dp", "cp") if axis in trainer.axes.sizes]
    trainer.agree.all_or_none(
        "compare its copy of the model",
        partial(
            Agreement(trainer.axes.along(axes), trainer.device).check_same,
            tensors_of(trainer.model),
            f"before step {trainer.steps + 1} the copies of the model are no longer equal",
            "something changes it on some ranks only, such as an nn.Embedding with max_norm, which "
            "shortens the rows that a rank's own samples use, or code between the steps",
        ),
    )
