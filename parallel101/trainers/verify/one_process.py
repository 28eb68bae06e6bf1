"""One process: the whole model, as it was before the trainer cut it, and steps of it on a whole
batch.

    before the cut    the first rank notes what __dict__ of every module holds
    whole()           for a moment the same modules have it again: model, loss_fn and hooks find
                      whole weights, and everything else as it is now
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from parallel101.trainers.gradient_sync import dense_gradient
from parallel101.trainers.precision import Precision
from parallel101.trainers.step import Trainer
from parallel101.trainers.support.arguments import LossFn, loss_and_weight
from parallel101.trainers.support.batches import Batch, call, count_samples, map_tensors
from parallel101.trainers.support.fit import evaluating
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.snapshot import MISSING, seed_all

TENSORS, HOOKS = ("_parameters", "_buffers", "_modules"), "_hooks"
LEAST_LR = 1e-3
Share = tuple[Batch, Batch]


class Outcome(NamedTuple):
    """The results of a step, by names of the whole model.

    Attributes:
        loss: of the batch, before the update.
        gradients: None for parameters that the loss does not depend on.
        norm: of all gradients together.
        updated: the trained parameters after the optimizer's step.
        buffers: after the forward.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    norm: float
    updated: dict[str, Tensor]
    buffers: dict[str, Tensor]


