"""Saving and resuming, on this layout or another: a checkpoint knows parameters by name, and
nothing of ranks.

    2 ranks   step, step, save ─▶ run.pt       weights, optimizer, steps, history of the whole model
    3 ranks   run.pt ─▶ resume, step, …        all is checked; then each rank takes its part

    run.pt.part ──▶ fsync ──▶ rename to run.pt     a file is whole, or not there

Killed before the rename, the old run.pt is untouched; after it, the new one is complete.
"""

from __future__ import annotations

import copy
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.options import Trainer, mark_as_cut, need_numbers

FORMAT = "parallel101 checkpoint 2"
FIELDS = {"model", "optimizer", "steps", "history"}


def state_dict(trainer: Trainer) -> dict[str, Any]:
    """Return a copy of the whole model's state on every rank, for any `model.load_state_dict`.

    Collective: call it on every rank.
    """
    need_numbers(trainer, "state_dict")
    whole = trainer.layout.gather(trainer.parts, list(trainer.layout.entries))
    trainer.reads_parts = True
    try:
        state = copy.copy(trainer.model.state_dict())
    finally:
        trainer.reads_parts = False
    for key, value in state.items():
        name = trainer.state.get(key)
        state[key] = copy.deepcopy(value if name is None else whole[name].detach())
    return state


def gradients(trainer: Trainer) -> dict[str, Tensor | None]:
    """Return the gradients of the last step (clipped, if they were), by the names of the
    model's parameters. Collective.
    """
    need_numbers(trainer, "gradients")
    parts = {name: p.grad for name, p in trainer.owned.items() if p.grad is not None}
    return {**dict.fromkeys(trainer.trained), **trainer.layout.gather(parts, trainer.reached)}


def save(trainer: Trainer, path: str | os.PathLike, *, scheduler: Any = None) -> None:
    """Write all that is needed to continue: weights, optimizer state, steps, history, and the
    learning-rate scheduler's state if it is given.

    Collective; the first rank writes, atomically. Any trainer on any number of ranks can
    `resume` it. Raises OSError on every rank if the file could not be written.
    """
    need_numbers(trainer, "save")
    content = {
        "model": state_dict(trainer),
        "optimizer": trainer.sharded_optimizer.state(),
        "steps": trainer.steps,
        "history": trainer.history.as_dict(),
        "loss_scale": trainer.gradient_sync.scale,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    write = partial(write_checkpoint, path, content) if trainer.position == 0 else bool
    trainer.agree.all_or_none(f"save to {path}", write)


def resume(trainer: Trainer, path: str | os.PathLike, *, scheduler: Any = None) -> int:
    """Continue from what `save` wrote, by whatever trainer on however many ranks; returns the
    number of steps that were taken. Collective.

    Args:
        scheduler: of the learning rate; it gets the state that was saved, and there must be
            one.

    Everything is checked before anything is changed. Raises, on every rank, OSError if the file
    can't be read on one, and ValueError if it is not such a file, is of another model or
    optimizer, or differs from the one that the first rank reads.
    """
    need_numbers(trainer, "resume")

    def read() -> tuple[dict[str, Any], dict[str, Any], Any]:
        with open(path, "rb") as file:
            try:  # nothing in the file is executed
                content = torch.load(file, map_location="cpu", weights_only=True)
                if content["format"] != FORMAT or not content.keys() >= FIELDS:
                    raise ValueError("it holds something else")
            except Exception as error:  # torch's unpickler raises anything on foreign bytes
                raise ValueError(
                    f"{path} is not a checkpoint that Trainer.save wrote ('{FORMAT}' was "
                    f"expected), or it is incomplete: {error}"
                ) from error
        entries, names, saved = trainer.layout.entries, trainer.state, content["model"]
        here = {key: tuple(entries[name].shape) for key, name in names.items() if name is not None}
        known = [key for key in saved if names.get(key, key) is not None]
        there = {key: tuple(getattr(saved[key], "shape", ())) for key in known}
        for key in dict.fromkeys([*here, *there]):
            shapes = there.get(key, "none"), here.get(key, "none")
            if shapes[0] != shapes[1]:
                differ = "has shape {} there and {} here".format(*shapes)
                raise ValueError(f"the checkpoint is another model's: {key!r} {differ}")
        if scheduler is not None and content.get("scheduler") is None:
            raise ValueError(
                f"{path} has no scheduler's state: expected a file that save(…, scheduler=…) wrote"
            )
        optimizer = trainer.sharded_optimizer.state_to_load(content["optimizer"])
        return content, optimizer, type(trainer.history)(**content["history"])

    content, optimizer, history = trainer.agree.all_or_none(f"resume from {path}", read)
    tensors = {**content["model"], "steps": torch.tensor(content["steps"])}
    trainer.agree.check_same(
        [(name, value) for name, value in tensors.items() if isinstance(value, Tensor)],
        f"the ranks read different contents from {path}",
        "expected one file, or copies of it",
    )
    parts, others = trainer.parts, {}
    with torch.no_grad():
        for key, value in content["model"].items():
            name = trainer.state.get(key)
            if name is None:
                others[key] = value
            elif name in parts:
                parts[name].copy_(trainer.layout.cut(name, value))
    trainer.model.load_state_dict(others, strict=False)
    trainer.gradient_sync.publish()
    trainer.optimizer.load_state_dict(optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(content["scheduler"])
    if trainer.precision.scaled and content.get("loss_scale", 1.0) != 1.0:
        trainer.gradient_sync.scale = content["loss_scale"]
    trainer.steps, trainer.history = content["steps"], history
    return trainer.steps


def refuse_parts(trainer: Trainer) -> None:
    """Let `state_dict` and copies of a model that is cut raise an error: they would have
    shards, or nothing, in place of weights. Another trainer refuses it.
    """
    entries, model = trainer.layout.entries, trainer.model
    here = [(name, p) for name, p in model.named_parameters() if name in entries]
    whole = all(p.shape == entries[name].shape for name, p in here)
    if not whole or any(entry.placements.keys() - {"dp"} for entry in entries.values()):
        mark_as_cut(model)
    if whole:
        return

    of_trainer = weakref.ref(trainer)  # the model is no reason to keep it

    def refuse(*_: Any) -> None:
        if not getattr(of_trainer(), "reads_parts", False):
            raise RuntimeError(
                "this rank has only a part of the model's weights: expected "
                "trainer.state_dict(), which all ranks call, and which gives "
                "the whole model's (a new model's load_state_dict takes it)"
            )

    model.register_state_dict_pre_hook(refuse)
    model.__deepcopy__ = refuse


def write_checkpoint(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, strings, in dicts and lists) to `path`, atomically.

    Raises OSError if that fails.
    """
    check_place(path)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # torch's error for a full disk
            raise OSError(f"{path} could not be written: {error}") from error
        raise


def check_place(path: str | os.PathLike) -> None:
    """Raise OSError if `write_checkpoint` could not write there, as far as can be known before."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: create it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the folder {path.parent} can't be written to")
