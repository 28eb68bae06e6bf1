"""Random numbers of virtual ranks: each has its own torch, Python and NumPy generators.

torch starts every rank from the default seed, as in a fresh process. Python and NumPy would seed a
fresh process from the system. Here they are seeded with the rank's number instead: ranks differ, as
processes do, and a run is the same every time.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from parallel101.laboratory.record import torch_private


class TorchRandom:
    """What torch keeps once a process, as attributes: its generator's state and default dtype."""

    def __init__(self) -> None:
        # changes with every draw; get_state() would copy 5 kB at each switch
        self._fingerprint: Callable[[], Any] = torch_private.generator_words() or object
        self._last: Any = None
        self._state = torch.empty(0)

    @property
    def state(self) -> torch.Tensor:
        """The generator's state: the same tensor until a number is drawn."""
        if (fingerprint := self._fingerprint()) != self._last:
            self._state, self._last = torch.default_generator.get_state(), fingerprint
        return self._state

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)
        self._state, self._last = state, self._fingerprint()

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)


def hidden_generators() -> list[tuple[ModuleType, Any, str, Callable[[int], Any]]]:
    """Return where `random` and NumPy keep their generator.

    Each is (the module whose functions are its methods, its owner, its name there, what makes one
    from a seed). SciPy, scikit-learn and NumPy's own seed() use NumPy's.
    """
    hidden: list[tuple[ModuleType, Any, str, Callable[[int], Any]]] = [
        (random, random, "_inst", random.Random)
    ]
    # np.random is imported here, as a rank that imported it later would share one generator
    # with all
    if "numpy" in sys.modules:
        import numpy as np

        hidden.append((np.random, np.random.mtrand, "_rand", np.random.RandomState))
    return hidden


def own_random_states() -> Iterator[tuple[Any, str, Callable[[], Any]]]:
    """Yield attributes of which each rank has its own value, and what makes the next rank's."""
    of_torch, fresh = TorchRandom(), torch.Generator().get_state()
    yield of_torch, "state", lambda: fresh
    yield of_torch, "dtype", torch.get_default_dtype
    for _, owner, name, make in hidden_generators():
        yield owner, name, map(make, itertools.count()).__next__


@contextmanager
def functions_of_running_rank() -> Iterator[None]:
    """Let the functions of `random` and `numpy.random` use the running rank's generator inside.

    They are methods of the generator from before the run, and programs import them by name.
    """

    def follow(owner: Any, generator: str, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(owner, generator), name)(*args, **kwargs)

        function.__name__ = name
        return function

    with ExitStack() as undo:
        for module, owner, generator, _ in hidden_generators():
            before = getattr(owner, generator)
            methods = {
                name: f
                for name, f in vars(module).items()
                if getattr(f, "__self__", None) is before
            }
            undo.callback(vars(module).update, methods)
            vars(module).update({name: follow(owner, generator, name) for name in methods})
        yield