class WholeModel:
    """A model as it was before it was cut. Build it before, and call `note_cut` after.

    Args:
        model: on the first rank.
        loss_fn: as the user gave it; of logits that are not cut.
        precision: of the layout.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, precision: Precision):
        self.model, self.precision = model, precision
        self.loss_fn = precision.of_loss(loss_fn)
        self.before = {module: noted(module) for module in model.modules()}
        self.parameters = dict(model.named_parameters())
        kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
        # of other stages they are freed, and the layout doesn't have them
        self.unsaved = {
            name: b.detach().clone() for name, b in model.named_buffers() if id(b) not in kept
        }

    def note_cut(self) -> None:
        """Note which attributes of the model the trainer has changed by cutting it."""
        self.changed: dict[nn.Module, dict[str, tuple[Any, Any]]] = {}
        for module, before in self.before.items():
            now = noted(module)
            self.changed[module] = {
                key: (before.get(key, MISSING), now.get(key, MISSING))
                for key in before.keys() | now.keys()
                if differ(before.get(key, MISSING), now.get(key, MISSING))
            }
        del self.before

    def free(self) -> None:
        """Free the memory of weights that the cut model doesn't have."""
        kept = {id(p) for p in self.model.parameters()}
        for p in self.parameters.values():
            if id(p) not in kept:
                p.data = p.data.new_empty(0)

    @contextmanager
    def whole(
        self, values: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[dict[str, nn.Parameter]]:
        """Make the model whole inside, with copies of these parameters and buffers (in this dtype,
        if they are floating-point). Yields its parameters.
        """
        dicts = {module: module.__dict__ for module in self.changed}
        classes = {module: type(module) for module in self.changed}
        for module, changed in self.changed.items():
            module.__dict__ = as_before(dict(module.__dict__), changed)
            if isinstance(module, nn.SyncBatchNorm):  # nobody would answer this rank
                module.__class__ = WholeBatchNorm  # type: ignore[assignment]
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        data = [(t, t.data, t.grad if t.is_leaf else None) for _, t in tensors]
        try:
            for name, t in tensors:
                value = values.get(name, t.data if t.numel() else self.unsaved.get(name, t.data))
                value = value.to(t.dtype, copy=True)
                t.data = value.to(dtype) if dtype and value.is_floating_point() else value
                t.grad = None
            yield dict(self.model.named_parameters())
        finally:
            for module, content in dicts.items():
                now, cut = module.__dict__, self.changed[module]
                module.__dict__, module.__class__ = content, classes[module]
                content.update({key: value for key, value in now.items() if key not in cut})
            for t, values_before, gradient in data:
                t.data, t.grad = values_before, gradient

    def bytes_of_a_sample(self, values: Mapping[str, Tensor], share: Share) -> float:
        """Return the bytes one sample's forward keeps for backward; 0 if it can't run alone."""
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        with self.whole(values) as parameters, suppress(Exception):
            for p in parameters.values():
                kept[p.untyped_storage()._cdata] = 0
            weights = set(kept)
            with saved_tensors_hooks(pack, lambda t: t):
                outputs = self.outputs(map_tensors(lambda t: t[:1].clone(), share[0]))
            del outputs
            return float(sum(size for at, size in kept.items() if at not in weights))
        return 0.0

    # ── inside of `whole` ──

    def without_chance(self) -> AbstractContextManager[None]:
        return deterministic(self.model, [self.model])

    def outputs(self, inputs: Batch) -> Any:
        inputs, model = self.precision.cast(inputs), self.model
        with self.precision.forward(next(model.parameters()).device):
            if isinstance(inputs, Tensor) or type(model).forward is not nn.Sequential.forward:
                return call(model, inputs)
            first, *others = model.children()  # it takes one input, and a pipeline's stage several
            outputs = call(first, inputs)
            for module in others:
                outputs = module(outputs)
            return outputs

    def losses(self, shares: Sequence[Share]) -> Iterator[tuple[Tensor, float]]:
        """Yield each share's loss and its weight: the number of samples, or what loss_fn says."""
        for inputs, targets in shares:
            inputs, targets = map_tensors(
                torch.clone, (inputs, targets)
            )  # perhaps changed in place
            with self.precision.forward(next(self.model.parameters()).device):
                loss, weight = loss_and_weight(self.loss_fn, self.outputs(inputs), targets)
            samples = count_samples(inputs)
            yield (loss * samples, samples) if weight is None else (loss, weight)

    def backward(self, shares: Sequence[Share], scale: float = 1.0) -> float:
        """Set every .grad to the gradient of the mean loss, and return that loss. `scale`:
        a factor of what backward starts from.
        """
        total, weights = 0.0, 0.0
        with self.without_chance():
            for loss, weight in self.losses(shares):
                total, weights = total + loss.item(), weights + weight
                if loss.requires_grad:
                    (loss * scale / (weight if len(shares) == 1 else 1)).backward()
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= scale * (1 if len(shares) == 1 else weights)
        return total / weights if weights else math.nan

    def evaluate(self, shares: Sequence[Share]) -> float:
        with torch.no_grad(), evaluating(self.model), self.without_chance():
            losses = [(loss.item(), weight) for loss, weight in self.losses(shares)]
        return sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)


