"""A rank with several pipeline stages has a gradient synchronisation for each, and one for the
weights that several of its stages share. Together they are steered as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.schedules.actions import Action


class StageSyncs(GradientSync):
    """The synchronisations of this rank's stages. They begin and finish in their order, which is
    the same on all ranks.

    Args:
        syncs: (stages, the synchronisation of the parameters that are on just these).
        actions: of this rank in a step.
    """

    def __init__(
        self, syncs: Sequence[tuple[frozenset[int], GradientSync]], actions: Sequence[Action]
    ):
        self.syncs = [sync for _, sync in syncs]
        super().__init__({name: p for sync in self.syncs for name, p in sync.owned.items()})
        self.placements = {name: at for sync in self.syncs for name, at in sync.placements.items()}
        self.zero_stage = max((sync.zero_stage for sync in self.syncs), default=0)
        self.on_stage = [(stages, sync, last_backward(stages, actions)) for stages, sync in syncs]

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Goes around what a stage computes."""
        with ExitStack() as contexts:
            for stages, sync, last in self.on_stage:
                if action.stage in stages:
                    contexts.enter_context(
                        sync.forward()
                        if action.kind == "F"
                        else sync.backward(action.kind, action == last)
                    )
            yield

    def begin(self) -> None:
        for sync in self.syncs:
            sync.begin()

    def finish(self) -> list[str]:
        return [name for sync in self.syncs for name in sync.finish()]

    def publish(self) -> None:
        for sync in self.syncs:
            sync.publish()

    def held(self) -> Mapping[str, list[Tensor]]:
        return merged(self.syncs, lambda sync: sync.held(), [])

    def peaks(self) -> Mapping[str, int]:
        return merged(self.syncs, lambda sync: sync.peaks(), 0)

    def describe(self) -> str:
        return "; ".join(sync.describe() for sync in self.syncs)


def last_backward(stages: frozenset[int], actions: Sequence[Action]) -> Action:
    """With it the gradients of these stages are complete."""
    return [action for action in actions if action.kind in "BW" and action.stage in stages][-1]


def merged(
    syncs: Sequence[GradientSync], of: Callable[[GradientSync], Mapping], zero: object
) -> dict:
    """Kind → what all of them have of it, added up."""
    found: dict = {}
    for sync in syncs:
        for kind, value in of(sync).items():
            found[kind] = found.get(kind, zero) + value
    return found
