"""Where in the caller's code a message came from: "file:line" of the first frame that is neither torch's nor ours.

lesson.py:12  →  parallel101/collectives/…  →  torch/distributed/…        says lesson.py:12
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from types import CodeType, FrameType

import torch

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, os.path.dirname(__file__)))
_PLUMBING = {contextlib.__file__, functools.__file__, threading.__file__}  #  `with span(...)` and decorators pass through these

_inside: dict[CodeType, bool] = {}
_lines: dict[tuple[CodeType, int], str] = {}


def caller() -> str:
    """The first caller outside torch and parallel101, as "file:line"; "?" when there is none."""
    return where(sys._getframe(1))


def where(frame: FrameType | None) -> str:
    """The same, from `frame` outwards.

    It is asked for every message of a run, so what a code object is, and how a line is written, are looked up once.
    """
    while frame is not None:
        code = frame.f_code
        inside = _inside.get(code)
        if inside is None:
            inside = _inside[code] = is_inside(code.co_filename)
        if not inside:
            key = (code, frame.f_lineno)
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back
    return "?"


def is_inside(filename: str) -> bool:
    """Whether a file is torch's, parallel101's, or one of the standard library's that stand between them and the caller."""
    return filename.startswith(("<frozen", *_LIBRARIES)) or filename in _PLUMBING
