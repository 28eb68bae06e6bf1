"""What every trainer does, however the work is split: a step, a fit, an evaluation, saving and going on.

    for each microbatch of my share:   forward → loss × (my samples / all samples) → backward
    then:                              synchronise → agree on the loss → clip → optimizer

The objective is the mean loss of the whole batch, so that any number of ranks does what one does. A strategy says what is cut and sent.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel101.collectives import all_gather, all_reduce
from parallel101.mesh import Group, GroupLike, group_of
from parallel101.record.spans import span
from parallel101.trainers.agreement import check, check_or_copy
from parallel101.trainers.arguments import check_batch, check_depends, check_loss, check_model, check_options
from parallel101.trainers.checkpoint import shape_of
from parallel101.trainers.history import History
from parallel101.trainers.loop import Loop
from parallel101.trainers.memory import Holdings, storage_bytes
from parallel101.trainers.optimizers import build_optimizer, names_by_group, optimizer_state, to_load
from parallel101.trainers.saving import Saving

LossFn = Callable[[Tensor, Tensor], Tensor]
OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]


class Trainer(Loop, Saving):
    """The base of all trainers. On its own it is one rank's: it sends nothing but counts and losses, and expects nobody else to train.

    Args:
        model: the whole model, the same on every rank; it knows nothing of parallelism.
        loss_fn: (outputs, targets) → the mean loss over the samples, which lie along dim 0.
        optimizer: a function of a list of parameters, such as `lambda p: torch.optim.AdamW(p, lr=1e-3)`.
        group: the ranks that train together; see `group_of`. None: all, or this one where there is no process group.
        clip_norm: scale the gradients so that the norm of all of them together is at most this.
        accumulate: microbatches into which a rank's share of the batch is cut: as many forwards and backwards, one communication.
        autocast: a dtype such as torch.bfloat16 in which the forward computes what allows it; weights and gradients keep theirs.
        sync: models that differ at the start are an error that names the parameter; True: take the first rank's weights instead.

    A strategy overrides what it does otherwise:
        `_cut(model)`            name → Parameter that this rank's optimizer updates; where a model is cut, it is cut here
        `_samples`               the ranks among which a batch is cut (default: the group)
        `_forward_backward(…)`   the loop over microbatches, for a strategy with a schedule of its own
        `_backward(loss, last)`  one backward; `last` in this step: gradients are complete after it
        `_synchronise()`         after the last backward: every owned parameter's .grad becomes the whole batch's
        `_unused`                names of owned parameters that none of this rank's samples reached in this step; where some rank has such,
                                 `_agree` asks whether all have, and leaves those without a gradient, as one process would
        `_gradient_norm()`       of all gradients of the model together
        `_apply()`               the optimizer's step, and what must follow it
        `gradients()`, `state_dict()`, `_load_model(…)`, `_optimizer_state()`   the whole model's, on any layout
        `_optimizer_to_load(…)`  what this rank's optimizer takes of a saved state; it changes nothing, so that `resume` can check all first
        `_holdings()`            kind → tensors that this rank holds, for `describe()`
        `_moments()`, `_notes()` kind → bytes that it held at most for a moment in the last step; sentences; for `describe()` too

    Attributes:
        model, optimizer: as they are used, for a learning-rate schedule or a look inside.
        steps: how many have been taken, those before `resume` counted.
        history: of `fit`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        sync: bool = False,
    ):
        check_options(loss_fn, clip_norm, accumulate, autocast)
        self.model, self.loss_fn = model, loss_fn
        self.clip_norm, self.accumulate, self.autocast = clip_norm, accumulate, autocast
        self.group: Group = group_of(group)
        if self.group.position is None:
            raise ValueError(f"this rank is not in group={group!r}: build a trainer on its members only, or leave group out")
        self.position: int = self.group.position
        self._group = group  #  what the collectives are given
        self._samples: GroupLike = group
        self.device = check_model(model, self.group)
        with span("agree"):
            check_or_copy(model, group, self.device, sync)
        self._shapes = {name: shape_of(value) for name, value in model.state_dict().items()}  #  of the whole model's, cut or not
        self._owned: dict[str, nn.Parameter] = self._cut(model)
        self.optimizer = build_optimizer(optimizer, self._owned)
        self._names = list(self._owned)  #  of what is trained, wherever it is
        self._unused: list[str] = []
        self._left_out: set[str] = set()
        self._first = True
        self.steps = 0
        self.history = History()

    # ── one step ──

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch, of which this rank gives its share, and return the loss of the whole, the same float on every rank.

        Args:
            inputs, targets: this rank's samples, along dim 0; `share` cuts them out of a whole batch. Shares need not be equal.

        Raises, on every rank alike, ValueError where a rank has fewer samples than microbatches, and FloatingPointError where the loss
        of some rank is not finite: no weight has been changed then.
        """
        check_batch((inputs, targets))
        samples = self._counts(len(inputs))
        self._zero_grad()
        loss = self._forward_backward(inputs, targets, sum(samples))
        whole = self._agree(loss)
        if self._first:
            self._check_buffers()
            self._first = False
        with span("optimizer"):
            if self.clip_norm is not None:
                norm = self._gradient_norm()
                nn.utils.clip_grads_with_norm_(list(self._owned.values()), self.clip_norm, norm)
            self._apply()
        self.steps += 1
        return whole

    def _forward_backward(self, inputs: Tensor, targets: Tensor, total: int) -> float:
        """Forward and backward of this rank's share; returns its part of the loss of the whole batch of `total` samples."""
        parts, last = [], self.accumulate - 1
        for i, (x, y) in enumerate(zip(inputs.tensor_split(self.accumulate), targets.tensor_split(self.accumulate))):
            with span("forward", microbatch=i):
                loss = self._loss(x, y) * (len(x) / total)
            check_depends(loss)
            with span("backward", microbatch=i):
                self._backward(loss, last=i == last)
            parts.append(loss.detach())
        with span("synchronise"):
            self._synchronise()
        return sum(part.item() for part in parts)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return check_loss(self.loss_fn(self.model(inputs), targets))

    def _zero_grad(self) -> None:
        self._left_out = set()
        self.optimizer.zero_grad()

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def _synchronise(self) -> None:
        pass

    def _gradient_norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self._owned.values() if p.grad is not None])

    def _apply(self) -> None:
        self.optimizer.step()

    # ── what ranks tell each other about a step ──

    def _of_all(self, *numbers: float, group: GroupLike) -> list[list[float]]:
        """Each of these numbers of every rank: a list by position for each."""
        with span("agree"):
            return all_gather(torch.tensor([numbers], dtype=torch.float64, device=self.device), group=group).t().tolist()

    def _counts(self, samples: int) -> list[int]:
        """How many samples each rank gave; an error on all ranks where one of them has too few."""
        counts = [int(count) for count in self._of_all(samples, group=self._samples)[0]]
        for rank, count in zip(group_of(self._samples).ranks, counts):
            if count < self.accumulate:
                wanted = "at least one sample a rank" if self.accumulate == 1 else f"at least accumulate={self.accumulate} samples a rank"
                raise ValueError(
                    f"the batch is too small: rank {rank} has {count} of its {sum(counts)} samples, and {len(counts)} ranks train; "
                    f"expected {wanted}: use a larger batch or fewer ranks"
                )
        return counts

    def _agree(self, loss: float) -> float:
        """The loss of the whole batch out of every rank's part, added up in the order of the ranks, so the same float everywhere."""
        parts, unused = self._of_all(loss, len(self._unused), group=self._samples)
        if any(unused):
            self._leave_out_unused()
        broken = {r: part for r, part in zip(group_of(self._samples).ranks, parts) if not math.isfinite(part)}
        if broken:
            where = ", ".join(f"{part} on rank {r}" for r, part in broken.items())
            raise FloatingPointError(
                f"step {self.steps}: the loss is {where}; no weight was changed. "
                "Look at that rank's samples, or lower the learning rate, or set clip_norm"
            )
        return math.fsum(parts)

    def _check_buffers(self) -> None:
        if next(self.model.buffers(), None) is not None:
            advice = "expected buffers that do not depend on the samples, of which each rank sees its share only; .eval() freezes most"
            with span("agree"):
                check(self.model.named_buffers(), self._group, self.device, "the first step changed buffers, and not alike", advice)

    def _leave_out_unused(self) -> None:
        """A parameter that no sample of any rank reached keeps no gradient; one that some rank's did reach has theirs."""
        unused = set(self._unused)
        mine = torch.tensor([name in unused for name in self._names], dtype=torch.int32, device=self.device)
        counts = all_reduce(mine, group=self._samples).tolist()
        self._left_out = {name for name, by in zip(self._names, counts) if by == group_of(self._samples).size}
        for name in self._left_out & self._owned.keys():
            self._owned[name].grad = None

    # ── the whole model, on any layout ──

    def _cut(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the last step (clipped, where they were), by the names of the model's parameters. Collective."""
        return {name: p.grad for name, p in self._owned.items()}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole model's, on every rank; `model.load_state_dict` takes it anywhere. Collective: call it on every rank."""
        return copy.deepcopy(self.model.state_dict())

    def _load_model(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state)

    def _optimizer_state(self) -> dict[str, Any]:
        return optimizer_state(self.optimizer, self._owned)

    def _optimizer_to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return to_load(self.optimizer, names_by_group(self.optimizer, self._owned), saved, self._owned)

    # ── who holds what ──

    def describe(self) -> Holdings:
        """Who holds what, in bytes a rank, counted from the storages that are alive now. Collective; print it to see a table."""
        mine = {kind: storage_bytes(tensors) for kind, tensors in self._holdings().items()} | self._moments()
        counts = {kind: list(map(int, of_all)) for kind, of_all in zip(mine, self._of_all(*mine.values(), group=self._group))}
        ranks = f"{self.group.size} rank{'s' if self.group.size > 1 else ''}"
        return Holdings(f"{type(self).__name__} on {ranks}", self.group.ranks, counts, self._notes())

    def _moments(self) -> dict[str, int]:
        return {}

    def _notes(self) -> list[str]:
        return []

    def _holdings(self) -> dict[str, Iterator[Tensor]]:
        parameters = list(self.model.parameters())
        state = self.optimizer.state.values()
        return {
            "weights": iter([*parameters, *self.model.buffers()]),
            "gradients": (p.grad for p in parameters if p.grad is not None),
            "optimizer state": (value for of_one in state for value in of_one.values() if isinstance(value, Tensor)),
        }
