"""Each virtual rank its own random numbers, as if each were a process: torch's, Python's and NumPy's, changed with the baton.

torch starts every rank from the default seed of a fresh process. Python and NumPy seed a fresh process from the system; here a rank's
number is the seed, so that ranks differ as processes do and a run is the same every time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from parallel101.record import torch_private


class RandomStates:
    """The random states of all ranks; those of rank 0 are in force at first. `restore()` brings back what was before.

    A rank's `torch.set_default_dtype` travels along, which torch keeps a process as well.
    """

    def __init__(self, size: int):
        self.before = (torch.default_generator.get_state(), torch.get_default_dtype())
        fresh = torch.Generator().get_state()
        torch.default_generator.set_state(fresh)
        self.torch, self.loaded = [fresh] * size, fresh
        self.look = torch_private.generator_words()
        self.seen = self.look() if self.look else None
        self.dtype = [torch.get_default_dtype()] * size
        self.running = 0
        self.replaced: list[tuple[ModuleType, dict[str, Any]]] = []  #  what was where before
        self._give_each_rank(random, random.random.__self__, [random.Random(rank) for rank in range(size)])  # type: ignore[attr-defined]
        self.mtrand: Any = None
        if "numpy" in sys.modules:  #  its `random` is imported when first asked for: by a rank, later, it would be beyond our reach
            import numpy as np

            self.mtrand = np.random.mtrand  #  its `_rand` is the global generator; SciPy, scikit-learn and NumPy's own seed() look there
            self.numpy = [np.random.RandomState(rank) for rank in range(size)]
            self._give_each_rank(np.random, self.mtrand._rand, self.numpy)
            self.replaced.append((self.mtrand, {"_rand": self.mtrand._rand}))
            self.mtrand._rand = self.numpy[0]

    def switch(self, old: int, new: int) -> None:
        """The baton goes from one rank to another."""
        self.running = new
        look = self.look
        if look is None or look() != self.seen:
            self.torch[old] = self.loaded = torch.default_generator.get_state()
        if self.torch[new] is not self.loaded:
            self.loaded = self.torch[new]
            torch.default_generator.set_state(self.loaded)
            self.seen = look() if look else None
        dtype = self.dtype[old] = torch.get_default_dtype()
        if self.dtype[new] is not dtype:
            torch.set_default_dtype(self.dtype[new])
        if self.mtrand is not None:
            self.mtrand._rand = self.numpy[new]

    def restore(self) -> None:
        state, dtype = self.before
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)
        for module, names in self.replaced:
            vars(module).update(names)

    def _give_each_rank(self, module: ModuleType, hidden: object, generators: Sequence[object]) -> None:
        """The functions of `random` and `numpy.random` are methods of a hidden generator: let them be those of the running rank's."""
        functions = {name: f for name, f in vars(module).items() if getattr(f, "__self__", None) is hidden}
        self.replaced.append((module, functions))
        vars(module).update({name: self._of_running_rank(name, generators) for name in functions})

    def _of_running_rank(self, name: str, generators: Sequence[object]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(generators[self.running], name)(*args, **kwargs)

        function.__name__ = name
        return function
