"""Weights by name: each parameter has a generator of its own, seeded by what it is called in the
whole model.

seed 0, "blocks.2.mlp.up.weight"  →  always the same numbers,        so that a rank that holds only some of the layers, or builds
                                     in float64 and, rounded,        them in another order, has just the weights that one process
                                     in float32                      would have given them
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def generator_of(*key: int | str) -> torch.Generator:
    """A generator that gives the same numbers for the same key, on any machine, and others for
    any other key.
    """
    # torch's CPU generator looks at 32 bits of a seed
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "big"))


def initial_weight(name: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """The first value of the parameter called `name` in the whole model, of its whole `shape`, in
    float64 on the CPU; cut what you need.

    A matrix is normal with variance 1 / its last dim (so that outputs are as large as inputs), a
    vector ones where it is a weight (of a norm), zeros where it is a bias.
    """
    if len(shape) < 2:
        return torch.full(
            tuple(shape), 1.0 if name.endswith("weight") else 0.0, dtype=torch.float64, device="cpu"
        )
    return (
        torch.randn(
            tuple(shape), generator=generator_of(seed, name), dtype=torch.float64, device="cpu"
        )
        * shape[-1] ** -0.5
    )


@torch.no_grad()
def seed_weights(model: nn.Module, seed: int = 0, prefix: str = "") -> None:
    """Give every parameter its `initial_weight`; `prefix` is what stands before the names where
    `model` is a part of another.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_weight(prefix + name, parameter.shape, seed))
