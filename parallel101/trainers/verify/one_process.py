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

from parallel101.trainers.batches import Batch, call, cast, count_samples, map_tensors
from parallel101.trainers.gradient_sync import dense_gradient
from parallel101.trainers.losses import loss_and_weight
from parallel101.trainers.options import LossFn, Trainer
from parallel101.trainers.precision import Precision
from parallel101.trainers.training_loop import evaluating
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
        buffers: after the forward.
        updated: the trained parameters after the optimizer's step.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    norm: float
    buffers: dict[str, Tensor]
    updated: dict[str, Tensor]


class WholeModel:
    """A model as it was before it was cut. Build it before, and call `note_cut` after.

    Args:
        model: on the first rank.
        loss_fn: as the user gave it; of logits that are not cut.
        precision: of the layout.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, precision: Precision):
        self.model, self.precision = model, precision
        self.loss_fn = precision.wrap_loss(loss_fn)
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
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, nn.Parameter]]:
        """Make the model whole inside, with copies of these parameters and buffers. Yields its
        parameters.
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
                t.data = value.to(t.dtype, copy=True)
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
        with self.whole(values) as parameters, suppress(Exception):
            weights = {p.untyped_storage()._cdata for p in parameters.values()}

            def pack(t: Tensor) -> Tensor:
                storage = t.untyped_storage()
                kept[storage._cdata] = 0 if storage._cdata in weights else storage.nbytes()
                return t

            with saved_tensors_hooks(pack, lambda t: t):
                self.outputs(map_tensors(lambda t: t[:1].clone(), share[0]))
        return float(sum(kept.values()))

    # ── inside of `whole` ──

    def without_chance(self) -> AbstractContextManager[None]:
        return deterministic(self.model, [self.model])

    def outputs(self, inputs: Batch) -> Any:
        inputs, model = cast(inputs, self.precision.weights), self.model
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
            # which may be changed in place
            inputs, targets = map_tensors(torch.clone, (inputs, targets))
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
        self.clip_norm = trainer.clip_norm
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

    def step(self, shares: Sequence[Share], scale: float) -> Outcome:
        """Take a step. `scale`: of the loss, not of the gradients that the optimizer is given."""
        with self.computed(self.values, shares, scale) as outcome:
            for name, p in self.parameters.items():
                g = outcome.gradients[name]
                p.grad = None if g is None else g.clone()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(list(self.parameters.values()), self.clip_norm)
            seed_all(1)
            self.optimizer.step()
            updated = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.values |= updated | outcome.buffers
        return outcome._replace(updated=updated)

    @contextmanager
    def computed(
        self, values: Mapping[str, Tensor], shares: Sequence[Share], scale: float
    ) -> Iterator[Outcome]:
        """Compute the gradients at these weights, and keep the model whole inside."""
        whole = self.whole
        with whole.whole(values) as parameters:
            whole.precision.gradients_of(list(parameters.values()))
            loss = whole.backward(shares, scale)
            buffers = {name: b.detach().clone() for name, b in whole.model.named_buffers()}
            gradients: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
            for name, p in self.parameters.items():
                if parameters[name].grad is not None:
                    g = dense_gradient(name, parameters[name])
                    gradients[name] = g.to(p.grad_dtype or p.dtype, copy=True)
            doubles = [g.double() for g in gradients.values() if g is not None]
            norm = float(nn.utils.get_total_norm(doubles))
            yield Outcome(loss, gradients, norm, buffers, {})


def lift_learning_rates(optimizer: Optimizer) -> None:
    """Lift learning rates of zero: a warm-up may begin there, and every update would be right."""
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR


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
