"""State that an installed library keeps in its classes: each virtual rank has its own.

    accelerate    PartialState and two other classes have a dict that all their instances in a
                  process share: the rank, the device, whether gradients are synchronised, …

A library is loaded once for all ranks (see modules.py). So without this, rank 1 would read in it
that it is rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# module → the classes whose dict `_shared_state` belongs to a process
CLASSES = {"accelerate.state": ("PartialState", "AcceleratorState", "GradientState")}
COUNT = sum(map(len, CLASSES.values()))


class ClassStates:
    """The dicts of all ranks; rank 0's are in use first. `restore()` brings back what was there."""

    def __init__(self, size: int):
        self.size = size
        self.own: dict[Any, list[dict]] = {}  # by class and rank
        self.before_run = {kind: kind._shared_state for kind in _loaded()}
        for kind in self.before_run:
            self.own[kind] = self._fresh()
            kind._shared_state = self.own[kind][0]

    def switch(self, old: int, new: int) -> None:
        """Rank `old` stops running, and rank `new` runs."""
        for name in CLASSES:
            if name in sys.modules and len(self.own) < COUNT:  # rank `old` may have imported it
                for kind in _loaded():
                    self.own.setdefault(kind, self._fresh())
        for kind, states in self.own.items():
            states[old] = kind._shared_state
            kind._shared_state = states[new]

    def restore(self) -> None:
        for kind in self.own:
            kind._shared_state = self.before_run.get(kind, {})

    def _fresh(self) -> list[dict]:
        return [{} for _ in range(self.size)]


def _loaded() -> Iterator[Any]:
    """The classes that have been imported, and keep their state in a plain dict."""
    for name, kinds in CLASSES.items():
        if (module := sys.modules.get(name)) is not None:
            for kind in (getattr(module, kind, None) for kind in kinds):
                if isinstance(kind, type) and type(vars(kind).get("_shared_state")) is dict:
                    yield kind
