"""Each virtual rank its own random numbers, as if each were a process: torch's, Python's and NumPy's, changed with the baton.

torch starts every rank from the default seed of a fresh process. Python and NumPy seed a fresh process from the system; here a rank's
number is the seed, so that ranks differ as processes do and a run is the same every time.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from parallel101.backends import torch_private

#  the functions of the module `random` are methods of one hidden generator
_FUNCTIONS = [name for name, f in vars(random).items() if isinstance(getattr(f, "__self__", None), random.Random)]


class RandomStates:
    """The random states of all ranks; those of rank 0 are in force at first. `restore()` brings back what was before.

    A rank's `torch.set_default_dtype` travels along, which torch keeps a process as well.
    """

    def __init__(self, size: int):
        self.before = (torch.default_generator.get_state(), {name: getattr(random, name) for name in _FUNCTIONS}, torch.get_default_dtype())
        fresh = torch.Generator().get_state()
        torch.default_generator.set_state(fresh)
        self.torch, self.loaded = [fresh] * size, fresh
        self.look = torch_private.generator_words()
        self.seen = self.look() if self.look else None
        self.dtype = [torch.get_default_dtype()] * size
        self.numpy = _NumpyStates(size) if "numpy.random" in sys.modules else None
        self.running = 0
        self.python: dict[int, random.Random] = {}
        vars(random).update({name: self._of_running_rank(name) for name in _FUNCTIONS})

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
        dtype = torch.get_default_dtype()
        self.dtype[old] = dtype
        if self.dtype[new] is not dtype:
            torch.set_default_dtype(self.dtype[new])
        if self.numpy is not None:
            self.numpy.switch(old, new)

    def restore(self) -> None:
        state, functions, dtype = self.before
        torch.default_generator.set_state(state)
        vars(random).update(functions)
        torch.set_default_dtype(dtype)
        if self.numpy is not None:
            self.numpy.restore()

    def _of_running_rank(self, name: str) -> Callable[..., Any]:
        """A function of the module `random` that draws from the generator of whichever rank calls it."""

        def function(*args: Any, **kwargs: Any) -> Any:
            rank = self.running
            if rank not in self.python:
                self.python[rank] = random.Random(rank)
            return getattr(self.python[rank], name)(*args, **kwargs)

        function.__name__ = name
        return function


class _NumpyStates:
    """NumPy's global generator, a Mersenne twister: 624 words and a position in them, which NumPy shows at `state_address`.

    Normals are made in pairs, and NumPy keeps the second elsewhere: only then is the slow `get_state` or `set_state` needed.
    """

    def __init__(self, size: int):
        import numpy as np

        self.module: Any = np.random  #  the global generator is the subject: its functions are the module's
        self.before = self.module.get_state()
        address = self.module.get_bit_generator().ctypes.state_address
        self.words = memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B").cast("I")
        self.keeps_normal = bool(self.before[3])
        self.states: list[Any] = []  #  of each rank: the words, or get_state()'s answer when there is a normal to keep
        for rank in range(size):
            fresh = self.module.RandomState(rank).get_state()
            self.states.append(memoryview(np.append(fresh[1], fresh[2]).astype(np.uint32).tobytes()).cast("I"))
        self.load(0)

    def switch(self, old: int, new: int) -> None:
        words = self.words
        if self.keeps_normal or words[624] != self.position or words[0] != self.word:
            state = self.module.get_state()
            self.keeps_normal = bool(state[3])
            self.states[old] = state if self.keeps_normal else memoryview(words.tobytes()).cast("I")
        self.load(new)

    def load(self, rank: int) -> None:
        state = self.states[rank]
        if isinstance(state, tuple):
            self.module.set_state(state)
            self.keeps_normal = True
        else:
            if self.keeps_normal:
                self.module.set_state(self.module.RandomState(0).get_state())
                self.keeps_normal = False
            self.words[:] = state
        self.word, self.position = self.words[0], self.words[624]

    def restore(self) -> None:
        self.module.set_state(self.before)
