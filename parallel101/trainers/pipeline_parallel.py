"""Pipeline parallel: each rank has some of the layers, and carries out its list of actions.

    0F3   forward of microbatch 3 on stage 0        0SEND_F3   its output, to the next stage
    0B3   its backward, or in two halves:           0RECV_B3   its output's gradient arrives
    0I3   the gradients of the input                1SEND_B3   the input's gradient, to the stage
    0W3   the gradients of the weights                         before

    1F1B, rank 0 of 2:   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1

Every schedule is such lists, and runs in the loop below. Activations travel to the next stage and
their gradients back, each once a microbatch. Sources: Huang et al., "GPipe" (2019); Narayanan et
al. (arXiv 2104.04473), section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.mesh import split_sizes
from parallel101.spans import span
from parallel101.trainers.batches import Batch, call, count_samples, split
from parallel101.trainers.gradient_sync import together
from parallel101.trainers.losses import Losses
from parallel101.trainers.pipeline.stage_messages import Messages, activations
from parallel101.trainers.recompute import and_its_repetitions
from parallel101.trainers.schedules.actions import Action, awaits, partner
from parallel101.trainers.torch_functions import GraphNode
from parallel101.trainers.weight_gradients import WeightGradients

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Stage(nn.Sequential):
    """Consecutive modules of a model, by their numbers in its sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the stage. The first module takes the model's arguments, or what the stage
        before has sent.
        """
        first, *others = self
        x = first(*args, **kwargs)
        for entry in others:
            x = entry(x)
        return x

    def sequence(self) -> list[nn.Module]:
        """Return the modules whose composition is the forward."""
        return list(self)


# what a stage keeps of a microbatch from its forward to its backward: x, y and, if an action of its
# own computes them, the weight gradients
Held = tuple[Any, Any, WeightGradients | None]


class Pipeline:
    """The stages that this rank computes.

    Args:
        stages: a PipelineStages: its parts are this rank's stages, global stage → its layers.
        actions: of this rank in a step, in order, with sends and receives.
        messages: between this rank's stages and those of other ranks.
        syncs: (stages, what sums the gradients of the parameters that are on just these over dp).
        autocast: gives the context of a forward.
    """

    def __init__(
        self, stages: Any, actions: Sequence[Action], messages: Messages, syncs: Any, autocast: Any
    ):
        self.parts: Mapping[int, nn.Module] = stages.parts
        self.actions, self.messages, self.autocast = actions, messages, autocast
        self.sync = together([sync for _, sync in syncs])
        backwards = [action for action in actions if action.kind in "BW"]
        self.on_stage = []  # with the last action, after which the gradients are complete
        for used, sync in syncs:
            last = [action for action in backwards if action.stage in used][-1]
            self.on_stage.append((used, sync, last))
        self.last_stage, self.microbatches = max(stages.placement), stages.microbatches
        self.split = {action[::2] for action in actions if action.kind == "I"}

    def run(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        """Run forward and backward of a share, cut into microbatches."""
        sizes = split_sizes(count_samples(inputs), self.microbatches)
        self.carry_out(self.actions, split(inputs, sizes), split(targets, sizes), losses)

    def evaluate(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        """Run the forward of a share, as one microbatch."""
        first = [action for action in self.actions if action.microbatch == 0]
        forward = [action for action in first if action.kind in ("F", "SEND_F", "RECV_F")]
        self.carry_out(forward, [inputs], [targets], losses)

    def carry_out(
        self, actions: Sequence[Action], inputs: list[Batch], targets: list[Batch], losses: Losses
    ) -> None:
        self.inputs, self.targets, self.losses = inputs, targets, losses
        self.sizes = [count_samples(x) for x in inputs]
        self.messages.begin(actions, inputs)
        self.held: dict[tuple[int, int], Held] = {}  # by stage and microbatch
        self.later: dict[tuple[int, int], WeightGradients] = {}
        self.results: dict[Action, Tensor] = {}  # by the action that sends it
        for action in actions:
            if action.kind in NAMES:
                self.compute(action)
            elif not self.sizes[action.microbatch]:
                pass  # there are fewer samples than microbatches
            elif action.kind in ("SEND_F", "SEND_B"):
                self.messages.send(action, self.results.pop(action))
            else:
                self.messages.post(action)  # it arrives while this rank computes
        self.messages.finish()

    def compute(self, action: Action) -> None:
        self.arrived = self.receive(action) if self.sizes[action.microbatch] else None
        with span(NAMES[action.kind], microbatch=action.microbatch, stage=action.stage):
            self.perform(action)

    def perform(self, action: Action) -> None:
        """Carry out an action whose input has arrived."""
        stage, kind, i = action[:3]
        arrived, self.arrived = self.arrived, None
        with self.synchronizing(action):
            if self.sizes[i] and kind == "F":
                self.forward(stage, i, arrived)
            elif self.sizes[i] and kind == "W":
                self.later.pop((stage, i)).run()
            elif self.sizes[i]:
                self.backward(stage, i, arrived)

    def receive(self, action: Action) -> Tensor | None:
        """Return an action's input: the output of the stage before, or the gradient of its own."""
        send = awaits(action, self.last_stage + 1)
        if send is None:
            return None
        if send.stage not in self.parts:
            return self.messages.take(partner(send))
        result = self.results.pop(send)  # from this rank: nothing is sent
        return result.clone() if action.kind == "F" else result  # a stage may change it in place

    def forward(self, stage: int, i: int, arrived: Tensor | None) -> None:
        x = inputs = self.inputs[i]
        if arrived is not None:
            x = arrived.requires_grad_(arrived.is_floating_point())
            # the same memory as a result, which a stage may change in place, and not as a leaf
            inputs = GraphNode.apply(lambda x: (x.data, lambda g: g), x)
        weights = WeightGradients(split=True) if (stage, i) in self.split else None
        splitting = and_its_repetitions(weights.forward) if weights else nullcontext()
        with splitting, self.autocast():
            y = call(self.parts[stage], inputs)
            if stage == self.last_stage:
                y = self.losses.add(y, self.targets[i], self.sizes[i])
        if stage < self.last_stage:
            self.results[Action(stage, "SEND_F", i)] = activations(stage, y)
        if torch.is_grad_enabled():
            self.held[stage, i] = x, y, weights

    def backward(self, stage: int, i: int, arrived: Tensor | None) -> None:
        x, y, weights = self.held.pop((stage, i))
        if y.requires_grad:
            y.backward(arrived)
        if stage > 0:
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            self.results[Action(stage, "SEND_B", i)] = gradient
        if weights:
            self.later[stage, i] = weights

    @contextmanager
    def synchronizing(self, action: Action) -> Iterator[None]:
        """Let the synchronizations of a stage's gradients follow what the stage computes."""
        with ExitStack() as contexts:
            for stages, sync, last in self.on_stage:
                if action.stage in stages and action.kind == "F":
                    contexts.enter_context(sync.forward())
                elif action.stage in stages:
                    contexts.enter_context(sync.backward(action.kind, action == last))
            yield
