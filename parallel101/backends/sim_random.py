"""Each virtual rank its own random numbers, as if each were a process: torch's, Python's and NumPy's, changed with the baton.

torch starts every rank from the default seed of a fresh process. Python and NumPy seed a fresh process from the system; here a rank's
number is the seed, so that ranks differ as processes do and a run is the same every time.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_FUNCTIONS = [name for name, f in vars(random).items() if getattr(f, "__self__", None) is getattr(random.random, "__self__", None)]


class RandomStates:
    """The random states of all ranks; those of `0` are in force at first. `restore()` brings back what was before.

    A rank's `torch.set_default_dtype` travels along, which torch keeps a process as well.
    """

    def __init__(self, size: int):
        self.before = (torch.default_generator.get_state(), {name: getattr(random, name) for name in _FUNCTIONS}, torch.get_default_dtype())
        fresh = torch.Generator().get_state()
        self.torch = [fresh] * size
        self.python = [_bound(random.Random(rank)) for rank in range(size)]
        self.dtype = [torch.get_default_dtype()] * size
        self.numpy = _NumpyStates(size) if "numpy.random" in sys.modules else None
        torch.default_generator.set_state(fresh)
        vars(random).update(self.python[0])

    def switch(self, old: int, new: int) -> None:
        """The baton goes from one rank to another."""
        generator = torch.default_generator
        self.torch[old] = generator.get_state()
        generator.set_state(self.torch[new])
        vars(random).update(self.python[new])
        if self.numpy is not None:
            self.numpy.switch(old, new)
        dtype = torch.get_default_dtype()
        self.dtype[old] = dtype
        if self.dtype[new] is not dtype:
            torch.set_default_dtype(self.dtype[new])

    def restore(self) -> None:
        state, functions, dtype = self.before
        torch.default_generator.set_state(state)
        vars(random).update(functions)
        torch.set_default_dtype(dtype)
        if self.numpy is not None:
            self.numpy.restore()


def _bound(generator: random.Random) -> dict[str, Any]:
    """The functions of the module `random`, as this generator's."""
    return {name: getattr(generator, name) for name in _FUNCTIONS}


class _NumpyStates:
    """NumPy's global generator. Its state is slow to read, so it is read only when the numbers in memory show that it has moved on."""

    def __init__(self, size: int):
        import numpy as np

        self.module = np.random
        self.before = np.random.get_state()
        self.states: list[Any] = [None] * size
        self.loaded: Any = None
        self.words = (ctypes.c_uint32 * 625).from_address(np.random.get_bit_generator().ctypes.state_address)  #  624 of state, and a position
        self._load(0)

    def switch(self, old: int, new: int) -> None:
        #  a normal that is kept for the next call moves nothing when it is taken
        if (self.words[624], self.words[0]) != self.seen or self.states[old][3]:
            self.states[old] = self.loaded = self.module.get_state()
        if self.states[new] is not self.loaded:
            self._load(new)

    def _load(self, rank: int) -> None:
        if self.states[rank] is None:
            self.states[rank] = self.module.RandomState(rank).get_state()
        self.loaded = self.states[rank]
        self.module.set_state(self.loaded)
        self.seen = (self.words[624], self.words[0])

    def restore(self) -> None:
        self.module.set_state(self.before)
