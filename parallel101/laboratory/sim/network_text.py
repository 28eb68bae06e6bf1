"""Reads a `Network` from text, for a command line: its arguments in Python, joined by commas.

latency=1e-6,bandwidth=1e9                 Network(latency=1e-6, bandwidth=1e9)
ring,bandwidth=1e9                         Network.ring(bandwidth=1e9)
ring,wraparound=no                         Network.ring(wraparound=False), a line
torus=4x4,bidirectional=no                 Network.torus((4, 4), bidirectional=False)
two_level=8,rails=8,bandwidth=400e9        Network.two_level(8, rails=8, bandwidth=400e9)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from parallel101.laboratory.sim.network import Network

EXAMPLE = (
    "expected, for example, latency=1e-6,bandwidth=1e9, or ring, torus=4x4 or two_level=8 in front"
)


def parse_network(text: str) -> Network:
    """Return the network that a text describes.

    Raises:
        ValueError: a name that the network doesn't have, or a value that it doesn't take.
    """
    parts = [[piece.strip() for piece in part.partition("=")] for part in text.split(",")]
    kind, options = "switch", {}
    if parts[0][0] in TOPOLOGIES:
        kind, equals, value = parts.pop(0)
        shape = TOPOLOGIES[kind][1]
        if bool(equals) != (shape is not None):
            needs = f"={shape}" if shape else " without a value"
            raise ValueError(f"the network {text!r} needs {kind}{needs}; {EXAMPLE}")
        options = _shape(kind, value, text) if shape else {}
    make = TOPOLOGIES[kind][0]
    known = inspect.signature(make).parameters.keys() - {"topology", "shape", "ranks_per_node"}
    for name, equals, value in parts:
        if not equals:
            raise ValueError(
                f"the network {text!r} has {name!r}, which is neither a topology in front nor "
                f"name=value; {EXAMPLE}"
            )
        if name not in known:
            takes = ", ".join(key for key in inspect.signature(make).parameters if key in known)
            raise ValueError(f"the network {text!r} has no {name!r}; a {kind} takes {takes}")
        options[name] = _value(name, value, text)
    return make(**options)


# how it is made, and what is written after its "="
TOPOLOGIES: dict[str, tuple[Callable[..., Network], str | None]] = {
    "switch": (Network, None),
    "ring": (Network.ring, None),
    "torus": (Network.torus, "4x4"),
    "two_level": (Network.two_level, "8"),
}


def _shape(kind: str, value: str, text: str) -> dict[str, Any]:
    try:
        lengths = tuple(int(length) for length in value.split("x"))
    except ValueError:
        raise ValueError(
            f"the network {text!r} has {kind}={value}; expected whole numbers, as in "
            f"{kind}={TOPOLOGIES[kind][1]}"
        ) from None
    if kind == "torus":
        return {"shape": lengths}
    if len(lengths) != 1:
        raise ValueError(
            f"the network {text!r} has {kind}={value}; expected the number of ranks on a node, as "
            f"in {kind}=8"
        )
    return {"ranks_per_node": lengths[0]}


def _value(name: str, value: str, text: str) -> Any:
    if name in ("bidirectional", "wraparound", "latency_overlaps"):
        if value not in ("yes", "no"):
            raise ValueError(f"the network {text!r} has {name}={value}; expected yes or no")
        return value == "yes"
    number, example = (int, "8") if name == "rails" else (float, "1e-6")
    try:
        return number(value)
    except ValueError:
        raise ValueError(
            f"the network {text!r} has {name}={value}; expected a number, such as {name}={example}"
        ) from None
