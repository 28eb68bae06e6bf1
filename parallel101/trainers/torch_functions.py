"""Functions of torch replaced inside a block, whoever calls them there; and functions with a
backward of their own.

    with Replacing({F.batch_norm: partial(batch_norm, group)}):
        model(x)                                # its BatchNorms take the statistics of all ranks

    y = GraphNode.apply(run, x)                 # run(x) → y, and a function: ∂y → ∂x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


class Replacing(TorchFunctionMode):
    """Calls other functions in place of some of torch's, while it is active."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]):
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


class GraphNode(Function):
    """A node of autograd's graph. `run(x)` returns its result, the function that makes x's gradient
    of the result's, and the tensors that this function takes besides. Autograd saves these.

    The result also depends on `ties`, which get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], tuple[Any, ...]], x: Tensor, *ties: Any) -> Any:
        y, ctx.transpose, *saved = run(x)
        ctx.save_for_backward(*saved)
        ctx.ties = len(ties)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.transpose(g, *ctx.saved_tensors), *[None] * ctx.ties
