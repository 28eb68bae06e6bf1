"""A model without chance: no random number depends on which rank computes a sample, with which
others.

    attention, nn.LSTM                      dropout's probability is 0
    F.dropout, torch.bernoulli              1 everywhere
    torch.randperm, torch.multinomial       in order; the likeliest
    torch.randn, x.uniform_(2, 4), …        the middle of the range

Python's and NumPy's random numbers start from the same seed in each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from parallel101.trainers.verify.snapshot import seed_all


class WithoutChance(TorchDispatchMode):
    """Replaces the results of torch's random operations, while it is active."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        place, name = place_of_dropout(func), func.overloadpacket.__name__
        if place is not None and place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        result = func(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor)
        if not drawn or place is not None or name.startswith("rrelu"):
            return result
        if name.startswith("bernoulli"):
            return result.fill_(1)
        if name == "randperm":
            return result.copy_(torch.arange(len(result)))
        if name == "multinomial":
            best = args[0].sort(dim=-1, descending=True, stable=True).indices
            return result.copy_(best[..., torch.arange(result.shape[-1]) % best.shape[-1]])
        # mean and deviation, or the ends of the range
        numbers = [a for a in args if isinstance(a, int | float)][:2]
        return result.fill_(sum(numbers) / 2 if numbers else 0.5)


@cache
def place_of_dropout(func: Any) -> int | None:
    """Return the position of the argument that is the probability of dropping, if it has one."""
    names = {"dropout", "dropout_p", *["p"] * ("dropout" in func.overloadpacket.__name__)}
    arguments = enumerate(func._schema.arguments)
    return next((place for place, argument in arguments if argument.name in names), None)


@contextmanager
def deterministic(model: nn.Module, called: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model draw no random numbers of torch inside, and in each forward the same ones of
    Python and NumPy.

    Args:
        called: the modules in whose forward those begin: the model, or the parts of a pipeline.
    """
    compiled = any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )
    # torch.compile would never again compile what it has met inside of a mode
    dropouts = [m for m in model.modules() if compiled and isinstance(m, _DropoutNd)]
    before = [module.p for module in dropouts]
    hooks = [m.register_forward_pre_hook(lambda *_: seed_all(1), prepend=True) for m in called]
    try:
        for module in dropouts:
            module.p = 0.0
        with nullcontext() if compiled else WithoutChance():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, p in zip(dropouts, before):
            module.p = p
