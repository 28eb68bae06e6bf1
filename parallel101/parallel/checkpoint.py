"""A file that is whole or not there: what a run needs to go on, written beside the old one and put in its place in one move.

write run.pt.part ──▶ fsync ──▶ rename to run.pt        killed before the rename: the old run.pt is untouched;
                                                        after it: the new one is complete. There is no third case.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = "parallel101 checkpoint 1"
FIELDS = {"model", "optimizer", "steps", "history"}


def write_checkpoint(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, strings, in dicts and lists) to `path`, atomically. Raises OSError where that can't be."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save({"format": FORMAT, **content}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name == "posix":  # the folder's entry is on disk only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote, onto the CPU. Nothing in the file is executed.

    Raises FileNotFoundError, or ValueError for a file that is not such a checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= FIELDS:
            raise ValueError("it holds something else")
    except OSError:
        raise
    except Exception as error:  # torch's unpickler meets foreign bytes with whatever they lead it to
        raise ValueError(f"{path} is not a checkpoint that Trainer.save wrote ('{FORMAT}' was expected): {error}") from error
    return content
