"""Random numbers of virtual ranks: each has its own torch, Python and NumPy generators.

torch starts every rank from the default seed, as in a fresh process. Python and NumPy would seed a
fresh process from the system. Here they are seeded with the rank's number instead: ranks differ, as
processes do, and a run is the same every time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from parallel101.laboratory.record import torch_private


class RandomStates:
    """The random states of all ranks; rank 0's are active first.

    `restore()` brings back the states from before the run.

    `torch.set_default_dtype` is switched too, as torch keeps one per process.

    Args:
        size: how many ranks.
        own: own(owner, name, fresh) gives each rank its own attribute (RankAttributes.add).
    """

    def __init__(self, size: int, own: Callable[..., None]):
        self.before_run = (torch.default_generator.get_state(), torch.get_default_dtype())
        fresh = torch.Generator().get_state()
        torch.default_generator.set_state(fresh)
        self.torch, self.loaded = [fresh] * size, fresh
        # changes with every draw; get_state() would copy 5 kB at each switch
        self.fingerprint = torch_private.generator_words()
        self.last_fingerprint = self.fingerprint() if self.fingerprint else None
        self.dtype = [torch.get_default_dtype()] * size
        self.running = 0
        # modules, and the functions they had before
        self.replaced: list[tuple[ModuleType, dict[str, Any]]] = []
        generators = [random.Random(rank) for rank in range(size)]
        hidden = random.random.__self__  # type: ignore[attr-defined]
        self._give_each_rank(random, hidden, generators)
        # np.random is imported here, as a rank that imported it later would share one generator
        # with all
        if "numpy" in sys.modules:
            import numpy as np

            # its `_rand` is the global generator: SciPy, scikit-learn and NumPy's own seed() use it
            mtrand: Any = np.random.mtrand
            numpy = [np.random.RandomState(rank) for rank in range(size)]
            self._give_each_rank(np.random, mtrand._rand, numpy)
            own(mtrand, "_rand", iter(numpy).__next__)

    def switch(self, old: int, new: int) -> None:
        """Switch from the random states of rank `old` to those of rank `new`."""
        self.running = new
        fingerprint = self.fingerprint
        if fingerprint is None or fingerprint() != self.last_fingerprint:
            self.torch[old] = self.loaded = torch.default_generator.get_state()
        if self.torch[new] is not self.loaded:
            self.loaded = self.torch[new]
            torch.default_generator.set_state(self.loaded)
            self.last_fingerprint = fingerprint() if fingerprint else None
        dtype = self.dtype[old] = torch.get_default_dtype()
        if self.dtype[new] is not dtype:
            torch.set_default_dtype(self.dtype[new])

    def restore(self) -> None:
        state, dtype = self.before_run
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)
        for module, functions in self.replaced:
            vars(module).update(functions)

    def _give_each_rank(
        self, module: ModuleType, hidden: object, generators: Sequence[object]
    ) -> None:
        """Replace the functions of `random` or `numpy.random` by the running rank's.

        They are methods of one hidden generator.
        """
        functions = {
            name: f for name, f in vars(module).items() if getattr(f, "__self__", None) is hidden
        }
        self.replaced.append((module, functions))
        vars(module).update({name: self._of_running_rank(name, generators) for name in functions})

    def _of_running_rank(self, name: str, generators: Sequence[object]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(generators[self.running], name)(*args, **kwargs)

        function.__name__ = name
        return function
