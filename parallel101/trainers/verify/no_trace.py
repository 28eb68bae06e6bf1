"""A comparison leaves no trace: afterwards weights, gradients, buffers and random numbers are as
they were.

So is what the trainer's parts learn of the model in their first step, such as the order of its
layers: a part names those attributes in LEARNT. What a model keeps elsewhere, in an attribute of
Python's, is not put back.
"""

from __future__ import annotations

import copy
import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.precision import MasterWeights
from parallel101.trainers.trainer import Trainer


@contextmanager
def untouched(trainer: Trainer) -> Iterator[None]:
    """Afterwards weights, gradients, buffers, random numbers and everything that the trainer
    has learnt of the model are as before.
    """
    pieces = [p for sync in (trainer.sync, computing_sync(trainer)) for p in sync.owned.values()]
    parameters = list(dict.fromkeys([*trainer.model.parameters(), *pieces]))  # many are both
    # ZeRO-3's are empty, and its owned pieces are not
    weights = [(p, p.detach().clone()) for p in parameters if p.numel()]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    reached, state = trainer.reached, random_state()
    learnt = [
        (part, name, copy.copy(getattr(part, name)))
        for part in parts_of(trainer)
        for name in getattr(part, "LEARNT", ())
    ]
    try:
        with with_buffers_restored(trainer.model):
            yield
    finally:
        set_random_state(state)
        with torch.no_grad():
            for p, value in weights:
                p.copy_(value)
            for p, gradient, before in gradients:
                p.grad = None if gradient is None else gradient.copy_(before)  # type: ignore[arg-type]
        for part, name, known in learnt:
            setattr(part, name, known)
        trainer.reached = reached


@contextmanager
def with_buffers_restored(model: nn.Module) -> Iterator[None]:
    before = [
        (m, name, b, b.clone())
        for m in model.modules()
        for name, b in m._buffers.items()
        if b is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer  # a forward may have assigned another
                buffer.copy_(value)


def return_freed_memory() -> None:
    """Return what was freed to the system. (glibc only; elsewhere nothing happens.)

    glibc keeps freed blocks of a few MB for later ones. After a comparison the first rank kept ten
    times the weights, which training never needed again.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def parts_of(trainer: Trainer) -> Iterator[Any]:
    """Those that learn something of the model, in attributes that they name in LEARNT."""
    yield getattr(trainer.runner, "messages", None)
    yield trainer.sync
    inner = computing_sync(trainer)
    for sync in getattr(inner, "syncs", [inner]):
        yield sync
        yield getattr(sync, "live", None)


def computing_sync(trainer: Trainer) -> GradientSync:
    """What synchronises the gradients of the weights that the model computes with."""
    return trainer.sync.sync if isinstance(trainer.sync, MasterWeights) else trainer.sync


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def random_state() -> list[Any]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return [
        torch.get_rng_state(),
        random.getstate(),
        cuda,
        numpy.random.get_state() if numpy else None,
    ]


def set_random_state(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        torch.cuda.set_rng_state_all(state[2])
    if state[3] is not None:
        sys.modules["numpy"].random.set_state(state[3])
