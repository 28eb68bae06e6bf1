"""A rank with several pipeline stages has a gradient synchronisation for each, and one for the
weights that several of them share. Together they are steered as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from parallel101.trainers.gradient_sync import GradientSync


class Together(GradientSync):
    """The synchronisations of a rank that has several stages, as one.

    They begin and finish in their order, the same on all ranks.
    """

    def __init__(self, syncs: Sequence[GradientSync]):
        self.syncs = syncs
        self.owned = {name: p for sync in syncs for name, p in sync.owned.items()}
        self.placements = {
            name: pieces for sync in syncs for name, pieces in sync.placements.items()
        }

    def begin(self) -> None:
        for sync in self.syncs:
            sync.begin()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with ExitStack() as around:
            for sync in self.syncs:
                around.enter_context(sync.forward())
            yield

    def finish(self) -> list[str]:
        return [name for sync in self.syncs for name in sync.finish()]

    def publish(self) -> None:
        for sync in self.syncs:
            sync.publish()

    def held(self) -> Mapping[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for sync in self.syncs:
            for kind, tensors in sync.held().items():
                found.setdefault(kind, []).extend(tensors)
        return found

    def peaks(self) -> Mapping[str, int]:
        kinds = dict.fromkeys(kind for sync in self.syncs for kind in sync.peaks())
        return {kind: sum(sync.peaks().get(kind, 0) for sync in self.syncs) for kind in kinds}

    def describe(self) -> str:
        return "; ".join(sync.describe() for sync in self.syncs)
