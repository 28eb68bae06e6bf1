"""The arguments of a trainer, checked before the first message, so that a mistake is an error at
once.

model       a module whose weights have values, on a device that the group can send from
loss_fn     a function
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallel101.mesh import Group

LossFn = Callable[[Any, Any], Any]  # (outputs, targets) → the mean loss, or (sum, weight)
OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]

Trainer = Any  # a HybridTrainer, which hybrid.py puts together from what takes one

CUT = "cut_by_a_parallel101_trainer"  # attribute of modules


def mark_as_cut(model: nn.Module) -> None:
    """Mark the model so that `check_model` refuses it: only this trainer can gather its weights."""
    for module in model.modules():
        object.__setattr__(module, CUT, True)


def check_loss_fn(loss_fn: Any) -> None:
    """Raise TypeError unless it is a function or None."""
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        raise TypeError(
            f"loss_fn={loss_fn!r}: expected a function of (outputs, targets) that returns "
            "their mean loss, such as "
            "torch.nn.functional.mse_loss or nn.MSELoss(), or None if the model returns its loss"
        )


def check_model(model: Any) -> torch.device:
    """Return the device that the model is on.

    Raises TypeError or ValueError for a model that can't be trained.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={model!r}: expected an nn.Module that has been built, such as MLP([4, 8, 4])"
        )
    if any(getattr(module, CUT, False) for module in model.modules()):
        raise ValueError(
            "the model's weights were already cut up by another trainer: "
            "build a new model for a new trainer (the old one's .state_dict() has the weights)"
        )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise ValueError(
                f"{name!r} has no shape yet, since its module is lazy: run the model once "
                "first, model(inputs)"
            )
    on_gpus = torch.get_default_device().type == "meta"  # a virtual one: launch(…, device=…)
    for name, p in model.named_parameters():
        if on_gpus and not p.is_meta:
            raise ValueError(
                f"{name!r} is on {p.device}, but the ranks have virtual GPUs, whose tensors are on "
                "the meta device: build the model in the program, or call model.to('meta') there"
            )
        if p.is_meta and not on_gpus:
            raise ValueError(
                f"{name!r} is on the meta device and has no values: give it some, with "
                "model.to_empty(device=…) and its init, or launch with device=…, such as "
                '"H100", to train without values'
            )
    return device_of(model)


def need_numbers(trainer: Trainer, method: str) -> None:
    """Raise ValueError if the model is on the meta device, which has no numbers."""
    if trainer.device.type == "meta":
        raise ValueError(
            f"{method}() needs numbers, but the model is on the meta device, which has none: "
            "use step() and describe() there, or launch without device="
        )


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def is_vocabulary_loss(loss_fn: object) -> TypeGuard[Callable[..., Tensor]]:
    """Return whether it is vocabulary_cross_entropy, or a functools.partial of it. It is known by
    its name, so that trainers without tensor parallel don't import it.
    """
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    own = getattr(function, "__module__", "").startswith("parallel101.trainers.")
    return own and getattr(function, "__name__", "") == "vocabulary_cross_entropy"


def loss_over(group: Group, loss_fn: LossFn | None) -> LossFn | None:
    """Return loss_fn for logits that are cut over this group, if it takes such logits."""
    return functools.partial(loss_fn, group=group) if is_vocabulary_loss(loss_fn) else loss_fn