class Training:
    """Steps of one process, with the trainer's own optimizer; a Snapshot puts that back.

    Args:
        whole: the model.
        values: its parameters and buffers, by name; of mixed precision, the master weights.
        trainer: a rank's.
        state: the optimizer's whole state and groups, as `ShardedOptimizer.state` gives them.
    """

    def __init__(
        self,
        whole: WholeModel,
        values: Mapping[str, Tensor],
        trainer: Trainer,
        state: Mapping[str, Any],
    ):
        self.whole, self.values, self.optimizer = whole, dict(values), trainer.optimizer
        self.trained, self.clip_norm = trainer.trained, trainer.clip_norm
        self.parameters = {  # that the optimizer updates
            name: nn.Parameter(values[name].detach().clone())
            if whole.precision.master
            else whole.parameters[name]
            for name in trainer.trained
        }
        for group, of_all in zip(self.optimizer.param_groups, state["groups"]):
            group["params"] = [self.parameters[name] for name in of_all["names"]]
        self.optimizer.state.clear()
        for name, of_one in state["state"].items():
            self.optimizer.state[self.parameters[name]] = dict(of_one)
        lift_learning_rates(self.optimizer)

    def step(self, shares: Sequence[Share], scale: float = 1.0) -> Outcome:
        """Take a step. `scale`: of the loss, not of the gradients that the optimizer is given."""
        whole, master = self.whole, self.whole.precision.master
        with whole.whole(self.values) as parameters:
            whole.precision.gradients_of(list(parameters.values()))
            loss = whole.backward(shares, scale)
            buffers = {name: b.detach().clone() for name, b in whole.model.named_buffers()}
            if master:
                for name, p in self.parameters.items():
                    g = parameters[name].grad
                    p.grad = None if g is None else g.to(p.dtype)
            gradients = {
                name: None if p.grad is None else dense_gradient(name, p).detach().clone()
                for name, p in self.parameters.items()
            }
            norm = norm_of(gradients)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(list(self.parameters.values()), self.clip_norm)
            seed_all(1)
            self.optimizer.step()
            updated = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.values |= updated | buffers
        return Outcome(loss, gradients, norm, updated, buffers)

    def in_float64(
        self, shares: Sequence[Share], values: Mapping[str, Tensor], scale: float
    ) -> Outcome:
        """Return the outcome at these weights in float64: its distance from others is rounding."""
        whole, precision, loss_fn = self.whole, self.whole.precision, self.whole.loss_fn
        shares = map_tensors(lambda t: t.double() if t.is_floating_point() else t, shares)

        def in_32_bit(outputs: Any, targets: Any) -> Any:
            """Compute the loss, in float32 for a loss_fn with float32 numbers of its own."""
            assert loss_fn is not None
            try:
                return loss_fn(outputs, targets)
            except RuntimeError:
                return loss_fn(*map_tensors(in_float32, (outputs, targets)))

        with whole.whole(values, torch.float64) as parameters:
            dtypes = [(p, p.grad_dtype) for p in parameters.values()]
            whole.precision = Precision()
            whole.loss_fn = None if loss_fn is None else in_32_bit
            try:
                for p in parameters.values():
                    p.grad_dtype = torch.float64
                loss = whole.backward(shares, scale)
                found = {name: parameters[name].grad for name in self.trained}
                gradients = {name: None if g is None else g.clone() for name, g in found.items()}
                buffers = {name: b.detach().clone() for name, b in whole.model.named_buffers()}
            finally:
                whole.precision, whole.loss_fn = precision, loss_fn
                for p, before in dtypes:
                    p.grad = None
                    p.grad_dtype = before
        return Outcome(loss, gradients, norm_of(gradients), {}, buffers)


def lift_learning_rates(optimizer: Optimizer) -> None:
    """Lift learning rates of zero: a warm-up may begin there, and every update would be right."""
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR


def in_float32(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


def norm_of(gradients: Mapping[str, Tensor | None]) -> float:
    found = [g for g in gradients.values() if g is not None]
    return math.hypot(*(torch.linalg.vector_norm(g.double()).item() for g in found))


# ── a module's __dict__, before and after ──


def noted(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with copies of the dicts of its tensors, modules and hooks."""
    return {
        key: dict(value) if key in TENSORS or key.endswith(HOOKS) else value
        for key, value in vars(module).items()
    }


def differ(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict) and a is not b:
        return list(a) != list(b) or any(a[key] is not b[key] for key in a)
    return a is not b


def as_before(now: dict[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return a module's attributes without the changes of the cut. Hooks that came later stay."""
    for key, (before, after) in changed.items():
        if before is MISSING:
            now.pop(key, None)
        elif key.endswith(HOOKS):
            later = {i: hook for i, hook in now[key].items() if i not in after}
            now[key] = type(now[key])({**before, **later})
        else:
            now[key] = dict(before) if key in TENSORS else before
    return now


class WholeBatchNorm(nn.BatchNorm1d):
    """A BatchNorm that computes what nn.SyncBatchNorm does in one process with the whole batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass
