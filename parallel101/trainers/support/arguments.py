"""The arguments of a trainer, checked before the first message, so that a mistake is an error at once.

model       a module whose weights have values, on a device that the group can send from, without statistics over the batch
loss_fn     a function; it returns one number, which depends on the weights
batch       (inputs, targets), two tensors with the same number of samples along dim 0
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel101.mesh import Group

Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]
OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # statistics over the batch; nn.SyncBatchNorm asks the other ranks
SHARDED: WeakSet[nn.Module] = WeakSet()  # modules whose weights a trainer has cut up; only that trainer can gather them


def check_options(loss_fn: Any, clip_norm: Any, autocast: Any) -> None:
    """Raises TypeError or ValueError for what makes no sense on any rank."""
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: expected a function of (outputs, targets) that returns their mean loss, such as "
            "torch.nn.functional.mse_loss or nn.MSELoss()"
        )
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r}: expected the largest norm that the gradients may have, above 0, or None")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise ValueError(f"autocast={autocast!r}: expected a floating-point dtype such as torch.bfloat16, or None")


def check_accumulate(accumulate: Any) -> int:
    """Raises ValueError for what is no number of microbatches."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: expected the number of microbatches in a step, 1 or more")
    return accumulate


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Raises ValueError for what is no number of bytes."""
    if bucket_bytes is not None and (not isinstance(bucket_bytes, int) or bucket_bytes < 0):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: expected a number of bytes, 0 for one gradient at a time, or None")


def check_model(model: Any, group: Group) -> torch.device:
    """The device that the model is on. Raises TypeError or ValueError for a model that can't be trained by these ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected an nn.Module that has been built, such as MLP([4, 8, 4])")
    if any(module in SHARDED for module in model.modules()):
        raise ValueError(
            "the model's weights are cut up already, by a trainer that was built before: "
            "build a new model for a new trainer (the old one's .state_dict() has the weights)"
        )
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values: give it some, with model.to_empty(device=…) and its init")
    if group.size > 1:
        check_norms(model)
    return device_of(model)


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def check_norms(model: nn.Module) -> None:
    """Raises ValueError for a norm over the batch, since each rank sees only a part of it."""
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and module.training:
            kind = type(module).__name__
            raise ValueError(
                f"{name!r} is a {kind}, which looks at the whole batch, and each rank has only its share: "
                "the result would differ from one process. Use LayerNorm, GroupNorm or RMSNorm; or nn.SyncBatchNorm, on GPUs; "
                f"or freeze it: model.get_submodule({name!r}).eval()"
            )


def check_batch(batch: Any) -> Batch:
    """(inputs, targets); a batch may also be one tensor of two. Raises TypeError or ValueError for anything else."""
    pair = tuple(batch) if isinstance(batch, (tuple, list)) or (isinstance(batch, Tensor) and batch.dim() > 1) else ()
    if len(pair) != 2 or not all(isinstance(t, Tensor) and t.dim() for t in pair):
        raise TypeError(f"a batch is {in_words(batch)}: expected (inputs, targets), two tensors with the samples along dim 0")
    inputs, targets = pair
    if len(inputs) != len(targets):
        raise ValueError(f"inputs have {len(inputs)} samples along dim 0 and targets {len(targets)}: expected the same number")
    return inputs, targets


def shape_number(inputs: Tensor) -> int:
    """A number for the shape of a sample and its dtype: equal ones have the same, on every rank. Exact as a float64."""
    digest = hashlib.blake2b(f"{tuple(inputs.shape[1:])} {inputs.dtype}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        parts = [in_words(part) if isinstance(part, Tensor) else type(part).__name__ for part in value[:4]]
        return f"a {type(value).__name__} of {', '.join(parts) or 'nothing'}{', …' if len(value) > 4 else ''}"
    return "None" if value is None else f"a {type(value).__name__}"


def check_loss(loss: Any) -> Tensor:
    """One number. Raises ValueError for anything else."""
    if not isinstance(loss, Tensor) or loss.dim():
        what = in_words(loss) if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"loss_fn returned {what}: expected the mean over the samples, a tensor without dims")
    return loss


def check_depends(loss: Tensor) -> None:
    """Raises ValueError if backward could not begin."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no weight that is trained: was it detached, made of whole numbers (argmax), or computed under "
            "torch.no_grad()?"
        )
