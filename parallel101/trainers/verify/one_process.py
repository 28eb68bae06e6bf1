"""One process: the whole model, as it was before the trainer cut it, and steps of it on a whole
batch.

    before the cut    the first rank notes what __dict__ of every module holds
    make_whole()      the same modules have it again: model, loss_fn and hooks find whole weights,
                      and everything else as it is now; a Snapshot puts the cut model back
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import MethodType
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
from parallel101.trainers.verify.report import STEPS
from parallel101.trainers.verify.snapshot import MISSING, seed_all

TENSORS, HOOKS = ("_parameters", "_buffers", "_modules"), "_hooks"
LEAST_LR = 1e-3
LARGE, LARGE_IN_HALF = 1000.0, 16.0  # about the largest gradient of the scaled loss
Share = tuple[Batch, Batch]
Values = Mapping[str, Tensor]


class Outcome(NamedTuple):
    """The results of a step, by names of the whole model.

    Attributes:
        scale: of the loss, not of its gradients.
        loss: of the batch, before the update.
        gradients: None for parameters that the loss does not depend on.
        norm: of all gradients together.
        buffers: after the forward.
        updated: the trained parameters after the optimizer's step.
    """

    scale: float
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
            keys = before.keys() | now.keys()
            pairs = {key: (before.get(key, MISSING), now.get(key, MISSING)) for key in keys}
            self.changed[module] = {key: pair for key, pair in pairs.items() if differ(*pair)}
        del self.before

    def free(self) -> None:
        """Free the memory of weights that the cut model doesn't have."""
        kept = {id(p) for p in self.model.parameters()}
        for p in self.parameters.values():
            if id(p) not in kept:
                p.data, p.grad = p.data.new_empty(0), None

    def make_whole(self, values: Values) -> None:
        """Make the model whole, with copies of these parameters and buffers."""
        for module, changed in self.changed.items():
            undo_cut(module.__dict__, changed)
            if isinstance(module, nn.SyncBatchNorm):  # nobody would answer this rank
                module.__dict__["forward"] = MethodType(nn.BatchNorm1d.forward, module)
        for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]:
            value = values.get(name, t.data if t.numel() else self.unsaved.get(name, t.data))
            t.data, t.grad = value.to(t.dtype, copy=True), None

    # ── inside, until the snapshot is restored ──

    def without_chance(self) -> AbstractContextManager[None]:
        return deterministic(self.model, [self.model])

    def bytes_of_a_sample(self, inputs: Batch) -> float:
        """Return the bytes one sample's forward keeps for backward; 0 if it can't run alone."""
        weights = {p.untyped_storage()._cdata for p in self.parameters.values()}
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            kept[storage._cdata] = 0 if storage._cdata in weights else storage.nbytes()
            return t

        with suppress(Exception), saved_tensors_hooks(pack, lambda t: t):
            self.outputs(map_tensors(lambda t: t[:1].clone(), inputs))
        return float(sum(kept.values()))

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

    def backward(self, shares: Sequence[Share], scale: float) -> float:
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
        """Return the loss in evaluation mode; NaN if the model can't be evaluated, as one whose
        forward takes a gradient.
        """
        with suppress(RuntimeError), torch.no_grad(), evaluating(self.model), self.without_chance():
            losses = [(loss.item(), weight) for loss, weight in self.losses(shares)]
            return sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)
        return math.nan

    def compute(
        self,
        values: Values,
        shares: Sequence[Share],
        dtypes: Mapping[str, torch.dtype],
        scale: float,
    ) -> Outcome:
        """Compute the loss and its gradients at these weights. `dtypes`: of the gradients."""
        self.make_whole(values)
        parameters = dict(self.model.named_parameters())
        self.precision.gradients_of(list(parameters.values()))
        loss = self.backward(shares, scale)
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        gradients: dict[str, Tensor | None] = dict.fromkeys(dtypes)
        for name, dtype in dtypes.items():
            if parameters[name].grad is not None:
                gradients[name] = dense_gradient(name, parameters[name]).to(dtype, copy=True)
        exactly = [in_float64(g) for g in gradients.values() if g is not None]
        norm = float(nn.utils.get_total_norm(exactly))
        return Outcome(scale, loss, gradients, norm, buffers, {})


def train(
    whole: WholeModel, trainer: Trainer, values: Values, state: Any, shares: Sequence[Share]
) -> list[Outcome]:
    """Take three steps of one process, with the trainer's own optimizer.

    Args:
        whole: the model.
        trainer: the first rank's.
        values: parameters and buffers, by name; of mixed precision, the master weights.
        state: the optimizer's whole state and groups, as `ShardedOptimizer.state` gives them.
        shares: of the batch.
    """
    outcomes: list[Outcome] = []
    optimizer, parameters = trainer.optimizer, whole.parameters
    if whole.precision.master:
        parameters = {name: nn.Parameter(values[name].detach().clone()) for name in trainer.trained}
    for group, of_all in zip(optimizer.param_groups, state["groups"]):
        group["params"] = [parameters[name] for name in of_all["names"]]
    optimizer.state.clear()
    for name, of_one in state["state"].items():
        optimizer.state[parameters[name]] = dict(of_one)
    lift_learning_rates(optimizer)
    dtypes = dtypes_of_trained(trainer)
    wanted = LARGE_IN_HALF if trainer.precision.weights == torch.float16 else LARGE
    for step in range(STEPS):
        scale = scale_for(outcomes[-1].gradients, wanted) if step == STEPS - 1 else 1.0
        outcome = whole.compute(values, shares, dtypes, scale)
        trained = [parameters[name] for name in trainer.trained]
        for p, g in zip(trained, outcome.gradients.values()):
            p.grad = None if g is None else g.clone()
        if trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, trainer.clip_norm)
        seed_all(1)
        optimizer.step()
        updated = {name: p.detach().clone() for name, p in zip(trainer.trained, trained)}
        values = {**values, **updated, **outcome.buffers}
        outcomes.append(outcome._replace(updated=updated))
    whole.make_whole(values)
    return outcomes


def dtypes_of_trained(trainer: Trainer) -> dict[str, torch.dtype]:
    return {name: trainer.layout.entries[name].dtype for name in trainer.trained}


def lift_learning_rates(optimizer: Optimizer) -> None:
    """Lift learning rates of zero: a warm-up may begin there, and every update would be right."""
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR


def scale_for(gradients: Mapping[str, Tensor | None], wanted: float) -> float:
    """Return a power of two that makes the largest gradient about as large as `wanted`."""
    size = max(map(largest, gradients.values()), default=0.0)
    if not 0 < size < math.inf:
        return 1.0
    return 2.0 ** max(0, min(40, round(math.log2(wanted / size))))


def in_float64(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float64))


def largest(t: Tensor | None) -> float:
    """Return the largest absolute value; infinity if one is not a number."""
    if t is None or not t.numel():
        return 0.0
    size = float((t.detach().to_dense() if t.is_sparse else t.detach()).abs().max())
    return math.inf if math.isnan(size) else size


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


def undo_cut(now: dict[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Undo the changes of the cut in a module's attributes. Hooks that came later stay."""
    for key, (before, after) in changed.items():
        if before is MISSING:
            now.pop(key, None)
        elif key.endswith(HOOKS):
            later = {i: hook for i, hook in now[key].items() if i not in after}
            now[key] = type(now[key])({**before, **later})
        else:
            now[key] = dict(before) if key in TENSORS else before
