"""Many steps: a whole batch in, this rank's share trained on, the loss reported and kept, a
checkpoint now and then.

    for batch in batches:
        step(share(batch))

Every rank gets the same batches and cuts out its own part, so the run is the same on any number of
ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from parallel101.extras import needs_extra
from parallel101.mesh import split_sizes
from parallel101.spans import span
from parallel101.trainers.batches import (
    Batch,
    cast,
    check_pair,
    count_samples,
    map_tensors,
    split,
    tensors_of,
)
from parallel101.trainers.checkpoint import check_place, save
from parallel101.trainers.expect import expect
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.losses import Losses
from parallel101.trainers.options import Trainer, need_numbers
from parallel101.trainers.step import step as take_step
from parallel101.trainers.torch_functions import Replacing

SAME_BATCH = (
    "expected the same whole batch on every rank, out of which fit cuts each rank's share. Leave "
    "out DistributedSampler, and give a loader that shuffles with the same seed on all ranks"
)


def share(trainer: Trainer, batch: Batch) -> Batch:
    """Return this rank's part of a whole batch, such as (inputs, targets): each tensor cut
    along dim 0 as `split_sizes` does, on the model's device.

    A batch of fewer samples than places along dp and ep leaves some ranks without any. Raises
    TypeError or ValueError for what is not a tree of tensors with equally many samples (see
    batches.py).
    """
    axes = trainer.axes
    shares = split(batch, split_sizes(count_samples(batch), axes.size(SAMPLES)))
    return map_tensors(lambda t: t.to(trainer.device), shares[axes.place(SAMPLES)])


def inputs_and_targets(trainer: Trainer, batch: Any) -> tuple[Any, Any]:
    """Return a batch's inputs and targets, as `step` takes them.

    If the model returns its loss, all of the batch is what the model is called with.
    """
    return (batch, None) if trainer.loss_fn is None else check_pair(batch)


def fit(
    trainer: Trainer,
    batches: Iterable[Batch] | Callable[[int], Batch],
    *,
    until: int | None = None,
    save_to: str | os.PathLike | None = None,
    save_every: int | None = None,
    scheduler: Any = None,
    on_step: Callable[[StepResult], object] | None = None,
    progress: bool = True,
) -> History:
    """Train on batch after batch, with a progress bar, and return the history of this trainer,
    which `plot`s.

    Args:
        batches: whole batches (inputs, targets), the same on every rank, which cuts out its
            share: an iterable, or a function that gives the batch of a step by its number, so
            that a resumed run continues with the batch that it would have had. With
            loss_fn=None a batch is what the model is called with.
        until: stop when the trainer has taken this many steps in all, those before `resume`
            counted. A function of the step needs it.
        save_to: a checkpoint to write, every `save_every` steps and at the end.
        scheduler: of the learning rate, one of torch.optim.lr_scheduler's over
            `trainer.optimizer`. It takes a step after each of the trainer's, and is saved with
            the checkpoint; see `resume`.
        on_step: called after every step, on every rank, with its `StepResult`: number, loss,
            seconds, samples, tokens.
        progress: show the bar (on the first rank only).
    """
    need_numbers(trainer, "fit")
    endless, often = callable(batches), save_every is not None
    expected = "batches (inputs, targets), or a function that returns the batch of a step"
    expect("batches", batches, endless or isinstance(batches, Iterable), expected, TypeError)
    right = not endless if until is None else isinstance(until, int) and until >= 0
    expected = "the total number of steps, 0 or more, or None if batches end. A function of the "
    expect("until", until, right, f"{expected}step would never end: pass until=")
    right = not often or (isinstance(save_every, int) and save_every >= 1)
    expect("save_every", save_every, right, "a number of steps, 1 or more")
    expect("save_to", save_to, not often or save_to is not None, "a file, for save_every")
    expected = "a function of a step, such as lambda step: print(step.loss)"
    expect("on_step", on_step, on_step is None or callable(on_step), expected, TypeError)
    first = trainer.position == 0
    if save_to is not None:
        check = partial(check_place, save_to) if first else bool  # others: nothing
        trainer.agree.all_or_none(f"save to {save_to}", check)

    stream = map(batches, itertools.count(trainer.steps)) if callable(batches) else iter(batches)
    saved = began_at = trainer.steps
    left = None if until is None else max(0, until - began_at)
    length = began_at + len(batches) if isinstance(batches, Sized) else None
    total = min((n for n in (until, length) if n is not None), default=None)
    bar = tqdm(
        total=total, initial=began_at, desc="fit", unit="step", disable=not (progress and first)
    )
    with bar:
        for batch in itertools.islice(stream, left):
            began = time.perf_counter()
            inputs, targets = inputs_and_targets(trainer, batch)
            named = [(f"tensor {i}", t) for i, t in enumerate(tensors_of((inputs, targets)))]
            differ = f"the ranks gave fit a different batch in step {trainer.steps}"
            trainer.agree.check_same(named, differ, SAME_BATCH)
            loss = take_step(trainer, *share(trainer, (inputs, targets)))
            seconds, tokens = time.perf_counter() - began, tensors_of(inputs)[0]
            text = not tokens.is_floating_point() and tokens.dim() >= 2  # whole numbers in rows
            count = tokens.numel() if text else 0
            step = StepResult(trainer.steps - 1, loss, seconds, count_samples(inputs), count)
            trainer.history.add(step)
            if scheduler is not None:
                scheduler.step()
            bar.set_postfix_str(f"loss {loss:.4f}, {trainer.history.rate()}", refresh=False)
            bar.update()
            if on_step is not None:
                on_step(step)
            if save_every and trainer.steps % save_every == 0 and save_to is not None:
                save(trainer, save_to, scheduler=scheduler)
                saved = trainer.steps
    if save_to is not None and saved < trainer.steps:
        save(trainer, save_to, scheduler=scheduler)
    return trainer.history


@torch.no_grad()
def evaluate(trainer: Trainer, batches: Iterable[Batch]) -> float:
    """Return the mean loss over the samples of whole batches (see `fit`), with the model in
    eval mode: the same float on every rank.

    A batch may have fewer samples than there are ranks. If loss_fn returns sums and weights:
    all sums over all weights.
    """
    need_numbers(trainer, "evaluate")
    total, weight = 0.0, 0.0
    with evaluation_mode(trainer):
        for batch in batches:
            whole = inputs_and_targets(trainer, batch)
            x, y = share(trainer, whole)
            # a rank without samples still computes its experts for others: with one that has no
            # weight, since a pipeline sends none
            idle = not count_samples(x) and trainer.axes.sizes.get("ep", 1) > 1
            if idle:
                x, y = map_tensors(lambda t: t[:1].to(trainer.device), whole)
            with span("evaluate"):
                sums = evaluate_share(trainer, x, y)
            if not idle:
                total, weight = total + sums[0], weight + sums[1]
    totals, weights = trainer.agree.numbers(total, weight)
    if not sum(weights):
        raise ValueError("evaluate() was given no batches, or no targets that count")
    return math.fsum(totals) / math.fsum(weights)


def evaluate_share(trainer: Trainer, inputs: Batch, targets: Batch) -> tuple[float, float]:
    """Return the sum of this share's losses, and its weight; (0, 0) on a rank whose loss another
    rank along tp or pp returns.
    """
    samples = count_samples(inputs)
    losses = Losses(trainer.loss_fn, samples, training=False)
    if trainer.cut_batch:
        inputs, targets, losses.part = trainer.cut_batch(inputs, targets)
    trainer.runner.evaluate(cast(inputs, trainer.precision.weights), targets, losses)
    if not losses.parts or trainer.axes.here.get("tp", 0) > 0:
        return 0.0, 0.0
    weight = losses.weight()
    # the sum already has the weight `part`
    return (losses.sum() * samples, samples * losses.part) if weight < 0 else (losses.sum(), weight)


@contextmanager
def evaluation_mode(trainer: Trainer) -> Iterator[None]:
    """Put the trainer's model in eval mode inside; its layers compute what they hold.

    In eval mode nn.TransformerEncoderLayer reads the weights of its layers itself. It calls the
    layers if any mode is active, even one that replaces nothing.
    """
    cut = trainer.axes.sizes.get("tp", 1) > 1
    training = [module for module in trainer.model.modules() if module.training]
    trainer.model.eval()
    try:
        with Replacing({}) if cut else nullcontext():
            yield
    finally:
        for module in training:  # and no other: some may be frozen
            module.training = True


# ── what fit returns ──
#
#     history = trainer.fit(batches)
#     history.losses, history.plot()        the curve continues where `resume` took it up


class StepResult(NamedTuple):
    """The report of a step that `fit` gives its history and `on_step`: of the whole batch, the
    same on every rank except `seconds`.
    """

    step: int  # its number, from 0
    loss: float  # mean over the whole batch, before the step's update
    seconds: float  # that it took on this rank
    samples: int  # in the whole batch
    # in the whole batch, if its inputs are whole numbers in rows (as a text's are), else 0
    tokens: int


@dataclass
class History:
    """The history of all steps: a list for each field of `StepResult`."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        if not self.steps:
            return "<History: no steps yet>"
        return (
            f"<History: {len(self)} steps, loss {self.losses[0]:.4g} → {self.losses[-1]:.4g}, "
            f"{self.rate()}>"
        )

    def add(self, step: StepResult) -> None:
        for name, value in zip(vars(self), step):
            getattr(self, name).append(value)

    def rate(self, last: int = 20) -> str:
        """Return the tokens a second over the last steps, in words; samples a second if there are
        no tokens.
        """
        seconds, tokens = sum(self.seconds[-last:]), sum(self.tokens[-last:])
        amount, unit = tokens or sum(self.samples[-last:]), "tokens" if tokens else "samples"
        return f"{amount / seconds:,.0f} {unit}/s" if seconds else f"? {unit}/s"

    def plot(self, ax: Any = None, **line: Any) -> Any:
        """Draw the loss over the steps, on matplotlib axes `ax` or new ones; `line` goes to
        plot(), such as label="2 ranks".
        """
        with needs_extra("history.plot()"):
            import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots(figsize=(6, 3.2), layout="constrained")[1]
        ax.plot(self.steps, self.losses, **line)
        ax.set_xlabel("step")
        ax.set_ylabel("loss of the whole batch")
        return ax

    def as_dict(self) -> dict[str, list]:
        """Return plain lists, for a checkpoint; `History(**…)` makes a history of them again."""
        return asdict(self)
