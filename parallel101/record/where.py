"""Where in the caller's code a message came from: "file:line" of the first frame that is neither torch's nor ours.

lesson.py:12  →  parallel101/collectives/…  →  torch/distributed/…        says lesson.py:12
"""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType

import torch

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, os.path.dirname(__file__)))
_PROGRAMS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench", "")  #  are callers, wherever they lie
#  `with span(...)` and decorators pass through these: torch marks calls as deprecated by one of the last two
_PLUMBING = {sys.modules[name].__file__ for name in ("contextlib", "functools", "threading", "typing_extensions", "warnings")}

#  code objects go by their ids here, as their hashes are slow
_seen: list[CodeType] = []  #  kept, so that no other ever has the id of one
_inside: set[int] = set()
_places: dict[int, dict[int, str]] = {}  #  of code that is not inside: "file:line" by instruction


def caller() -> str:
    """The first caller outside torch and parallel101, as "file:line"; "?" when there is none."""
    return where(sys._getframe(1))


def where(frame: FrameType | None) -> str:
    """The same, from `frame` outwards.

    It is asked for every message of a run, so what a code object is, and where an instruction of it stands, are looked up once.
    """
    while frame is not None:
        code = frame.f_code
        if id(code) in _inside:
            frame = frame.f_back
            continue
        places = _places.get(id(code))
        if places is None:
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


def shown(place: str) -> str:
    """A "file:line" as a person wants to read it, with the line itself where it is at hand: "a.py:7: dist.recv(x, 1)".

    A notebook's cell has a file of an unspeakable name; it is called by its number, "cell [5], line 4".
    """
    name, _, number = place.rpartition(":")
    if not number.isdigit():
        return place
    source = linecache.getline(name, int(number)).strip()
    if cell := cell_name(name):
        place = f"{cell}, line {number}"
    return f"{place}: {source if len(source) <= 80 else source[:79] + '…'}" if source else place


def cell_name(filename: str) -> str | None:
    """ "cell [5]" for the file that IPython pretends a notebook's cell to be; None for any other."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    return None if named is None else f"cell {named[1].removeprefix('In').strip()}"


def is_inside(filename: str) -> bool:
    """Whether a file is torch's, parallel101's, or one of the standard library's that stand between them and the caller."""
    return (filename.startswith(("<frozen", *_LIBRARIES)) and not filename.startswith(_PROGRAMS)) or filename in _PLUMBING
