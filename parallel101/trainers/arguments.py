"""What a trainer is given, looked at before the first message: what is wrong on all ranks is an error on all of them, at once.

model       a module with weights that are there, on a device that the group can send from, without statistics over the batch
loss_fn     a function; it gives one number, which depends on the weights
batch       (inputs, targets), two tensors with as many samples along dim 0
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from parallel101.mesh import Group

Batch = tuple[Tensor, Tensor]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  #  over the batch; nn.SyncBatchNorm asks the other ranks
EMPTIED: WeakSet[nn.Module] = WeakSet()  #  modules whose weights a trainer has cut up: it alone can make them whole


def check_options(loss_fn: Any, clip_norm: Any, accumulate: Any, autocast: Any) -> None:
    """Raises TypeError or ValueError for what makes no sense on any rank."""
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: expected a function of (outputs, targets) that gives their mean loss, such as "
            "torch.nn.functional.mse_loss or nn.MSELoss()"
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: expected the number of microbatches a step, 1 or more")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r}: expected the largest norm that the gradients may have, above 0, or None")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise ValueError(f"autocast={autocast!r}: expected a floating-point dtype such as torch.bfloat16, or None")


def check_model(model: Any, group: Group) -> torch.device:
    """The device that the model is on. Raises TypeError or ValueError for a model that can't be trained by these ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected an nn.Module that has been built, such as MLP([4, 8, 4])")
    if any(module in EMPTIED for module in model.modules()):
        raise ValueError(
            "the model's weights are cut up already, by a trainer that was built before and can alone make them whole: "
            "build a new model for a new trainer (its .state_dict() has the weights)"
        )
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values: give it some, with model.to_empty(device=…) and its init")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if group.size > 1:
        check_norms(model)
    return device


def check_norms(model: nn.Module) -> None:
    """Raises ValueError for a norm over the batch, of which each rank sees a part."""
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and module.training:
            kind = type(module).__name__
            raise ValueError(
                f"{name!r} is a {kind}, which looks at the whole batch, and each rank has only its share: not what one process does. "
                f"Take LayerNorm, GroupNorm or RMSNorm; or nn.SyncBatchNorm, on GPUs; or freeze it: model.get_submodule({name!r}).eval()"
            )


def check_batch(batch: Any) -> Batch:
    """(inputs, targets), which may be one tensor of two. Raises TypeError or ValueError where that is not what the batch is."""
    pair = tuple(batch) if isinstance(batch, (tuple, list)) or (isinstance(batch, Tensor) and batch.dim() > 1) else ()
    if len(pair) != 2 or not all(isinstance(t, Tensor) and t.dim() for t in pair):
        raise TypeError(f"a batch is {in_words(batch)}: expected (inputs, targets), two tensors with the samples along dim 0")
    inputs, targets = pair
    if len(inputs) != len(targets):
        raise ValueError(f"inputs have {len(inputs)} samples along dim 0 and targets {len(targets)}: expected as many")
    return inputs, targets


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
        raise ValueError(f"loss_fn gave {what}: expected the mean over the samples, a tensor without dims")
    return loss


def check_depends(loss: Tensor) -> None:
    """Raises ValueError where backward could not begin."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no weight that is trained: was it detached, made of whole numbers (argmax), or computed under "
            "torch.no_grad()?"
        )
