"""One step of training, on up to five axes at once.

    dp   this rank's share of the batch         data_parallel.py, zero_1_2_3.py
    cp   its positions of every sequence        context_parallel.py
    tp   its block of every matrix              tensor_parallel.py
    pp   its layers                             pipeline_parallel.py
    ep   its experts, and a share of the batch  expert_parallel.py

    share ─▶ microbatches ─▶ forward, backward ─▶ gradients summed ─▶ loss agreed on ─▶ optimizer

Afterwards every weight is what one process would have made of it with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import Group, split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradient_sync import GradientSync, Parameters, sum_gradients
from parallel101.trainers.layout import Axes, Layout, StateNames
from parallel101.trainers.precision import Precision
from parallel101.trainers.random_numbers import RandomNumbers
from parallel101.trainers.shares import Shares
from parallel101.trainers.support.batches import Batch, call, count_samples, split
from parallel101.trainers.support.history import History
from parallel101.trainers.support.losses import Losses, agree_on_loss
from parallel101.trainers.support.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from parallel101.trainers.context.cut_time import ContextAxis
    from parallel101.trainers.pipeline_parallel import Pipeline


class Trainer:
    """A rank's part of the model, and the step that trains it. hybrid.py builds it."""

    model: nn.Module  # this rank's part
    optimizer: torch.optim.Optimizer  # of what this rank owns
    loss_fn: Any  # None: the model returns its loss
    axes: Axes  # the ranks that train together, by axis
    agree: Agreement  # small exchanges among them
    layout: Layout  # where every parameter and buffer of the whole model is
    shares: Shares  # checks what the ranks are given
    runner: Accumulation | Pipeline  # computes forward and backward
    context: ContextAxis | None  # cuts a batch along time
    sync: GradientSync  # sums gradients over dp, cp and ep
    sums: Sequence[tuple[Sequence[str], Group]]  # names of gradients summed over more ranks
    owned: Parameters  # what this rank's optimizer updates, by name
    trained: Sequence[str]  # names of all trained parameters of the model
    local: Mapping[str, Tensor]  # parameters and buffers that are on this rank
    reached: list[str]  # those that some rank's samples reached in the last step
    precision: Precision  # the dtypes of weights, gradients and some operations
    random_numbers: RandomNumbers  # dropout's, equal on ranks with the same samples
    clip_norm: float | None
    device: torch.device
    verification: Any  # compares with one process; see verify/
    steps: int
    # for `fit`, checkpoints and reports
    position: int  # of this rank, in the group
    history: History  # of `fit`
    notes: Sequence[str]  # for `describe`
    state: StateNames  # what the whole model's state_dict has
    sharded_optimizer: ShardedOptimizer  # its state, whole and by name
    reads_parts: bool  # whether the model's own state_dict may be read now
    activations: Any = None  # an Activations, the last that were counted

    def step(self, inputs: Batch, targets: Batch = None) -> float:
        """Train on one batch, of which this rank gives its share, and return the loss of the whole,
        the same float on every rank.

        Args:
            inputs: this rank's samples, along dim 0 of each tensor; `share` cuts them out of a
                whole batch. Shares need not be equal, and some may be empty. The model is called
                with a tensor, with the entries of a dict as keywords, or of a tuple as arguments.
            targets: of these samples, for loss_fn. None if loss_fn is None.

        Raises, on every rank and before a weight is changed: ValueError if the ranks' shares don't
        belong together, NotEqualError before the first step (see `verify`), FloatingPointError if
        a rank's loss is not finite. What the model raises on one rank ends the run.
        """
        total = self.shares.check(inputs, targets, self.steps)
        self.verification.before_step(inputs, targets)
        loss = self.compute_gradients(inputs, targets, total)
        self.verification.after_gradients()
        with span("optimizer"):
            if self.clip_norm is not None:
                parameters, norm = list(self.owned.values()), self.norm()
                nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
            self.optimizer.step()
            self.sync.publish()
        self.steps += 1
        return loss

    def compute_gradients(self, inputs: Batch, targets: Batch, total: int) -> float:
        """Set the owned .grad to the gradients of the mean loss of `total` samples; return it."""
        self.optimizer.zero_grad()
        self.sync.begin()
        losses = Losses(self.loss_fn, total, self.sync.scale)
        self.verification.watch(losses)
        if self.context is not None:
            inputs, targets, losses.part = self.context.cut(inputs, targets)
        with self.random_numbers.of_step(self.steps):
            self.runner.run(self.precision.cast(inputs), targets, losses)
        with wait_span("synchronize"):
            unused = self.sync.finish()
            for names, group in self.sums:
                parts = {name: self.owned[name] for name in names if name in self.owned}
                sum_gradients(parts, group)
        loss, weight, some_unused = agree_on_loss(
            losses, len(unused), self.steps, self.axes, self.agree
        )
        left_out = self.reached_by_none(unused) if some_unused else set()
        self.reached = [name for name in self.trained if name not in left_out]
        for name, p in self.owned.items():
            if name in left_out:
                p.grad = None  # as in one process
            elif weight is not None and p.grad is not None:
                p.grad /= weight
        return loss

    def reached_by_none(self, unused: Sequence[str]) -> set[str]:
        """Return the names of the parameters that no rank's samples reached. Collective."""
        mine = self.local.keys() - set(unused)
        reached = torch.tensor([name in mine for name in self.trained], device=self.agree.device)
        counts = all_reduce(reached.int(), group=self.agree.group).tolist()
        return {name for name, count in zip(self.trained, counts) if not count}

    def norm(self) -> Tensor:
        """Return the norm of all gradients together, each element counted once."""
        gradients = {name: p.grad for name, p in self.owned.items() if p.grad is not None}
        return self.layout.norm(gradients)

    # ── what surrounds the step ──

    def need_numbers(self, method: str) -> None:
        """Raise ValueError if the model is on the meta device, which has no numbers."""
        if self.device.type == "meta":
            raise ValueError(
                f"{method}() needs numbers, but the model is on the meta device, which has none: "
                "use step() and describe() there, or launch without device="
            )

    @property
    def parts(self) -> dict[str, Tensor]:
        """This rank's part of each tensor, by name: of trained parameters what it owns, and the
        others and buffers whole.
        """
        here = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        others = self.layout.entries.keys() & self.local.keys() - set(self.trained)
        return {name: here[name] for name in here if name in others} | dict(self.owned)


class Accumulation:
    """Runs all layers on this rank. The gradients of its microbatches add up in .grad."""

    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync,
        microbatches: int,
        autocast: Callable[[], Any],
        always: bool,
    ):
        self.model, self.sync, self.microbatches = model, sync, microbatches
        self.autocast, self.always = autocast, always  # without samples, too: others send some here

    def run(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        sizes = split_sizes(count_samples(inputs), self.microbatches)
        for i, (x, y) in enumerate(zip(split(inputs, sizes), split(targets, sizes))):
            with span("forward", microbatch=i):
                loss = self.forward(x, y, losses)
            with span("backward", microbatch=i):
                self.backward(loss, last=i + 1 == len(sizes))

    def forward(self, inputs: Batch, targets: Batch, losses: Losses) -> Tensor | None:
        samples = count_samples(inputs)
        with self.sync.forward(), self.autocast():  # without samples, too: other ranks have some
            outputs = call(self.model, inputs) if samples or self.always else None
            if samples:
                return losses.of(outputs, targets, samples)
            return losses.of_nothing(outputs, targets) if self.always else None

    def backward(self, loss: Tensor | None, last: bool) -> None:
        with self.sync.backward(last=last):
            if loss is not None:
                loss.backward()

    evaluate = forward
