"""Finds where in the program a call is: "file:line" of the first frame of the program's own.

Frames of torch and of parallel101 are passed over.

lesson.py:12  →  parallel101/collectives/…  →  torch/distributed/…        gives lesson.py:12
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType

import torch

from parallel101.laboratory import PACKAGE
from parallel101.laboratory.record.ipython import shell

_PACKAGE = os.path.join(PACKAGE, "")
_LIBRARIES = (os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""), _PACKAGE)
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PROGRAMS = os.path.join(_PACKAGE, "laboratory", "bench", "")  # these files count as callers
# frames between a call and its caller: `with span(...)`, decorators; torch deprecates calls with
# one of the last two
_PLUMBING = {
    sys.modules[name].__file__
    for name in ("contextlib", "functools", "threading", "typing_extensions", "warnings")
}

# code objects by their id, because their hash is slow
_seen: list[CodeType] = []  # keeps them alive, so that no other object gets the same id
_inside: set[int] = set()
_places: dict[int, dict[int, str]] = {}  # of code that is not inside, "file:line" by instruction
_standing: set[int] = set()  # code objects of functions that act for a line elsewhere


def caller() -> str:
    """Return the first caller outside torch and parallel101, as "file:line", or "?" if none."""
    return where(sys._getframe(1))


def where(frame: FrameType | None) -> str:
    """Return the first "file:line" outside torch and parallel101, starting from `frame`.

    This runs for every message, so it looks up only once whether a code object is inside, and in
    which line an instruction is.
    """
    while frame is not None:
        code = frame.f_code
        if id(code) in _inside:
            frame = frame.f_back
            continue
        places = _places.get(id(code))
        if places is None:
            if id(code) in _standing:
                return frame.f_locals["place"]
            _seen.append(code)
            if is_inside(code.co_filename):
                _inside.add(id(code))
                continue
            places = _places[id(code)] = {}
        place = places.get(frame.f_lasti)
        if place is None:
            place = places[frame.f_lasti] = f"{code.co_filename}:{frame.f_lineno}"
        return place
    return "?"


def stands_for_a_place(function: Callable[..., object]) -> None:
    """Let calls of `function` count as made at its argument `place`, a "file:line".

    The grader repeats a rank's calls that way.
    """
    _seen.append(function.__code__)
    _standing.add(id(function.__code__))


def shown(place: str) -> str:
    """Format a "file:line" for readers, with its source line: "a.py:7: dist.recv(x, 1)".

    A notebook cell, whose file has a generated name, is shown by its number: "cell [5], line 4".
    """
    name, _, number = place.rpartition(":")
    if not number.isdigit():
        return place
    linecache.checkcache(name)  # the file may have changed, or the working directory
    source = linecache.getline(name, int(number)).strip()
    place = named(place)
    return f"{place}: {source if len(source) <= 80 else source[:79] + '…'}" if source else place


def named(place: str) -> str:
    """Format a "file:line" without the source line: "a.py:7", or "cell [5], line 4"."""
    name, _, number = place.rpartition(":")
    cell = cell_name(name)
    return f"{cell}, line {number}" if cell else place


def cell_name(filename: str) -> str | None:
    """Return "cell [5]" if IPython runs a notebook cell under this file name, else None."""
    named = getattr(getattr(shell(), "compile", None), "format_code_name", lambda _: None)(filename)
    return None if named is None else f"cell {named[1].removeprefix('In').strip()}"


def is_inside(filename: str) -> bool:
    """Return whether a file is torch's, parallel101's, or the standard library's between them."""
    return (
        filename.startswith(("<frozen", *_LIBRARIES)) and not filename.startswith(_PROGRAMS)
    ) or filename in _PLUMBING


def is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, parallel101, Python or an installed package."""
    return is_inside(filename) or filename.startswith(_INSTALLED)
