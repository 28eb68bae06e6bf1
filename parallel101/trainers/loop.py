"""Many steps: a whole batch in, my share of it trained on, the loss told and kept, a checkpoint now and then.

for batch in batches:  step(share(batch))          every rank is given the same batches and cuts out its own part,
                                                   so that the run is the same on any number of ranks
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.record.spans import span
from parallel101.trainers.arguments import Batch, check_batch
from parallel101.trainers.checkpoint import check_place
from parallel101.trainers.history import History, Step

END = object()


class Loop:
    """The half of a trainer that asks for steps; the other half, which takes them, is `Trainer`."""

    model: nn.Module
    device: torch.device
    position: int
    steps: int
    history: History
    _samples: GroupLike
    step: Callable[[Tensor, Tensor], float]
    save: Callable[[str | os.PathLike], None]
    _loss: Callable[[Tensor, Tensor], Tensor]
    _of_all: Callable[..., list[list[float]]]
    _all_or_none: Callable[[str, Callable[[], Any]], Any]

    def share(self, batch: Batch) -> Batch:
        """This rank's part of a whole batch (inputs, targets), cut along dim 0 as `split_sizes` does; on the model's device.

        Raises TypeError for what is not two tensors, ValueError for a batch of fewer samples than ranks.
        """
        members = group_of(self._samples)
        inputs, targets = check_batch(batch)
        if len(inputs) < members.size:
            raise ValueError(f"a batch of {len(inputs)} samples can't be shared by {members.size} ranks: expected one a rank at least")
        sizes = split_sizes(len(inputs), members.size)
        x, y = (t.split(sizes)[members.position or 0].to(self.device) for t in (inputs, targets))
        return x, y

    def fit(
        self,
        batches: Iterable[Batch] | Callable[[int], Batch],
        *,
        until: int | None = None,
        save_to: str | os.PathLike | None = None,
        save_every: int | None = None,
        on_step: Callable[[Step], object] | None = None,
        progress: bool = True,
    ) -> History:
        """Train on batch after batch, with a progress bar, and return the history of this trainer, which `plot`s.

        Args:
            batches: whole batches (inputs, targets), the same on every rank, which cuts out its share: an iterable, or a function that
                gives the batch of a step by its number, so that a resumed run goes on with the batch that it would have had.
            until: stop when the trainer has taken so many steps in all, those before `resume` counted. A function of the step needs it.
            save_to: a checkpoint to write, every `save_every` steps and at the end.
            on_step: called after every step, on every rank, with its `Step`: number, loss, seconds, samples, tokens.
            progress: show the bar (on the first rank only).
        """
        check_fit(batches, until, save_to, save_every, on_step)
        if save_to is not None:
            self._all_or_none(f"save to {save_to}", lambda: check_place(save_to) if self.position == 0 else None)
        stream = map(batches, itertools.count(self.steps)) if callable(batches) else iter(batches)
        saved = self.steps
        with self._progress_bar(batches, until, progress) as bar:
            while until is None or self.steps < until:
                batch: Any = next(stream, END)
                if batch is END:
                    break
                began = time.perf_counter()
                loss = self.step(*self.share(batch))
                step = Step(self.steps - 1, loss, time.perf_counter() - began, len(batch[0]), tokens_in(batch[0]))
                self.history.add(step)
                bar.set_postfix_str(f"loss {loss:.4f}, {self.history.rate()}", refresh=False)
                bar.update()
                if on_step is not None:
                    on_step(step)
                if save_every and self.steps % save_every == 0 and save_to is not None:
                    self.save(save_to)
                    saved = self.steps
        if save_to is not None and saved < self.steps:
            self.save(save_to)
        return self.history

    def _progress_bar(self, batches: Any, until: int | None, progress: bool) -> tqdm:
        lengths = [length for length in (until, self.steps + len(batches) if hasattr(batches, "__len__") else None) if length is not None]
        total = min(lengths, default=None)
        return tqdm(total=total, initial=self.steps, desc="fit", unit="step", disable=not progress or self.position != 0)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the samples of whole batches (see `fit`), the model in eval mode; the same float on every rank."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        total, samples = 0.0, 0
        try:
            for batch in batches:
                x, y = self.share(batch)
                with span("evaluate"):
                    total += self._loss(x, y).item() * len(x)
                samples += len(x)
        finally:
            for module in training:  #  and no other: some may be frozen
                module.training = True
        totals, counts = self._of_all(total, samples, group=self._samples)
        if not sum(counts):
            raise ValueError("evaluate() was given no batches")
        return math.fsum(totals) / sum(counts)


def check_fit(batches: Any, until: Any, save_to: Any, save_every: Any, on_step: Any) -> None:
    """Raises TypeError or ValueError for what `fit` could not begin or never end with."""
    if not callable(batches) and not isinstance(batches, Iterable):
        raise TypeError(f"batches={batches!r}: expected batches (inputs, targets), or a function that gives the batch of a step")
    if callable(batches) and until is None:
        raise ValueError("batches is a function of the step, and would never end: say until=, the number of steps in all")
    if until is not None and not (isinstance(until, int) and until >= 0):
        raise ValueError(f"until={until!r}: expected the number of steps in all, 0 or more, or None")
    if save_every is not None and not (save_to is not None and isinstance(save_every, int) and save_every >= 1):
        raise ValueError(f"save_every={save_every!r}, save_to={save_to!r}: expected steps, 1 or more, and a file to save to")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step={on_step!r}: expected a function of a step, such as lambda step: print(step.loss)")


def tokens_in(inputs: Tensor) -> int:
    """How many tokens: whole numbers in rows are a text's."""
    return 0 if inputs.is_floating_point() or inputs.dim() < 2 else inputs.numel()
