"""A model without chance: no random number depends on which rank computes a sample, with which
others.

    attention, nn.LSTM                      dropout's probability is 0
    F.dropout, torch.bernoulli              1 everywhere
    torch.randperm                          in order
    torch.randn, x.uniform_(2, 4), …        the middle of the range

Python's and NumPy's random numbers start from the same seed in each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from parallel101.trainers.options import Trainer
from parallel101.trainers.verify.snapshot import Snapshot, seed_all


class WithoutChance(TorchDispatchMode):
    """Replaces the results of torch's random operations, while it is active.

    Attributes:
        met: whether there was one.
    """

    met = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if (chance := chance_of(func)) is None:
            return func(*args, **(kwargs or {}))
        self.met, (name, place) = True, chance
        if place is not None:
            given = (0.0,) if place < len(args) else ()
            return func(*args[:place], *given, *args[place + 1 :], **(kwargs or {}))
        # one in place need not draw
        result = args[0] if name.endswith("_") else func(*args, **(kwargs or {}))
        if name.startswith("bernoulli"):
            return result.fill_(1)
        if name == "randperm":
            return result.copy_(torch.arange(len(result)))
        # mean and deviation, or the ends of the range
        numbers = [a for a in args if isinstance(a, int | float)][:2]
        return result.fill_(sum(numbers) / 2 if numbers else 0.5)


@cache
def chance_of(func: Any) -> tuple[str, int | None] | None:
    """Return the name of an operation that draws random numbers, and the position of the argument
    that is the probability of dropping, if it has one; None for other operations.
    """
    name = func.overloadpacket.__name__
    names = {"dropout", "dropout_p", *["p"] * ("dropout" in name)}
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            return name, place
    draws = torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("rrelu")
    return (name, None) if draws else None


@contextmanager
def deterministic(trainer: Trainer, draws: bool = True) -> Iterator[WithoutChance]:
    """Let the model draw no random numbers of torch inside, and in each forward the same ones of
    Python and NumPy. Afterwards they go on where they were before.

    Args: draws: False if it is known to draw none but in nn.Dropout, which saves time.
    """
    model, mode, random_numbers = trainer.model, WithoutChance(), Snapshot()
    called = getattr(trainer.runner, "parts", {0: model}).values()
    compiled = any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )
    # For speed, and for what is compiled: torch.compile would never again compile what it has met
    # inside of a mode.
    dropouts = [
        (module, name, value)
        for module in model.modules()
        for name in (("p",) if isinstance(module, _DropoutNd) else ("dropout",))
        if isinstance(value := vars(module).get(name), float)
    ]
    hooks = [m.register_forward_pre_hook(lambda *_: seed_all(1), prepend=True) for m in called]
    try:
        for module, name, _ in dropouts:
            setattr(module, name, 0.0)
        with mode if draws and not compiled else nullcontext():
            yield mode
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in dropouts:
            setattr(module, name, value)
        random_numbers.restore()
