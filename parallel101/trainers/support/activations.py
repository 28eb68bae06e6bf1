"""The activations kept for the backward pass, over time: the result of `count_activations`.

    bytes          ▂▃▅▆█▇▅▃▁          rises in forward, falls in backward
    by microbatch  0 0 1 1 1 0 …      which ones the peak consists of
    by module      blocks.0.mlp …     which code saved them

How it is counted is in count_activations.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallel101.trainers.support.memory import readable

OUTSIDE = "(outside of the model)"  # where the loss saves
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module's name: blocks.3.mlp


class Phase(NamedTuple):
    """A forward or a backward, or one half of it: the span in which something was saved."""

    name: str  # "forward", "backward", "input gradient", "weight gradient"; "" outside of them
    microbatch: int | None = None
    stage: int | None = None

    def __str__(self) -> str:
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{self.name or 'the program'}{of}" + (
            "" if self.stage is None else f" on stage {self.stage}"
        )


class Kept(NamedTuple):
    """A storage that autograd keeps for the backward pass."""

    nbytes: int  # of the whole storage, of which the saved tensor may be a part
    module: str  # whose code saved it first; "" is the model's own
    phase: Phase  # in which it was saved
    dtype: str  # of the tensor that was saved first
    shape: tuple[int, ...]


class Change(NamedTuple):
    """An event: a storage was saved for the first time, or its memory was freed."""

    kept: int  # index in `Activations.kept`
    saved: bool
    phase: int  # index in `Activations.phases`
    held: int  # bytes afterwards


@dataclass
class Activations:
    """The tensors that autograd kept for backward in a `count_activations` block, on one rank.

    Attributes:
        kept: every storage that was saved, in order.
        changes: when each was saved and freed.
        phases: the forwards and backwards, in order. The first one is "", for what is outside.
    """

    kept: list[Kept] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=lambda: [Phase("")])

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return max((change.held for change in self.changes), default=0)

    def at_peak(self) -> list[Kept]:
        """Return the storages held when the most bytes were held for the first time."""
        peak, held = self.peak, set[int]()
        for change in self.changes:
            held.symmetric_difference_update([change.kept])
            if change.held == peak:
                break
        return [self.kept[i] for i in sorted(held)]

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return the bytes at the peak, by module.

        Args:
            depth: how many parts of a name to keep: "blocks.0" for 2. None: all.
        """
        return added(self.at_peak(), lambda kept: ".".join(kept.module.split(".")[:depth]))

    def by_microbatch(self) -> dict[int | None, int]:
        """Return the bytes at the peak, by microbatch; None where no span named a microbatch."""
        return added(self.at_peak(), lambda kept: kept.phase.microbatch)

    def __str__(self) -> str:
        if not self.changes:
            return "no activations were saved for a backward pass"
        at = next(change for change in self.changes if change.held == self.peak)
        lines = [f"{readable(self.peak)} of activations at the peak, in {self.phases[at.phase]}"]
        microbatches = self.by_microbatch()
        if microbatches.keys() != {None}:
            lines += [f"{readable(n):>10}   microbatch {i}" for i, n in microbatches.items()]
        modules = added(self.at_peak(), lambda kept: NUMBER.sub("*", kept.module) or "(the model)")
        lines += [
            f"{readable(n):>10}   {name}"
            for name, n in sorted(modules.items(), key=lambda item: -item[1])
        ]
        return "\n".join(lines)

    __repr__ = __str__


def added(kept: Iterable[Kept], key: Callable[[Kept], Any]) -> dict[Any, int]:
    """Return, for each key, the bytes of all that have it."""
    found: dict[Any, int] = defaultdict(int)
    for one in kept:
        found[key(one)] += one.nbytes
    return dict(found)
