"""The collectives, written by hand over isend and irecv: one file for each operation.

    broadcast ↔ reduce      scatter ↔ gather      all_gather ↔ reduce_scatter
    all_reduce ↔ itself     all_to_all ↔ itself   barrier

These functions move values and have no gradients. `parallel101` exports those of
`parallel101.autograd`, which have the same names and arguments and add the gradients.
all_reduce_async, reduce_scatter_async and all_gather_async are in asynchronous.py.

A group is ranks in order. Roots and peers (src, dst, and rank and peer inside the algorithms) are
positions in that order, not global ranks. A rank that the group leaves out is **idle**: it makes
the same call, gets a zero-volume tensor and sends nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from parallel101.collectives.all_gather import all_gather
from parallel101.collectives.all_reduce import all_reduce
from parallel101.collectives.all_to_all import all_to_all
from parallel101.collectives.auto import AUTO, present_name
from parallel101.collectives.barrier import barrier
from parallel101.collectives.broadcast import broadcast
from parallel101.collectives.gather import gather
from parallel101.collectives.reduce import reduce
from parallel101.collectives.reduce_scatter import reduce_scatter
from parallel101.collectives.scatter import scatter

_FILES = {operation: import_module(f"{__name__}.{operation}") for operation in AUTO}

# The algorithms for any flat group of any size, by operation and name.
TEXTBOOK: dict[str, dict[str, Callable[..., Any]]] = {
    operation: file.ALGORITHMS for operation, file in _FILES.items()
}

# Those that need a mesh of two axes or more.
ON_A_MESH: dict[str, dict[str, Callable[..., Any]]] = {
    operation: file.ON_A_MESH for operation, file in _FILES.items() if hasattr(file, "ON_A_MESH")
}


def fixed(operation: str, functions: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return `functions[operation]` with `algorithm=` fixed to each of its algorithms, by name.

    Each has the function's other arguments, and `inspect.getsource` shows the few lines of the
    algorithm. Raises ValueError for an unknown operation.
    """
    if not isinstance(operation, str) or operation not in TEXTBOOK:
        raise ValueError(
            f"operation={operation!r} is unknown: expected one of {', '.join(map(repr, TEXTBOOK))}"
        )
    return _ByName(
        (name, _with_algorithm(functions[operation], name, textbook))
        for name, textbook in TEXTBOOK[operation].items()
    )


class _ByName(dict[str, Callable[..., Any]]):
    """Algorithms by name. An old name still finds its algorithm, but isn't listed."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        if present_name(name, self) == name:
            raise KeyError(name)
        return self[present_name(name, self)]


def _with_algorithm(
    function: Callable[..., Any], name: str, textbook: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(textbook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, algorithm=name, **kwargs)

    signature = inspect.signature(function)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in signature.parameters.values() if p.name != "algorithm"]
    )
    return call
