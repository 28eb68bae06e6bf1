"""A shape error in the code between cut layers, in words: this code sees some of the features, and
may count all of them.

q, k, v = self.qkv(x).split(self.width, -1)      each of n ranks has 3 · width / n features
q.view(batch, time, self.num_heads, -1)          and num_heads / n heads
"""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

from torch import nn

TIME = "Take the time from an output of these layers: sequence_parallel cuts the input along time. "
SHAPES = re.compile("shape|size|unpack|unflatten", re.IGNORECASE)


def explain_shape_errors(module: nn.Module, name: str, ranks: int, cut_time: bool) -> None:
    """From now on, a shape error in the module's forward is a ValueError that says what may be
    wrong, with torch's error as its cause.
    """
    if "forward" in vars(module) or type(module).forward is nn.Sequential.forward:
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(self).forward(self, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if not is_of_shapes(error):
                raise
            whole = [n for n, layer in self.named_modules() if isinstance(layer, nn.Linear)]
            uncut = f"The plan does not cut {', '.join(map(repr, whole))} in it. " if whole else ""
            raise ValueError(
                f"{repr(name) if name else 'the model'} ({type(self).__name__}) raised "
                f"{str(error).splitlines()[0]!r}. Its layers are cut over {ranks} ranks, so its "
                f"code sees 1/{ranks} of their features and heads. {uncut}Where it counts those of "
                "the whole model, write -1, or give the plan the attribute that counts heads: "
                f'p101.column(heads="num_heads"). {TIME * cut_time}Or leave these layers out of '
                "the plan"
            ) from error

    module.forward = MethodType(forward, module)


def is_of_shapes(error: Exception) -> bool:
    """Whether torch, Python's unpacking or einops found that sizes do not fit."""
    if isinstance(error, ValueError):
        return "to unpack" in str(error)
    of_torch = type(error) is RuntimeError or type(error).__name__ == "EinopsError"
    return of_torch and SHAPES.search(str(error)) is not None
