"""A model without chance: dropout keeps everything, and each random number is the middle of its
distribution. So the numbers of a sample don't depend on which rank computes it, with which others.

    F.dropout(x, 0.5)          x                     torch.randn_like(x)      1/2 everywhere
    torch.bernoulli(p)         1 where p ≥ 1/2       torch.randint(0, 10, …)  5 everywhere

Python's and NumPy's random numbers start from the same seed in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel101.trainers.verify.snapshot import seed_all

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# of dropping: the name of the probability, and its place among the arguments
PROBABILITY: Mapping[Any, tuple[str, int]] = {
    **{
        getattr(nn.functional, name): ("p", 1)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
    },
    nn.functional.feature_alpha_dropout: ("p", 1),
    **{
        getattr(torch, name): ("p", 1)
        for name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout")
    },
    nn.functional.scaled_dot_product_attention: ("dropout_p", 4),
    nn.functional.multi_head_attention_forward: ("dropout_p", 10),
}


def normal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Replace torch.normal."""
    mean = args[0] if args else kwargs.get("mean", 0.0)
    middle = mean + (args[1] if len(args) > 1 else kwargs.get("std", 1.0)) / 2
    return middle if isinstance(middle, Tensor) else filled(func, args, kwargs, middle)


@torch.no_grad()
def filled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Tensor:
    return func(*args, **kwargs).fill_(value)


def between(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Replace torch.randint or torch.randint_like."""
    given = [a for a in args if isinstance(a, int)]
    given = given or [kwargs[key] for key in ("low", "high") if key in kwargs]
    return filled(func, args, kwargs, sum(given[:2]) // 2)


def in_order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    found = func(*args, **kwargs)
    return torch.arange(len(found), dtype=found.dtype, device=found.device)


def likely(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Replace torch.bernoulli, which takes probabilities."""
    if len(args) > 1 or "p" in kwargs:
        return filled(func, args, kwargs, float((*args[1:], kwargs.get("p"))[0] >= 0.5))
    return (args[0] >= 0.5).to(args[0].dtype)


def likeliest(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Replace torch.multinomial."""
    found = func(*args, **kwargs)
    best = args[0].sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(found.shape[-1], device=found.device) % best.shape[-1]
    return best[..., rank]


def in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Replace a method that fills a tensor with random numbers."""
    x, a, b = (*args, None, None)[:3]
    name = func.__name__
    if name == "normal_":
        mean, std = kwargs.get("mean", a or 0.0), kwargs.get("std", 1.0 if b is None else b)
        return x.fill_(mean + std / 2)
    if name == "uniform_":
        low, high = kwargs.get("from", a or 0.0), kwargs.get("to", 1.0 if b is None else b)
        return x.fill_((low + high) / 2)
    if name == "bernoulli_":
        p = kwargs.get("p", 0.5 if a is None else a)
        return x.copy_(p >= 0.5) if isinstance(p, Tensor) else x.fill_(float(p >= 0.5))
    return x.fill_(1)


FILLS = (
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "geometric_",
    "random_",
)
INSTEAD: Mapping[Any, Callable[..., Tensor]] = {
    torch.normal: normal,
    torch.randint: between,
    torch.randint_like: between,
    torch.randperm: in_order,
    torch.bernoulli: likely,
    Tensor.bernoulli: likely,
    torch.multinomial: likeliest,
    Tensor.multinomial: likeliest,
    torch.poisson: lambda func, args, kwargs: args[0].round(),
    nn.functional.gumbel_softmax: lambda func, args, kwargs: args[0].softmax(kwargs.get("dim", -1)),
    **{
        function: lambda func, args, kwargs: filled(func, args, kwargs, 0.5)
        for function in (torch.rand, torch.rand_like, torch.randn, torch.randn_like)
    },
    **{getattr(Tensor, name): in_place for name in FILLS},
}


class WithoutChance(TorchFunctionMode):
    """Keeps torch's functions from drawing random numbers, while it is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in INSTEAD:
            return INSTEAD[func](func, args, kwargs)
        if func in PROBABILITY:
            name, place = PROBABILITY[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


@contextmanager
def deterministic(model: nn.Module, called: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model draw no random numbers of torch inside, and in each forward the same ones of
    Python and NumPy.

    Args:
        called: the modules in whose forward those begin: the model, or the parts of a pipeline.
    """
    before = []
    for module in model.modules():
        name = (
            "p"
            if isinstance(module, DROPOUTS)
            else "dropout"
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
            else None
        )
        if name is not None:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    hooks = [m.register_forward_pre_hook(lambda *_: seed_all(1), prepend=True) for m in called]
    try:
        # a mode would have what is compiled compiled again
        with nullcontext() if is_compiled(model) else WithoutChance():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in before:
            setattr(module, name, value)


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has compiled a part of the model."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )
