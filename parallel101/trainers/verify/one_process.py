"""What one process makes of a batch: the whole model, kept by the first rank as it was before it
was cut.

    model ──▶ a copy of its modules, around the same Parameter objects: hooks and losses find them
          └─▶ cut by the trainer

To run it, the first rank exchanges the contents of the two: for a moment `model` is whole again,
for every function that refers to it.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from parallel101.trainers.layout import Axes
from parallel101.trainers.precision import Precision
from parallel101.trainers.support.arguments import LossFn, is_vocabulary_loss, loss_and_weight
from parallel101.trainers.support.batches import Batch, call
from parallel101.trainers.support.fit import evaluating
from parallel101.trainers.verify.no_trace import random_state, set_random_state

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# of dropping: its name, and its place among the arguments
PROBABILITY: Mapping[Any, tuple[str, int]] = {
    **{
        getattr(nn.functional, name): ("p", 1)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")
    },
    **{
        getattr(nn.functional, name): ("p", 1)
        for name in ("alpha_dropout", "feature_alpha_dropout")
    },
    **{
        getattr(torch, name): ("p", 1)
        for name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout")
    },
    nn.functional.scaled_dot_product_attention: ("dropout_p", 4),
    nn.functional.multi_head_attention_forward: ("dropout_p", 10),
}
LEAST_LR = 1e-3


class Outcome(NamedTuple):
    """What a step makes of a batch, by names of the whole model.

    Attributes:
        loss, evaluated: in training mode, and with perturbed weights in evaluation mode.
        gradients: None for parameters that the loss does not depend on.
        norm: of all gradients together.
        updated: the parameters after the optimizer's step.
        buffers: those with floating-point numbers, after the forward.
        drops: whether the forward called a function that drops numbers, such as F.dropout.
    """

    loss: float
    evaluated: float
    gradients: dict[str, Tensor | None]
    norm: float
    updated: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    drops: bool


class OneProcess:
    """The whole model. Raises whatever copying it or the optimizer raises, if they can't be copied.

    Args:
        model, optimizer: before they are cut.
        loss_fn: as the user gave it; of logits that are not cut.
        precision: of the layout.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn | None,
        precision: Precision,
    ):
        parameters = {id(p): p for p in model.parameters()}  # not copied
        self.model, self.precision = model, precision
        self.loss_fn = precision.of_loss(loss_fn)
        self.whole: nn.Module = copy.deepcopy(model, dict(parameters))
        if any(
            p is not q for p, q in zip(model.parameters(), self.whole.parameters(), strict=True)
        ):
            raise TypeError("it makes new parameters for a copy of its own, as Keras models do")
        copy_of_optimizer(optimizer, dict(parameters), state={})  # so that it is known now
        for module in self.whole.modules():
            # the first rank computes alone, and nobody would answer it
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = WholeBatchNorm  # type: ignore[assignment]

    def free(self) -> None:
        """Let go of the parameters that the model has no longer."""
        kept = {id(p) for p in self.model.parameters()}
        empty: dict[int, nn.Parameter] = {}
        for module in self.whole.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in kept:
                    module._parameters[name] = empty.setdefault(
                        id(p), nn.Parameter(p.data.new_empty(0), p.requires_grad)
                    )

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, `model` is whole, with these parameters and buffers."""
        found = [*self.whole.named_parameters(), *self.whole.named_buffers()]
        before = [(t, t.data, t.grad) for _, t in found]
        buffers = [(module, dict(module._buffers)) for module in self.whole.modules()]
        modules = dict(self.model.named_modules())
        for name, module in self.whole.named_modules():
            if name in modules:
                module.training = modules[name].training
        self.model.__dict__, self.whole.__dict__ = self.whole.__dict__, self.model.__dict__
        try:
            self.values = values
            for name, t in found:
                t.data = values.get(name, t.data).to(t.dtype, copy=True)
                t.grad = None
            with without_dropout(self.model, functions=not is_compiled(self.model)) as self.dropout:
                yield
        finally:
            self.model.__dict__, self.whole.__dict__ = self.whole.__dict__, self.model.__dict__
            for module, own in buffers:  # some are assigned anew in a forward
                module._buffers.update(own)
            for t, data, gradient in before:
                t.data, t.grad = data, gradient
            self.values = {}  # a whole model's, which the first rank need not keep

    # ── inside of `holding` ──

    def outputs(self, inputs: Batch) -> Any:
        with self.casting():
            return call(self.model, self.precision.cast(inputs))

    def loss(self, inputs: Batch, targets: Batch) -> Tensor:
        """The mean loss."""
        with self.casting():
            return mean_loss(self.loss_fn, self.outputs(inputs), targets)

    def master(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """The master weight of p, with its gradient."""
        found = nn.Parameter(self.values[name].detach().clone())
        found.grad = None if p.grad is None else p.grad.to(found.dtype)
        return found

    def casting(self) -> Any:
        return self.precision.forward(next(self.model.parameters()).device)

    def step(
        self,
        inputs: Batch,
        targets: Batch,
        optimizer: Optimizer,
        optimizer_state: Mapping[str, Any],
        perturbed: bool,
    ) -> Outcome:
        """One step of training. The weights after it keep the memory that `holding` has given them.

        Args: optimizer: a rank's, for its attributes and hooks. optimizer_state: the whole state
            and groups, as `ShardedOptimizer.state` returns them. perturbed: evaluate, too, and
            train with a learning rate above zero even if the optimizer's is zero now.
        """
        parameters = dict(self.model.named_parameters())
        self.precision.gradients_of(list(parameters.values()))
        loss = self.loss(inputs, targets)
        loss.backward()
        evaluated = loss.item()
        if perturbed:
            # after the forward of training, as in a layout: spectral norm learns in that
            with torch.no_grad(), evaluating(self.model):
                evaluated = self.loss(inputs, targets).item()
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if self.precision.master:
            trained = {name: self.master(name, p) for name, p in trained.items()}
            parameters = {**parameters, **trained}
        gradients = {
            name: None if p.grad is None else p.grad.detach().clone() for name, p in trained.items()
        }
        norm = math.hypot(
            *(
                torch.linalg.vector_norm(g.double()).item()
                for g in gradients.values()
                if g is not None
            )
        )
        buffers: dict[str, Tensor | None] = {
            name: b.detach().clone()
            for name, b in self.model.named_buffers()
            if b.is_floating_point()
        }

        groups = [
            {
                **{key: value for key, value in group.items() if key != "names"},
                "params": [parameters[name] for name in group["names"]],
            }
            for group in copy.deepcopy(optimizer_state["groups"])
        ]
        states = {
            parameters[name]: copy.deepcopy(state)
            for name, state in optimizer_state["state"].items()
        }
        memo = {id(p): p for p in parameters.values()}
        whole = copy_of_optimizer(
            optimizer, memo, state=defaultdict(dict, states), param_groups=groups
        )
        if perturbed:
            lift_learning_rates(whole)
        whole.step()
        updated: dict[str, Tensor | None] = {name: p.detach() for name, p in trained.items()}
        return Outcome(
            loss.item(), evaluated, gradients, norm, updated, buffers, self.dropout.found
        )


def mean_loss(loss_fn: LossFn | None, outputs: Any, targets: Any) -> Tensor:
    loss, weight = loss_and_weight(loss_fn, outputs, targets)
    return loss if weight is None else loss / weight


def whole_model(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn | None,
    precision: Precision,
    axes: Axes,
) -> tuple[OneProcess | None, str]:
    """What a layout is compared with, before the model is cut.

    None and the reason, if it can't be copied.
    """
    if is_vocabulary_loss(loss_fn):
        assert loss_fn is not None
        loss_fn = partial(loss_fn, group=axes.along([]))
    state = random_state()
    try:
        return OneProcess(model, optimizer, loss_fn, precision), ""
    except Exception as error:  # whatever a user's module raises
        return None, f"the model or the optimizer can't be copied ({type(error).__name__}: {error})"
    finally:
        set_random_state(state)  # a Keras layer that is copied draws its first weights


# ── optimizers ──


def copy_of_optimizer(optimizer: Optimizer, memo: dict[int, Any], **instead: Any) -> Optimizer:
    """A copy with all attributes of a user's class, of which torch's own way of copying keeps
    three.

    Args: memo: see copy.deepcopy. instead: attributes that it has instead of copies. Hooks are not
        copied: the object that a method belongs to may be large.
    """
    again: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = again
    others = {key: value for key, value in vars(optimizer).items() if key not in instead}
    others.pop("step", None)  # a scheduler's wrapper would step the original
    hooks = {key: copy.copy(others.pop(key)) for key in list(others) if key.endswith("_hooks")}
    again.__dict__.update(copy.deepcopy(others, memo), **hooks, **instead)
    return again


def lift_learning_rates(optimizer: Optimizer) -> None:
    """A warm-up may begin at zero, where every update is right."""
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR


class WholeBatchNorm(nn.BatchNorm1d):
    """What nn.SyncBatchNorm computes if one process has the whole batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


# ── nothing random ──


@contextmanager
def without_dropout(model: nn.Module, functions: bool) -> Iterator[WithoutDropout]:
    """Inside, every dropout keeps everything: that of modules and, if asked, of torch's
    functions, attention among them.
    """
    before, mode = [], WithoutDropout()
    for module in model.modules():
        name = (
            "p"
            if isinstance(module, DROPOUTS)
            else "dropout"
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
            else None
        )
        if name is not None:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    try:
        with mode if functions else nullcontext():
            yield mode
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class WithoutDropout(TorchFunctionMode):
    """While it is active, functions that drop numbers drop none.

    `found`: whether one was to drop some.
    """

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in PROBABILITY:
            name, place = PROBABILITY[func]
            self.found |= (args[place] if len(args) > place else kwargs.get(name, 0.0)) > 0
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has a part of it, which would be compiled again if a mode is active."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )
