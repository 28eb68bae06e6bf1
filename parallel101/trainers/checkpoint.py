"""A file that is whole or not there: what a run needs to go on, written beside the old one and put in its place in one move.

write run.pt.part ──▶ fsync ──▶ rename to run.pt        killed before the rename: the old run.pt is untouched;
                                                        after it: the new one is complete. There is no third case.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FORMAT = "parallel101 checkpoint 2"
FIELDS = {"model", "optimizer", "steps", "history"}


def write_checkpoint(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, strings, in dicts and lists) to `path`, atomically. Raises OSError where that can't be."""
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
        if isinstance(error, RuntimeError):  #  so torch says that the disk is full
            raise OSError(f"{path} could not be written: {error}") from error
        raise
    if os.name == "posix":  # the folder's entry is on disk only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote, onto the CPU. Nothing in the file is executed.

    Raises OSError where there is nothing to read, ValueError for a file that is not such a checkpoint, or not all of one.
    """
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= FIELDS:
                raise ValueError("it holds something else")
        except Exception as error:  # torch's unpickler meets foreign bytes with whatever they lead it to
            raise ValueError(
                f"{path} is not a checkpoint that Trainer.save wrote ('{FORMAT}' was expected), or not all of it: {error}"
            ) from error
    return content


def check_place(path: str | os.PathLike) -> None:
    """Raises OSError where `write_checkpoint` would not be able to write, as far as can be known before."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the folder {path.parent} can't be written to")


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises ValueError where a model's state has not the names and shapes that are expected (None: what is no tensor)."""
    for name in dict.fromkeys([*expected, *state]):
        if name not in state:
            raise ValueError(f"the checkpoint is another model's: it has no {name!r}")
        if name not in expected:
            raise ValueError(f"the checkpoint is another model's: it has {name!r}, and this model has not")
        here, there = expected[name], shape_of(state[name])
        if here != there:
            raise ValueError(f"the checkpoint is another model's: {name!r} is {there} there and {here} here")


def shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
