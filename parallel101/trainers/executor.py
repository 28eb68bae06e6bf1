"""One rank's list of actions, carried out. Every schedule runs in this loop, on one stage or many.

    0F3   forward of microbatch 3 on stage 0                       0SEND_F3   its output, to the next stage
    0B3   its backward; or 0I3, the input gradient,                0RECV_B3   post the receive of its output's gradient
          and 0W3, the weight gradients                            1SEND_B3   the input's gradient, to the stage before

Without a pipeline there is one stage and nothing to send: gradient accumulation is 1F1B on one
stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.mesh import split_sizes
from parallel101.record.spans import span
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.pipeline.messages import Messages, activations, is_first_forward
from parallel101.trainers.schedules.actions import COMPUTE, Action, ScheduleError
from parallel101.trainers.schedules.check import partner
from parallel101.trainers.support.arguments import LossFn, check_depends, loss_and_weight
from parallel101.trainers.support.batches import Batch, call, count_samples, split
from parallel101.trainers.weight_gradients import WeightGradients

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Held(NamedTuple):
    """What a stage keeps of a microbatch from its forward to the end of its backward."""

    x: Any
    y: Tensor
    later: WeightGradients


class Executor:
    """The stages that this rank computes, and what it keeps during a step.

    Args: parts: global stage → its part of the model; without a pipeline {0: the model}. loss_fn:
        None if the model returns its loss. actions: of this rank, in order, with sends and
        receives. stages: how many the whole model has. syncs: (stages of this rank, how their
        gradients are synchronised). messages: with other
        stages; None without a pipeline. goes_on: after an error, take part in every remaining
        message, so that the other ranks reach the end of the step.

    Attributes: microbatches: how many of them a step has. Those without samples are left out, with
        their messages. losses: microbatch → its share of the loss; on the last stage only. weights:
        microbatch → the weight of its loss, if loss_fn returns sums and weights. Then `losses` has
        the sums. failure: the first error of this step. After it nothing more is computed.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        loss_fn: LossFn | None,
        actions: Sequence[Action],
        *,
        stages: int,
        syncs: Sequence[tuple[frozenset[int], GradientSync]],
        device: torch.device,
        messages: Messages | None = None,
        autocast: torch.dtype | None = None,
        goes_on: bool = True,
    ):
        self.parts, self.loss_fn, self.actions, self.last_stage = (
            parts,
            loss_fn,
            actions,
            stages - 1,
        )
        self.syncs, self.device, self.messages, self.autocast, self.goes_on = (
            syncs,
            device,
            messages,
            autocast,
            goes_on,
        )
        kinds = {action.kind for action in actions if action.kind in COMPUTE}
        if not {"F"} < kinds:
            raise ScheduleError(
                f"actions={[str(action) for action in actions]}: expected forwards (F) and "
                "their backwards (B, or I and W)"
            )
        self.microbatches = 1 + max(action.microbatch for action in actions)
        self.split = {(action.stage, action.microbatch) for action in actions if action.kind == "I"}
        self.last = [
            [a for a in actions if a.kind in "BW" and a.stage in of_sync][-1]
            for of_sync, _ in syncs
        ]
        self.run_by = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward,
            "W": self.weight_gradients,
        }
        self.losses: dict[int, Tensor] = {}
        self.weights: dict[int, float] = {}
        self.failure: Exception | None = None

    def begin(self, inputs: Batch, targets: Batch, total: int, shape: Hashable = None) -> None:
        """A step begins, on this rank's share of a batch of `total` samples.

        `shape`: of a sample, the same on all stages.
        """
        sizes = split_sizes(count_samples(inputs), self.microbatches)
        self.prepare(split(inputs, sizes), split(targets, sizes), sizes, total, shape)

    def prepare(
        self,
        inputs: Sequence[Batch],
        targets: Sequence[Batch],
        samples: Sequence[int],
        total: int,
        shape: Hashable,
        forward_only: bool = False,
    ) -> None:
        self.inputs, self.targets, self.samples, self.total, self.forward_only = (
            inputs,
            targets,
            samples,
            total,
            forward_only,
        )
        self.losses, self.weights, self.failure, self.broken = {}, {}, None, False
        self.held: dict[tuple[int, int], Held] = {}  # by stage and microbatch
        self.later: dict[tuple[int, int], WeightGradients] = {}
        # what a SEND sends, or the next stage on this rank takes
        self.results: dict[Action, Tensor] = {}
        if self.messages is not None:
            self.messages.begin(
                [(count, shape) if count else None for count in samples], forward_only
            )

    def run(self, action: Action) -> None:
        """Compute one action, or start one message. An error is kept in `failure`."""
        try:
            if action.kind in COMPUTE:
                self.compute(action)
            elif not self.samples[action.microbatch]:
                return
            elif self.messages is not None and action.kind.startswith("SEND"):
                self.messages.send(action, self.results.pop(action, None))
            elif self.messages is not None:
                self.messages.post(action)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.failure, self.broken = self.failure or error, True
        if not self.goes_on:
            raise error

    def compute(self, action: Action) -> None:
        stage, kind, i = action[:3]
        arrived = self.receive(action) if self.samples[i] else None
        labels = {"microbatch": i, "stage": stage} if self.last_stage else {"microbatch": i}
        with ExitStack() as around:
            around.enter_context(span(NAMES[kind], **labels))
            for (stages, sync), last in zip(self.syncs, self.last):
                if stage in stages:
                    around.enter_context(
                        sync.forward() if kind == "F" else sync.backward(kind, action == last)
                    )
            if self.samples[i] and not self.broken:
                self.run_by[kind](stage, i, arrived)

    def receive(self, action: Action) -> Tensor | None:
        """What it needs from another stage."""
        stage, kind, i = action[:3]
        if kind == "W" or stage == (0 if kind == "F" else self.last_stage):
            return None
        receive = Action(stage, "RECV_F" if kind == "F" else "RECV_B", i)
        send = partner(receive)
        if send.stage in self.parts:
            arrived = self.results.pop(send, None)
            if kind == "F" and arrived is not None:
                # the next stage may change it in place, and backward may need it as it was
                arrived = arrived.clone()
        else:
            assert self.messages is not None
            arrived = self.messages.take(receive)
        self.broken = self.broken or arrived is None
        return arrived

    # ── what is computed ──

    def forward(self, stage: int, i: int, arrived: Tensor | None) -> None:
        x = (
            self.inputs[i]
            if arrived is None
            else arrived.requires_grad_(arrived.is_floating_point())
        )
        later = WeightGradients(split=(stage, i) in self.split)
        with later.forward():
            with self.casting():
                y = call(self.parts[stage], x)
                if stage == self.last_stage:
                    y = self.loss(i, y)
            if stage == self.last_stage:
                self.losses[i] = y.detach()
            else:
                self.results[Action(stage, "SEND_F", i)] = activations(stage, y)
        if not self.forward_only:
            self.held[stage, i] = Held(x, y, later)

    def backward(self, stage: int, i: int, arrived: Tensor | None) -> None:
        x, y, later = self.held.pop((stage, i))
        if y.requires_grad:
            torch.autograd.backward(y, arrived)
        if stage:
            self.results[Action(stage, "SEND_B", i)] = (
                torch.zeros_like(x) if x.grad is None else x.grad
            )
        if later.split:
            self.later[stage, i] = later

    def weight_gradients(self, stage: int, i: int, arrived: Tensor | None) -> None:
        self.later.pop((stage, i)).run()

    def loss(self, i: int, outputs: Any) -> Tensor:
        """This microbatch's part of the step's loss: its mean, weighted by its samples, or the
        sum that loss_fn returns with a weight.
        """
        loss, weight = loss_and_weight(self.loss_fn, outputs, self.targets[i])
        if not self.forward_only:
            check_depends(loss)
        if weight is None:
            return loss * (self.samples[i] / self.total)
        self.weights[i] = weight
        return loss

    def casting(self) -> Any:
        return torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        )

    def finish(self) -> None:
        """All messages of the step have left."""
        if self.messages is not None:
            self.messages.finish()

    def forget(self) -> None:
        """The step failed. To be called on all ranks, also on those that computed all of it:
        see Messages.forget.
        """
        if self.messages is not None:
            self.messages.forget()

    def evaluate(self, inputs: Batch, targets: Batch, shape: Hashable) -> tuple[float, float]:
        """The sum of the losses of these samples and its weight, which is the number of samples
        unless loss_fn returns one.

        It runs one microbatch without a backward. (0, 0) on ranks that don't have the last stage.
        """
        samples = count_samples(inputs)
        self.prepare([inputs], [targets], [samples], samples, shape, forward_only=True)
        for action in filter(is_first_forward, self.actions):
            self.run(action)
        self.finish()
        if 0 not in self.losses:
            return 0.0, 0.0
        loss = self.losses[0].item()
        return (loss, self.weights[0]) if 0 in self.weights else (loss * samples, samples)
