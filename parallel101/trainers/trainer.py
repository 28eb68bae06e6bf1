"""What a trainer has besides its step: for `fit`, checkpoints, reports and the comparison with one
process. hybrid.py builds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parallel101.trainers.step import Step
from parallel101.trainers.support.history import History
from parallel101.trainers.support.optimizers import ShardedOptimizer
from parallel101.trainers.support.state_names import StateNames


class Trainer(Step):
    """A step, and what surrounds it."""

    position: int  # of this rank, in the group
    history: History  # of `fit`
    notes: Sequence[str]  # for `describe`
    state: StateNames  # what the whole model's state_dict has
    sharded_optimizer: ShardedOptimizer  # its state, whole and by name
    reads_parts: bool  # whether the model's own state_dict may be read now
    activations: Any = None  # an Activations, the last that were counted

    def need_numbers(self, method: str) -> None:
        """Raises ValueError if the model is on the meta device, where it has none."""
        if self.device.type == "meta":
            raise ValueError(
                f"{method}() needs numbers, and the model is on the meta device, which has none: "
                "call step() there, and describe(), or launch without device="
            )

    @property
    def parts(self) -> dict[str, Tensor]:
        """Name → what this rank has of it: of trained parameters what it owns, and the others
        and buffers whole.
        """
        here = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        others = self.layout.entries.keys() & self.local.keys() - set(self.trained)
        return {name: here[name] for name in here if name in others} | dict(self.owned)
