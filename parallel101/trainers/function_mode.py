"""Functions of torch replaced inside a block, whoever calls them there.

    with Replacing({F.batch_norm: partial(batch_norm, group)}):
        model(x)                                # its BatchNorms take the statistics of all ranks

Used by sync_batch_norm.py, weight_gradients.py, context/cut_time.py and training_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class Replacing(TorchFunctionMode):
    """Calls other functions in place of some of torch's, while it is active."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]):
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))
