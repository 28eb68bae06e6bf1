"""The choice of an algorithm: `algorithm="ring"` names one, and for "auto" a rule here does.

    few bytes: the fewest steps win (trees, doubling)
    many bytes: the fewest bytes win (direct, rings)

Up to 8 ranks the rules were measured on gloo over loopback, where all ranks share a few cores.
Above 8 ranks, where every rank is assumed to have its own link, they follow the literature (Thakur,
Rabenseifner, Gropp 2005, section 6). Nothing is measured when a program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parallel101.mesh import Group

KiB, MiB = 1024, 1024**2


class Rule(NamedTuple):
    """Take `algorithm` on up to `max_ranks` ranks, for up to `max_bytes` of the whole array."""

    algorithm: str
    max_ranks: float = float("inf")
    max_bytes: float = float("inf")


# The first rule that fits is taken. The whole array is the result of a gather or all-gather, and
# the input of the others.
AUTO: dict[str, list[Rule]] = {
    "broadcast": [
        Rule("binomial", max_ranks=8),
        Rule("binomial", max_bytes=512 * KiB),
        Rule("scatter_all_gather"),
    ],
    "scatter": [Rule("flat", max_ranks=8), Rule("binomial", max_bytes=64 * KiB), Rule("flat")],
    "gather": [Rule("flat", max_ranks=8), Rule("binomial", max_bytes=64 * KiB), Rule("flat")],
    "reduce": [
        Rule("binomial", max_ranks=8),
        Rule("binomial", max_bytes=512 * KiB),
        Rule("reduce_scatter_gather"),
    ],
    "all_gather": [Rule("bruck", max_bytes=256 * KiB), Rule("direct", max_ranks=8), Rule("ring")],
    "reduce_scatter": [
        Rule("direct", max_ranks=8),
        Rule("recursive_halving", max_bytes=256 * KiB),
        Rule("ring"),
    ],
    "all_reduce": [
        Rule("recursive_doubling", max_ranks=2, max_bytes=4 * MiB),
        Rule("reduce_broadcast", max_ranks=8, max_bytes=MiB),
        Rule("recursive_doubling", max_bytes=64 * KiB),
        Rule("ring"),
    ],
    "all_to_all": [Rule("direct", max_ranks=8), Rule("bruck", max_bytes=4 * KiB), Rule("pairwise")],
    "barrier": [Rule("dissemination")],
}


def present_name(algorithm: str, algorithms: Mapping[str, Any]) -> str:
    """Return the algorithm's present name, also for an old one: "chain" still works."""
    renamed = algorithm == "chain" and "pipelined_chain" in algorithms
    return "pipelined_chain" if renamed else algorithm


def check_algorithm(
    operation: str,
    algorithm: str,
    group: Group,
    algorithms: Mapping[str, Any],
    on_a_mesh: Mapping[str, Any],
) -> None:
    """Raise ValueError for an algorithm that the operation lacks, or that needs another group.

    An algorithm `on_a_mesh` needs a mesh of two axes or more as its group.
    """
    allowed = ["auto", *algorithms, *on_a_mesh]
    if algorithm not in allowed:
        raise ValueError(
            f"algorithm={algorithm!r} is unknown: {operation} has {', '.join(map(repr, allowed))}"
        )
    if algorithm in on_a_mesh and group.position is not None and len(group.shape) < 2:
        raise ValueError(
            f"algorithm={algorithm!r} needs a DeviceMesh of two axes or more as its group; "
            f"this group has shape {group.shape}"
        )


def choose(
    operation: str, algorithm: str, table: Mapping[str, Callable], nbytes: int, ranks: int
) -> Callable:
    """Return the function of `algorithm`, or for "auto" that of the first rule that fits."""
    if algorithm == "auto":
        algorithm = next(
            rule.algorithm
            for rule in AUTO[operation]
            if ranks <= rule.max_ranks and nbytes <= rule.max_bytes
        )
    return table[algorithm]
