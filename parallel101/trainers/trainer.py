"""The parts of a trainer, as those that read them see it: the step, fit, checkpoints, reports and
verify. hybrid.py builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel101.mesh import Group
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradient_sync import GradientSync, Parameters
from parallel101.trainers.layout import Axes, Layout
from parallel101.trainers.precision import Precision
from parallel101.trainers.random_numbers import RandomNumbers
from parallel101.trainers.support.history import History
from parallel101.trainers.support.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from parallel101.trainers.context.cut_time import ContextAxis


class Trainer:
    """A rank's part of the model, and what trains it."""

    model: nn.Module  # this rank's part
    optimizer: torch.optim.Optimizer  # of what this rank owns
    loss_fn: Any  # None: the model returns its loss
    axes: Axes  # the ranks that train together, by axis
    agree: Agreement  # small exchanges among them
    layout: Layout  # where every parameter and buffer of the whole model is
    least: int  # samples that each rank needs
    why_least: str
    check_norms: Callable[[], None]  # raises ValueError for a BatchNorm that sees a part
    runner: Any  # an Accumulation or a Pipeline: computes forward and backward
    context: ContextAxis | None  # cuts a batch along time
    sync: GradientSync  # sums gradients over dp, cp and ep
    sums: Sequence[tuple[Sequence[str], Group]]  # names of gradients summed over more ranks
    owned: Parameters  # what this rank's optimizer updates, by name
    trained: Sequence[str]  # names of all trained parameters of the model
    local: Mapping[str, Tensor]  # parameters and buffers that are on this rank
    reached: Sequence[str] = ()  # those that some rank's samples reached in the last step
    precision: Precision  # the dtypes of weights, gradients and some operations
    random_numbers: RandomNumbers  # dropout's, equal on ranks with the same samples
    clip_norm: float | None
    device: torch.device
    verification: Any  # compares with one process; see verify/
    steps: int = 0
    # for `fit`, checkpoints and reports
    position: int  # of this rank, in the group
    history: History  # of `fit`
    notes: list[str]  # for `describe`
    state: Mapping[str, str | None]  # key of the whole model's state_dict → name, if it has one
    sharded_optimizer: ShardedOptimizer  # its state, whole and by name
    reads_parts = False  # whether the model's own state_dict may be read now
    activations: Any = None  # an Activations, the last that were counted

    @property
    def parts(self) -> dict[str, Tensor]:
        """This rank's part of each tensor, by name: of trained parameters what it owns, and the
        others and buffers whole.
        """
        here = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        others = self.layout.entries.keys() & self.local.keys() - set(self.trained)
        return {name: here[name] for name in here if name in others} | dict(self.owned)
