"""Runs every collective on the simulator and keeps its picture, for the atlas of collectives.

    all_choices()  operation, algorithm, ranks, network
    record()       one run ──▶ steps, bytes and seconds, and the picture of laboratory.viz

The values of a run show whose data they are, so there are few of them: the large array has a few
numbers per block, each of which counts as many bytes. The network is as many times slower. The run
with the small array has all its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf
from typing import Any, NamedTuple

import torch

from parallel101 import collectives
from parallel101.laboratory.analysis.critical_path import critical_path
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.record.trace import Trace, collector_paused
from parallel101.laboratory.sim.simulate import simulate
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.collective_run import (
    BLOCKS,
    INSIDE_BANDWIDTH,
    INSIDE_LATENCY,
    enlarged,
    links,
    program,
    torus_shape,
)
from parallel101.laboratory.viz.scene import Scene

OPERATIONS = {  # the one that opens the page is the first
    "all_reduce": "All-reduce",
    "reduce_scatter": "Reduce-scatter",
    "all_gather": "All-gather",
    "all_to_all": "All-to-all",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "scatter": "Scatter",
    "gather": "Gather",
    "barrier": "Barrier",
}
NETWORKS = {"switch": "Switch", "ring": "Ring", "torus": "Torus", "two_nodes": "Two nodes"}
RANKS = (*range(2, 9), 16, 64)
MOST_DRAWN, MOST_ON_ALL_NETWORKS = 8, 16  # ranks; more of them are on the switch only
# 105 = 3 · 5 · 7, so that any of these numbers of ranks divides the array into equal blocks
LARGE, SMALL = 105 * 1024**2, 105 * 1024
ELEMENT = 8  # bytes of a number
LATENCY, BANDWIDTH = 5e-6, 50e9  # seconds, and bytes per second, of a link
COUNTED = 1.0, inf  # latency and bandwidth with which each message takes 1


class Choice(NamedTuple):
    """The reader's choice."""

    operation: str
    algorithm: str
    ranks: int
    network: str

    @property
    def title(self) -> str:
        return f"{OPERATIONS[self.operation]}: {algorithm_name(self.algorithm)}"

    @property
    def segments(self) -> int:
        """The number of segments into which a chain cuts the array; 1: it isn't cut."""
        return max(8, self.ranks) if self.algorithm == "pipelined_chain" else 1


class RecordedRun(NamedTuple):
    """The cost of a run."""

    steps: int  # messages one after the other: the time if each takes 1, of any size
    busiest: int  # bytes sent by the rank that sends most, of the large array
    total: int  # bytes sent by all ranks, of the large array
    seconds: float  # with the large array
    seconds_small: float


def algorithm_name(name: str) -> str:
    """Return the name to show: reduce_scatter_gather -> "reduce-scatter, gather"."""
    compounds = {
        "reduce_broadcast": "reduce, broadcast",
        "scatter_all_gather": "scatter, all-gather",
        "reduce_scatter_gather": "reduce-scatter, gather",
        "rabenseifner": "Rabenseifner",
        "bruck": "Bruck",
        "two_level": "two-level",
    }
    return compounds.get(name, name.replace("_", " "))


def algorithms(operation: str) -> dict[str, Callable]:
    """Return all algorithms of an operation, by name."""
    return collectives.TEXTBOOK[operation] | collectives.ON_A_MESH.get(operation, {})


def mesh_shape(algorithm: str, ranks: int) -> tuple[int, int]:
    """Return the mesh of an algorithm that follows one; two-level: of two nodes."""
    return (2, ranks // 2) if algorithm == "two_level" else torus_shape(ranks)


def all_choices() -> list[Choice]:
    """Return every run there is.

    An algorithm on a mesh, and a torus, need ranks that make a grid of two axes. Many ranks are on
    a switch only.
    """
    found = []
    for operation in OPERATIONS:
        for algorithm, ranks, network in product(algorithms(operation), RANKS, NETWORKS):
            grid = network == "torus" or algorithm in collectives.ON_A_MESH.get(operation, {})
            too_many = ranks > MOST_ON_ALL_NETWORKS and network != "switch"
            if not too_many and not (grid and torus_shape(ranks)[0] == 1):
                found.append(Choice(operation, algorithm, ranks, network))
    return found


def numbers_of(choice: Choice, nbytes: int) -> int:
    """Return how many numbers each rank's tensor has if the whole array has so many bytes."""
    if choice.operation == "barrier":
        return 0
    return nbytes // ELEMENT // (choice.ranks if choice.operation in BLOCKS else 1)


@collector_paused()
def record(choice: Choice) -> tuple[RecordedRun, Scene]:
    """Run it with both arrays, and draw the run with the large one."""
    small, _ = run(choice, SMALL)
    # a block has so many numbers: a torus cuts it into 4 parts, a chain the array into segments
    in_block = 8 if choice.segments > 1 else 4
    nbytes = choice.ranks * in_block * ELEMENT
    each = 1 if choice.operation == "barrier" else LARGE // nbytes
    drawn = choice.ranks <= MOST_DRAWN
    trace, results = run(choice, nbytes, each, drawn)
    steps = critical_path(trace).messages
    if choice.network != "switch":  # where messages wait for links, another clock counts
        steps = round(run(choice, nbytes, counted=True)[0].makespan)
    trace = enlarged(trace, each)
    watched = (numbers_of(choice, nbytes),) if drawn else None
    scene = collective_scene(trace, results, title=choice.title, watched=watched, summary=not drawn)
    sent = trace.bytes_sent
    return RecordedRun(steps, max(sent), sum(sent), trace.makespan, small.makespan), scene


def run(
    choice: Choice, nbytes: int, each: int = 1, watched: bool = False, counted: bool = False
) -> tuple[Trace, list[Any] | None]:
    """Run it on virtual ranks of this process; return the record and what each rank returned.

    Args:
        nbytes: of the whole array.
        each: as how many bytes a byte counts that is sent.
        watched: whether the record has the values, which then show their origin.
        counted: whether all messages take 1, of any size.
    """
    operation, algorithm, ranks, network = choice
    speed = COUNTED if counted else (LATENCY, BANDWIDTH)
    inside = COUNTED if counted else (INSIDE_LATENCY, INSIDE_BANDWIDTH)
    on_a_mesh = algorithm in collectives.ON_A_MESH.get(operation, {})
    call = program(
        operation,
        algorithm,
        segment_bytes=nbytes // choice.segments if choice.segments > 1 else None,
        mesh=mesh_shape(algorithm, ranks) if on_a_mesh else None,
    )
    numbers = numbers_of(choice, nbytes)

    def rank_main(rank: int) -> Any:
        ones = torch.ones(numbers, dtype=torch.int64)
        return call(origin_tensor(rank, ranks, numbers) if watched else ones)

    on = links(network.replace("_", " "), ranks, *speed, each=each, inside=inside)
    ran = simulate(rank_main, ranks, on, payload_bytes=nbytes if watched else 0)
    if ran.error is not None:
        raise ran.error
    trace = Trace.from_rows(ran.events, ranks, "sim")
    return trace, ran.results if watched else None
