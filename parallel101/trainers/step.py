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

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.batches import Batch, call, cast, count_samples, split
from parallel101.trainers.gradient_sync import GradientSync, sum_gradients
from parallel101.trainers.layout import DATA, Axes
from parallel101.trainers.losses import Losses, agree_on_loss, check_shares, loss_and_weight
from parallel101.trainers.options import Trainer


def step(trainer: Trainer, inputs: Batch, targets: Batch = None) -> float:
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
    total = check_shares(trainer, inputs, targets)
    trainer.verification.before_step(trainer, inputs, targets)
    loss = compute_gradients(trainer, inputs, targets, total)
    trainer.verification.after_gradients(trainer)
    with span("optimizer"):
        clip(trainer)
        trainer.optimizer.step()
        trainer.gradient_sync.publish()
    trainer.steps += 1
    return loss


def compute_gradients(trainer: Trainer, inputs: Batch, targets: Batch, total: int) -> float:
    """Set the owned .grad to the gradients of the mean loss of `total` samples; return it."""
    trainer.optimizer.zero_grad()
    trainer.gradient_sync.begin()
    losses = Losses(trainer.loss_fn, total, trainer.gradient_sync.scale)
    trainer.verification.watch(trainer, losses)
    if trainer.cut_batch:
        inputs, targets, losses.part = trainer.cut_batch(inputs, targets)
    with trainer.random_numbers.during_step(trainer.steps):
        trainer.runner.run(cast(inputs, trainer.precision.weights), targets, losses)
    with wait_span("synchronize"):
        unused = trainer.gradient_sync.finish()
        for names, group in trainer.sums:
            parts = {name: trainer.owned[name] for name in names if name in trainer.owned}
            if parts:  # along tp as the layers' sums are
                sum_gradients(parts, group, "direct" if group.axis == "tp" else "auto")
    loss, weight, some_unused = agree_on_loss(trainer, losses, len(unused))
    left_out = reached_by_none(trainer, unused) if some_unused else set()
    trainer.reached = [name for name in trainer.trained if name not in left_out]
    for name, p in trainer.owned.items():
        if name in left_out:
            p.grad = None  # as in one process
        elif weight is not None and p.grad is not None:
            p.grad /= weight
    return loss


def reached_by_none(trainer: Trainer, unused: Sequence[str]) -> set[str]:
    """Return the names of the parameters that no rank's samples reached. Collective."""
    used, device = trainer.local.keys() - set(unused), trainer.agree.device
    reached = torch.tensor([name in used for name in trainer.trained], device=device)
    counts = all_reduce(reached.int(), group=trainer.agree.group).tolist()
    return {name for name, count in zip(trainer.trained, counts) if not count}


def clip(trainer: Trainer) -> None:
    """Scale the gradients if the norm of all of them together is more than clip_norm."""
    if trainer.clip_norm is not None:
        norm = gradient_norm(trainer)
        nn.utils.clip_grads_with_norm_(list(trainer.owned.values()), trainer.clip_norm, norm)


def gradient_norm(trainer: Trainer) -> Tensor:
    """Return the norm of all gradients together, each element counted once."""
    gradients = {name: p.grad for name, p in trainer.owned.items() if p.grad is not None}
    return trainer.layout.norm(gradients)


class Accumulation:
    """Runs all layers on this rank. The gradients of its microbatches add up in .grad.

    Args: stages: a OneStage. autocast: gives the context of a forward.
    """

    def __init__(self, stages: Any, sync: GradientSync, autocast: Callable[[], Any]):
        self.model, self.sync, self.autocast = stages.parts[0], sync, autocast
        self.microbatches, self.always = stages.microbatches, stages.always
        # (stage, kind, microbatch), as an Action begins; a pipeline's files aren't loaded
        self.actions = [(0, kind, i) for i in range(self.microbatches) for kind in "FB"]
        self.loss: Tensor | None = None  # of the microbatch whose backward follows

    def run(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        sizes = split_sizes(count_samples(inputs), self.microbatches)
        batches = list(zip(split(inputs, sizes), split(targets, sizes)))
        for action in self.actions:
            _, kind, i = action
            with span("forward" if kind == "F" else "backward", microbatch=i):
                self.perform(action, *batches[i], losses)

    def perform(
        self, action: tuple[int, str, int], inputs: Batch, targets: Batch, losses: Losses
    ) -> None:
        """Carry out the forward or the backward of a microbatch."""
        if action[1] == "F":
            self.loss = self.forward(inputs, targets, losses)
        else:
            self.backward(last=action[2] + 1 == self.microbatches)

    def forward(self, inputs: Batch, targets: Batch, losses: Losses) -> Tensor | None:
        samples = count_samples(inputs)
        with self.sync.forward(), self.autocast():  # without samples, too: other ranks have some
            if not samples and not self.always:
                return None
            outputs = call(self.model, inputs)
            if samples:
                return losses.add(outputs, targets, samples)
            # Backward starts from zeros, for its messages. It is computed as the others' loss is: a
            # tensor that the loss ignores gets no gradient here either.
            return loss_and_weight(losses.loss_fn, outputs, targets)[0] * 0

    def backward(self, last: bool) -> None:
        loss, self.loss = self.loss, None
        with self.sync.backward(last=last):
            if loss is not None:
                loss.backward()

    evaluate = forward


# ── random numbers of a step, such as dropout's masks ──
#
# They come from the first rank's seed, the step, and the place along dp, cp and ep.
#
#     dp 0, tp 0   mask 1 0 1 1        dp 1, tp 0   mask 0 1 1 0        other samples: other masks
#     dp 0, tp 1   mask 1 0 1 1        dp 1, tp 1   mask 0 1 1 0        equal samples: equal masks
#     dp 0, cp 1   mask 1 1 0 0        other positions of the same samples: other masks
#
# So it does not matter how the ranks were seeded, a step that is repeated or resumed draws the same
# masks again, and torch's global random numbers, which may shuffle the data, go on afterwards as if
# there had been no step. One rank alone draws from the global ones, as in plain torch. Random
# numbers of Python, of NumPy and of a torch.Generator of the program's own are left alone.


class RandomNumbers:
    """torch's global generators, of the CPU and of this rank's GPU, during a step.

    All ranks build it together.
    """

    def __init__(self, axes: Axes, agree: Agreement, device: torch.device):
        self.alone, self.place = axes.members.size == 1, axes.place(DATA)
        self.gpus = [device] if device.type == "cuda" else []
        if not self.alone:
            (seeds,) = agree.numbers(torch.initial_seed() % 2**53)  # which a float64 has exactly
            self.first = int(seeds[0])

        self.step: int | None = None  # that is running
        self.forwards = 0  # that it has begun

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        """Draw the random numbers of this step inside; afterwards they go on where they were
        before.
        """
        if self.alone:
            yield
            return
        with torch.random.fork_rng(self.gpus):
            self.step, self.forwards = step, 0
            try:
                yield
            finally:
                self.step = None

    @contextmanager
    def during_forward(self) -> Iterator[None]:
        """Run a forward, which draws numbers of its own: with sequence parallel, ranks along tp
        that have unequal parts of the time draw different amounts of them.
        """
        if self.step is not None:
            text = f"{self.first} {self.place} {self.step} {self.forwards}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
            torch.default_generator.manual_seed(seed)
            for gpu in self.gpus:
                torch.cuda.set_rng_state(torch.Generator(gpu).manual_seed(seed).get_state(), gpu)
            self.forwards += 1
        yield
