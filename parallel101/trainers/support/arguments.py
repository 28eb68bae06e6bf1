"""The arguments of a trainer, checked before the first message, so that a mistake is an error at
once.

model       a module whose weights have values, on a device that the group can send from
loss_fn     a function; it returns one number, which depends on the weights, or a sum and its weight
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallel101.trainers.support.batches import in_words

LossFn = Callable[[Any, Any], Any]  # (outputs, targets) → the mean loss, or (sum, weight)
OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]

CUT = "cut_by_a_parallel101_trainer"  # attribute of modules


def mark_as_cut(model: nn.Module) -> None:
    """Mark the model so that `check_model` refuses it: only this trainer can gather its weights."""
    for module in model.modules():
        object.__setattr__(module, CUT, True)


def check_options(loss_fn: Any, clip_norm: Any, autocast: Any) -> None:
    """Raise TypeError or ValueError for options that make no sense on any rank."""
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        raise TypeError(
            f"loss_fn={loss_fn!r}: expected a function of (outputs, targets) that returns "
            "their mean loss, such as "
            "torch.nn.functional.mse_loss or nn.MSELoss(), or None if the model returns its loss"
        )
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ValueError(
            f"clip_norm={clip_norm!r}: expected the largest norm that the gradients may have, "
            "above 0, or None"
        )
    if autocast is not None and not (
        isinstance(autocast, torch.dtype) and autocast.is_floating_point
    ):
        raise ValueError(
            f"autocast={autocast!r}: expected a floating-point dtype such as torch.bfloat16, "
            "or None"
        )


def check_accumulate(accumulate: Any) -> int:
    """Return `accumulate`. Raises ValueError unless it is a number of microbatches."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate!r}: expected the number of microbatches in a step, 1 or more"
        )
    return accumulate


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


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def is_vocabulary_loss(loss_fn: object) -> TypeGuard[Callable[..., Tensor]]:
    """Return whether it is vocabulary_cross_entropy, or a functools.partial of it. It is known by
    its name, so that trainers without tensor parallel don't import it.
    """
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    own = getattr(function, "__module__", "").startswith("parallel101.trainers.")
    return own and getattr(function, "__name__", "") == "vocabulary_cross_entropy"


def loss_and_weight(
    loss_fn: LossFn | None, outputs: Any, targets: Any
) -> tuple[Tensor, float | None]:
    """Return the loss, and its weight if it is a sum. Raises ValueError for anything else.

    Args: loss_fn: returns a mean over the samples, or (sum, weight). None: the model returns its
        loss, or outputs with a `loss`.
    """
    if loss_fn is not None:
        loss = loss_fn(outputs, targets)
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", outputs)
    weight = None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, given = loss
        if isinstance(given, Tensor) and given.is_meta:
            raise ValueError(
                "the weight of the loss is on the meta device, which has no numbers: expected a "
                "Python number there, such as targets.numel()"
            )
        if isinstance(given, Tensor) and given.requires_grad:
            raise ValueError(
                "the weight of the loss needs a gradient, but the sum is divided by it as by a "
                "plain number: expected (sum of losses, their weight) with weight.detach(), or "
                "their mean"
            )
        weight = float(given)
        if not weight >= 0:
            raise ValueError(
                f"the loss has the weight {weight}: expected (sum of losses, their weight), a "
                "weight of 0 or more"
            )
    if not isinstance(loss, Tensor) or loss.dim():
        what = in_words(loss) if isinstance(loss, Tensor) else repr(loss)
        if loss_fn is None:
            raise ValueError(
                f"loss_fn is None, and the model's loss is {what}: expected a model that "
                "returns its loss, or outputs with a loss; "
                "or pass loss_fn=lambda outputs, targets: …"
            )
        raise ValueError(
            f"loss_fn returned {what}: expected the mean over the samples, a tensor without "
            "dims, or (sum, weight)"
        )
    return loss, weight


def check_depends(loss: Tensor) -> None:
    """Raise ValueError if backward could not begin."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss doesn't depend on any trained weight: was it detached, made of whole "
            "numbers (argmax), or computed under "
            "torch.no_grad()?"
        )
