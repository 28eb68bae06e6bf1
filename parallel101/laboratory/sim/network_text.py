"""Reads a `Network` from text, for a command line: its arguments in Python, joined by commas.

latency=1e-6,bandwidth=1e9                 Network(latency=1e-6, bandwidth=1e9)
ring,bandwidth=1e9                         Network.ring(bandwidth=1e9)
ring,wraparound=no                         Network.ring(wraparound=False), a line
torus=4x4,bidirectional=no                 Network.torus((4, 4), bidirectional=False)
two_level=8,rails=8,bandwidth=400e9        Network.two_level(8, rails=8, bandwidth=400e9)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel101.laboratory.sim.network import Network

EXAMPLE = (
    "expected, for example, latency=1e-6,bandwidth=1e9, or ring, torus=4x4 or two_level=8 in front"
)
# how a value is read, and what is expected; {} is its name
Form = tuple[Callable[[str], Any], str]
NUMBER: Form = float, "a number, such as {}=1e-6"
FLAG: Form = {"yes": True, "no": False}.__getitem__, "yes or no"
LENGTHS: Form = lambda value: tuple(map(int, value.split("x"))), "whole numbers, as in {}=4x4"
NODE: Form = int, "the number of ranks on a node, as in {}=8"
SPEED = dict.fromkeys(("latency", "bandwidth", "eager"), NUMBER) | {"latency_overlaps": FLAG}
TORUS = {"bidirectional": FLAG, "wraparound": FLAG, **SPEED}
NODES = {**SPEED, "inside_latency": NUMBER, "inside_bandwidth": NUMBER}
# how it is made, the form of what is written after its "=", and what else it takes
TOPOLOGIES: dict[str, tuple[Callable[..., Network], Form | None, dict[str, Form]]] = {
    "switch": (Network, None, SPEED),
    "ring": (Network.ring, None, TORUS),
    "torus": (Network.torus, LENGTHS, TORUS),
    "two_level": (Network.two_level, NODE, {**NODES, "rails": (int, "a number, such as {}=8")}),
}


def parse_network(text: str) -> Network:
    """Return the network that a text describes.

    Raises:
        ValueError: a name that the network doesn't have, or a value that it doesn't take.
    """
    parts = [[piece.strip() for piece in part.partition("=")] for part in text.split(",")]
    kind, equals, value = parts.pop(0) if parts[0][0] in TOPOLOGIES else ("switch", "", "")
    make, form, takes = TOPOLOGIES[kind]
    if bool(equals) != (form is not None):
        needs = f"a value: {form[1].format(kind)}" if form else "no value"
        raise ValueError(f"in the network {text!r}, {kind} needs {needs}; {EXAMPLE}")
    given = [_read(text, kind, value, form)] if form else []
    options = {}
    for name, equals, value in parts:
        if not equals:
            raise ValueError(
                f"the network {text!r} has {name!r}, which is neither a topology in front nor "
                f"name=value; {EXAMPLE}"
            )
        if name not in takes:
            raise ValueError(
                f"the network {text!r} has no {name!r}; a {kind} takes {', '.join(takes)}"
            )
        options[name] = _read(text, name, value, takes[name])
    return make(*given, **options)


def _read(text: str, name: str, value: str, form: Form) -> Any:
    read, expected = form
    try:
        return read(value)
    except (ValueError, KeyError):
        raise ValueError(
            f"the network {text!r} has {name}={value}; expected {expected.format(name)}"
        ) from None
