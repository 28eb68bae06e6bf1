"""A rank with several pipeline stages has a gradient synchronization for each, and one for the
weights that several of its stages share. Together they are steered as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from parallel101.trainers.gradient_sync import GradientSync, Together
from parallel101.trainers.schedules.actions import Action


class StageSyncs(Together):
    """The synchronizations of this rank's stages.

    Args:
        syncs: (stages, the synchronization of the parameters that are on just these).
        actions: of this rank in a step.
    """

    def __init__(
        self, syncs: Sequence[tuple[frozenset[int], GradientSync]], actions: Sequence[Action]
    ):
        super().__init__([sync for _, sync in syncs])
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


def last_backward(stages: frozenset[int], actions: Sequence[Action]) -> Action:
    """With it the gradients of these stages are complete."""
    return [action for action in actions if action.kind in "BW" and action.stage in stages][-1]
