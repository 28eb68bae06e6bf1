"""A deep MLP: linear, GELU, linear, GELU, …, linear. The smallest model with layers to distribute.

MLP([1024] * 9)        eight layers of 1024 × 1024        8.4 million parameters
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel101.models.seeding import seed_weights


class MLP(nn.Module):
    """A model of (batch, sizes[0]) → (batch, sizes[-1]), with a GELU after each layer but the last.

    Args:
        sizes: features between the layers: of the input, after the first layer, …, of the output;
            two or more.
        bias: whether the layers have one.
        seed: of the weights; see seeding.py.
        dtype, device: of the weights. Default: torch's.

    Example:
        >>> p101.models.MLP([4, 8, 2])(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"MLP({list(sizes)}): expected the features of the input, …, of the output, "
                "two sizes or more"
            )
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=bias, dtype=dtype, device=device) for a, b in zip(sizes, sizes[1:])
        )
        seed_weights(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.sequence():
            x = module(x)
        return x

    def sequence(self) -> list[nn.Module]:
        """Return the modules whose composition is the forward: linear, GELU, …, linear."""
        first, *others = self.layers
        return [first, *(module for layer in others for module in (nn.GELU(), layer))]
