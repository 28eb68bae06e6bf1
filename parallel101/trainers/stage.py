"""One rank's list of actions, carried out: the forward or the backward of one microbatch each.

    ["0F0", "0B0", "0F1", "0B1"]        stage 0: forward of microbatch 0, its backward, forward of microbatch 1, its backward

Actions are those of a Schedule (schedules/). Gradient accumulation is 1F1B on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel101.record.spans import span
from parallel101.trainers.gradients import GradientSync
from parallel101.trainers.schedules.actions import Action, ScheduleError
from parallel101.trainers.support.arguments import LossFn, check_depends, check_loss

NAMES = {"F": "forward", "B": "backward"}


class Stage:
    """The part of the model that this rank computes (without a pipeline: all of it), and what it keeps during a step.

    Attributes:
        actions: what to run in a step, in order.
        microbatches: how many of them a step has.
        failure: the first error of this step. After it nothing more is computed, but every remaining action still sends and receives
            what other ranks wait for.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, gradient_sync: GradientSync, actions: Sequence[str], autocast: torch.dtype | None
    ):
        self.model, self.loss_fn, self.gradient_sync, self.autocast = model, loss_fn, gradient_sync, autocast
        self.actions = [Action.parse(text) for text in actions]
        if {action.kind for action in self.actions} != {"F", "B"}:
            raise ScheduleError(f"actions={list(actions)!r}: expected forwards and backwards (F and B) of this one stage")
        self.microbatches = 1 + max(action.microbatch for action in self.actions)
        self.last_backward = [action for action in self.actions if action.kind == "B"][-1]
        self.losses: dict[int, Tensor] = {}
        self.failure: Exception | None = None

    def begin(self, inputs: Tensor, targets: Tensor, total: int) -> None:
        """A step begins, on this rank's share of a batch of `total` samples."""
        self.inputs, self.targets, self.total = inputs.tensor_split(self.microbatches), targets.tensor_split(self.microbatches), total
        self.losses, self.failure = {}, None

    def run(self, action: Action) -> None:
        """Compute one action, and keep its error in `failure`."""
        last = action == self.last_backward
        try:
            with (
                span(NAMES[action.kind], microbatch=action.microbatch),
                self.gradient_sync.forward() if action.kind == "F" else self.gradient_sync.backward(last),
            ):
                if self.failure is None:
                    self.forward(action.microbatch) if action.kind == "F" else self.backward(action.microbatch)
        except Exception as error:
            self.failure = self.failure or error

    def forward(self, i: int) -> None:
        x, y = self.inputs[i], self.targets[i]
        self.losses[i] = self.loss(x, y) * (len(x) / self.total)
        check_depends(self.losses[i])

    def backward(self, i: int) -> None:
        torch.autograd.backward(self.losses[i])
        self.losses[i] = self.losses[i].detach()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over these samples."""
        with torch.autocast(inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return check_loss(self.loss_fn(self.model(inputs), targets))
