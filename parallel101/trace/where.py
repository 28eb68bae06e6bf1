"""Where in the caller's own code something happened: the first frame outside torch and parallel101.

    lesson.py:12  →  parallel101/collectives/…  →  torch/distributed/…        says lesson.py:12
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_ours: dict[CodeType, bool] = {}


def is_inside(filename: str) -> bool:
    """Whether a file is torch's, parallel101's, or one of the standard library's that stand between them and the caller."""
    between = os.path.basename(filename) in ("contextlib.py", "threading.py", "functools.py")
    return between or filename.startswith(("<frozen", *_INSIDE))


def caller() -> str:
    """The caller's "file:line", or "" when every frame is torch's or parallel101's."""
    return where(sys._getframe(1))


def where(frame: FrameType | None) -> str:
    """The "file:line" of the innermost frame, from `frame` outwards, that is the caller's own code."""
    while frame is not None:
        code = frame.f_code
        inside = _ours.get(code)
        if inside is None:
            inside = _ours[code] = is_inside(code.co_filename)
        if not inside:
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
