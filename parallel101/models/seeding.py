"""Weights by name: each parameter has its own generator, seeded by its name in the model.

seed 0, "blocks.2.mlp.up.weight"  →  always the same numbers, in float64 and, rounded, in float32

So a rank that holds only some of the layers, or builds them in another order, has exactly the
weights that one process would have given them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def generator_of(*key: int | str) -> torch.Generator:
    """Return a generator that gives the same numbers for the same key, on any machine.

    Another key gives other numbers.
    """
    # torch's CPU generator uses 32 bits of a seed
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "big"))


def initial_weight(name: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Return the first value of the parameter `name` of the whole model, in float64 on the CPU.

    `shape` is that of the whole parameter; cut what you need. A matrix (outputs, inputs) is normal
    with variance 1 / inputs, so that outputs are as large as inputs. So is a stack of matrices
    (experts, inputs, outputs), as experts.py has them. A vector is ones if it is a weight (of a
    norm). A bias is zeros.
    """
    if len(shape) < 2 or name.endswith("bias"):
        value = 1.0 if name.endswith("weight") else 0.0
        return torch.full(tuple(shape), value, dtype=torch.float64, device="cpu")
    drawn = torch.empty(tuple(shape), dtype=torch.float64, device="cpu")
    inputs = shape[-2 if len(shape) == 3 else -1]
    return drawn.normal_(generator=generator_of(seed, name)) * inputs**-0.5


@torch.no_grad()
def seed_weights(model: nn.Module, seed: int = 0, prefix: str = "") -> None:
    """Give every parameter its `initial_weight`.

    If `model` is a part of another, `prefix` is what comes before its names there.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # it has no values
            continue
        parameter.copy_(initial_weight(prefix + name, parameter.shape, seed))
