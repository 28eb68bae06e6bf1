"""One rank's list of actions, carried out: the forward or the backward of one microbatch each.

    ["0F0", "0B0", "0F1", "0B1"]        stage 0: forward of microbatch 0, its backward, forward of microbatch 1, its backward

Actions are in torch.distributed.pipelining's text form. Gradient accumulation is the simplest such list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel101.record.spans import span
from parallel101.trainers.arguments import LossFn, check_depends, check_loss
from parallel101.trainers.gradients import GradientSync

FORWARD, BACKWARD = "F", "B"
NAMES = {FORWARD: "forward", BACKWARD: "backward"}


class Action(NamedTuple):
    stage: int
    kind: str
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """ "0F3" → Action(0, "F", 3). Raises ValueError for another text."""
        found = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if found is None:
            raise ValueError(f"action {text!r}: expected stage, F or B, and microbatch, such as '0F3'")
        return cls(int(found[1]), found[2], int(found[3]))


def accumulation(microbatches: int) -> list[str]:
    """Forward and backward of one microbatch after the other."""
    return [f"0{kind}{i}" for i in range(microbatches) for kind in (FORWARD, BACKWARD)]


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
        self.microbatches = 1 + max(action.microbatch for action in self.actions)
        self.last_backward = [action for action in self.actions if action.kind == BACKWARD][-1]
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
                self.gradient_sync.forward() if action.kind == FORWARD else self.gradient_sync.backward(last),
            ):
                if self.failure is None:
                    self.forward(action.microbatch) if action.kind == FORWARD else self.backward(action.microbatch)
        except Exception as error:
            self.failure = self.failure or error

    def forward(self, i: int) -> None:
        x, y = self.inputs[i], self.targets[i]
        self.losses[i] = self.loss(x, y) * (len(x) / self.total)
        check_depends(self.losses[i])

    def backward(self, i: int) -> None:
        self.losses[i].backward()
        self.losses[i] = self.losses[i].detach()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over these samples."""
        with torch.autocast(inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return check_loss(self.loss_fn(self.model(inputs), targets))
