"""Weights that are slightly different, so that one which is zero now (LoRA's B, a head, a bias)
hides nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel101.trainers.trainer import Trainer


def noise(name: str, shape: Sequence[int]) -> Tensor:
    """For this parameter, the same on every rank: about a tenth of what an initial weight of this
    shape would be.

    Fractional parts of the multiples of the golden ratio: as irregular as this needs, and faster
    than random numbers.
    """
    start = zlib.crc32(name.encode()) / 2**32
    steps = (
        torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
        .mul_(0.6180339887498949)
        .add_(start)
        .frac_()
    )
    return steps.sub_(0.5).mul_(0.3 / max(1, shape[-1] if shape else 1) ** 0.5).view(tuple(shape))


def perturbed(values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    moved = {name: moved_by(values[name], noise(name, values[name].shape)) for name in names}
    return {**values, **moved}


def moved_by(t: Tensor, step: Tensor) -> Tensor:
    return (t.to(torch.complex128 if t.is_complex() else torch.float64) + step.to(t.device)).to(
        t.dtype
    )


@torch.no_grad()
def perturb_owned(trainer: Trainer) -> None:
    for name, p in trainer.owned.items():
        p.copy_(
            moved_by(
                p.detach(),
                trainer.layout.cut(name, noise(name, trainer.layout.entries[name].shape)),
            )
        )
    trainer.sync.publish()
