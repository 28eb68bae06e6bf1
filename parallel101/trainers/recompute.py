"""Recomputation: a module keeps only its inputs, and backward runs its forward again.

    forward    x ─▶ norm ─▶ attention ─▶ MLP ─▶ y       kept: x
    backward   x ─▶ norm ─▶ attention ─▶ MLP            again, with the same random numbers
               ∂x ◀── MLP ◀── attention ◀── ∂y

    "full"        each block: the least memory, for one more forward
    "selective"   the core of each attention: the most bytes saved for the least computing

This uses torch's checkpoint with use_reentrant=False. A recomputation stops once it has made the
last tensor that backward needs. So the sum over tensor-parallel ranks at the end of a block is sent
again only if something after it is kept, such as a dropout mask. The sums before it are always sent
again, and so are gathers, and all messages of experts. The core of attention sends messages along
cp only. In a trace, each recomputation
is inside a span "recompute". Source: Chen et al. (arXiv 1604.06174); Korthikanti et al. (arXiv
2205.05198), section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel101.spans import span
from parallel101.trainers.gradient_sync import nested
from parallel101.trainers.model_layers import LISTS

Recompute = str | Callable[[str], bool]
_thread = threading.local()  # .around: a context of the forward that this thread computes

# usual names of the module between query, key and value and the output layer
CORES = ("core", "core_attention", "attention_core", "inner_attention")


TWICE = (
    "changes its buffers, and recomputation would run it twice: expected a module without such "
    "side effects. Pass recompute=lambda name: …, true for modules without it; or, if it is a "
    "norm's running statistics, freeze the norm (.eval()), or use LayerNorm or GroupNorm"
)


def modules_to_recompute(recompute: Recompute, model: nn.Module) -> list[str]:
    """Return the names of the modules to recompute in backward. None is inside another.

    Args:
        recompute: "none", "selective", "full" or a function of a module's name.

    Raises ValueError if it matches no module, or one with a norm that counts each forward.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if recompute == "none":
        return []
    chosen, expected = list[str](), '"none", "selective" or "full"'
    if recompute == "full":
        chosen = list(blocks_of(model))
        expected = "blocks (modules with modules inside) in an nn.ModuleList or nn.Sequential"
    elif recompute == "selective":
        cores = [name for name in named if name.rpartition(".")[2] in CORES]
        chosen = [name for name in cores if not [*named[name].parameters()]]
        expected = f"modules without parameters that are called {' or '.join(CORES)}"
    elif callable(recompute):
        chosen = [name for name in named if recompute(name)]
        expected = f"a function that is true for some of {', '.join(list(named)[:8])}, …"
    if not chosen:
        raise ValueError(
            f"recompute={recompute!r} matches no module of {type(model).__name__}: expected "
            f"{expected}; or pass a function of a module's name, such as "
            'lambda name: name.endswith("mlp")'
        )
    for name in chosen:
        for below, norm in named[name].named_modules(prefix=name):
            if norm.training and getattr(norm, "running_mean", None) is not None:
                raise ValueError(f"{below!r} is a {type(norm).__name__}: its forward {TWICE}")
    return [name for name in chosen if not any(name.startswith(f"{n}.") for n in chosen)]


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the modules that are in a list and have modules inside."""
    for name, child in module.named_children():
        if not isinstance(module, LISTS) or isinstance(child, LISTS):
            yield from blocks_of(child, f"{prefix}{name}.")
        elif next(child.children(), None) is not None:
            yield prefix + name


def recompute_in_backward(module: nn.Module, name: str) -> None:
    """Replace the module's forward with one that keeps only its inputs."""
    inner = module.forward

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the contexts of a forward and of its repetition: that has those of the forward, so
        that its layers keep the same tensors.
        """
        around = getattr(_thread, "around", nullcontext)
        return nullcontext(), nested([partial(span, "recompute", module=name), around])

    def buffers_now() -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in module.buffers()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        before = buffers_now()
        y = checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if buffers_now() != before:
            raise RuntimeError(f"the forward of {name!r} {TWICE}")
        return y

    module.forward = forward


@contextmanager
def and_its_repetitions(around: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Run a forward in this context, and later its repetitions in backward."""
    before = getattr(_thread, "around", nullcontext)
    _thread.around = partial(nested, (before, around))
    try:
        with around():
            yield
    finally:
        _thread.around = before
