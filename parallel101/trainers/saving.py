"""A run that stops and goes on, on this layout or on another: what is saved knows parameters by name, and nothing of ranks.

2 ranks   step, step, step, save ─▶ run.pt        weights, optimizer state, steps and history of the whole model
3 ranks   run.pt ─▶ resume, step, step, …         each rank takes its part; first all is checked, then all is changed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel101.mesh import GroupLike
from parallel101.record.spans import span
from parallel101.trainers.agreement import agree_that_none, check
from parallel101.trainers.checkpoint import check_state, read_checkpoint, write_checkpoint
from parallel101.trainers.history import History


class Saving:
    """The part of a trainer that writes and reads checkpoints; what is in them, the strategies know."""

    optimizer: Optimizer
    device: torch.device
    position: int
    steps: int
    history: History
    _group: GroupLike
    _shapes: Mapping[str, Any]
    state_dict: Callable[[], dict[str, Any]]
    _load_model: Callable[[Mapping[str, Any]], None]
    _optimizer_state: Callable[[], dict[str, Any]]
    _optimizer_to_load: Callable[[Mapping[str, Any]], dict[str, Any]]

    def save(self, path: str | os.PathLike) -> None:
        """Write all that is needed to go on: weights, optimizer state, steps, history. Collective; the first rank writes, atomically.

        Any trainer on any number of ranks can `resume` it. Raises OSError on every rank where the file could not be written.
        """
        content = {
            "model": self.state_dict(),
            "optimizer": self._optimizer_state(),
            "steps": self.steps,
            "history": self.history.as_dict(),
        }
        self._all_or_none(f"save to {path}", lambda: write_checkpoint(path, content) if self.position == 0 else None)

    def resume(self, path: str | os.PathLike) -> int:
        """Go on from what `save` wrote, by whatever trainer on however many ranks; returns the number of steps that were taken. Collective.

        All is checked before anything is changed. Raises, on every rank, OSError where the file can't be read on one, and ValueError
        where it is no such file, another model's or optimizer's, or another one than on the first rank.
        """
        content, optimizer, history = self._all_or_none(f"resume from {path}", lambda: self._read(path))
        tensors = {**content["model"], "steps": torch.tensor(content["steps"])}
        found = [(name, value) for name, value in tensors.items() if isinstance(value, Tensor)]
        check(found, self._group, self.device, f"the ranks do not read the same in {path}", "expected one file, or copies of it")
        self._load_model(content["model"])
        self.optimizer.load_state_dict(optimizer)
        self.steps, self.history = content["steps"], history
        return self.steps

    def _read(self, path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any], History]:
        content = read_checkpoint(path)
        check_state(content["model"], self._shapes)
        return content, self._optimizer_to_load(content["optimizer"]), History(**content["history"])

    def _all_or_none(self, doing: str, work: Callable[[], Any]) -> Any:
        """What `work()` gives, if it can be done on all ranks; else an error on all of them, so that none goes on alone."""
        done, problem = None, None
        try:
            done = work()
        except Exception as error:
            problem = error
        with span("agree"):
            agree_that_none(problem, doing, self._group, self.device)
        return done
