"""One collective on virtual ranks, as the explorer and the atlas of collectives run it.

    program("reduce", "binomial", root=2)       what every rank calls with its tensor
    links("torus", 8, 1e-6, 50e9)               between eight ranks
    enlarged(trace, 1000)                       the same messages, of larger arrays

Values that show whose data they are fit into small arrays only. So each number may stand for many:
the network is as many times slower, and the record counts as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel101 import collectives
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network

# a rank's tensor is one block of the result; of the others, the ranks cut it into blocks
BLOCKS = ("gather", "all_gather", "barrier")
ROOTS = {"broadcast": "src", "scatter": "src", "gather": "dst", "reduce": "dst"}
INSIDE_LATENCY, INSIDE_BANDWIDTH = 2e-6, 450e9  # seconds, and bytes per second, inside a node


def torus_shape(ranks: int) -> tuple[int, int]:
    """Return the most square grid of so many ranks: 8 → (2, 4)."""
    short = next(n for n in range(isqrt(ranks), 0, -1) if ranks % n == 0)
    return short, ranks // short


TOPOLOGIES: dict[str, Callable[..., Network]] = {  # called with the number of ranks
    "switch": lambda ranks, **speed: Network(**speed),
    "ring": lambda ranks, **speed: Network.ring(**speed),
    "one-way ring": lambda ranks, **speed: Network.ring(bidirectional=False, **speed),
    "line": lambda ranks, **speed: Network.ring(wraparound=False, **speed),
    "torus": lambda ranks, **speed: Network.torus(torus_shape(ranks), **speed),
    "two nodes": lambda ranks, **speed: Network.two_level(-(-ranks // 2), **speed),
}


def links(
    topology: str,
    ranks: int,
    latency: float,
    bandwidth: float,
    *,
    each: int = 1,
    inside: tuple[float, float] = (INSIDE_LATENCY, INSIDE_BANDWIDTH),
) -> Network:
    """Return the links between the ranks, with this latency and bandwidth.

    Args:
        topology: one of TOPOLOGIES.
        each: how many bytes a byte that is sent stands for: the links are that many times slower.
        inside: latency and bandwidth of a link inside a node of "two nodes".
    """
    speed = {"latency": latency, "bandwidth": bandwidth / each}
    if topology == "two nodes":
        speed |= {"inside_latency": inside[0], "inside_bandwidth": inside[1] / each}
    return TOPOLOGIES[topology](ranks, **speed)


def program(
    operation: str,
    algorithm: str,
    *,
    root: int = 0,
    segment_bytes: int | None = None,
    mesh: tuple[int, ...] | None = None,
    module: ModuleType = collectives,
) -> Callable[[Tensor], Any]:
    """Return the function that every rank calls with its tensor.

    Args:
        segment_bytes: of a pipelined chain.
        mesh: the shape of the mesh that the algorithm follows, if it follows one.
        module: that has the operation.
    """
    options: dict[str, Any] = {"algorithm": algorithm}
    if segment_bytes is not None:
        options["segment_bytes"] = segment_bytes
    if operation in ROOTS:
        options[ROOTS[operation]] = root
    function = getattr(module, operation)
    if operation == "barrier":
        return lambda x: function(**options)
    if mesh is not None:
        return lambda x: function(x, group=init_device_mesh("cpu", mesh), **options)
    return lambda x: function(x, **options)


def enlarged(trace: Trace, each: int) -> Trace:
    """Return the record of the same messages, each with `each` times as many bytes."""
    events = [event._replace(nbytes=event.nbytes * each) for event in trace.events]
    return Trace(events, trace.world_size, trace.backend, trace.unfinished)
