"""A cluster: GPUs of one kind in equal nodes, joined by a network.

    node 0   GPU 0 … GPU 7 ── NVLink switch      8 network cards ──┐
    node 1   GPU 8 … GPU 15 ─ NVLink switch      8 network cards ──┴── switches

Ranks are numbered node by node. Source of all figures: hardware.py.

A collective along one axis of a layout has the seconds below. GPUs are numbered with tp fastest, so
that an axis is known by its size n and its stride: the ranks of tp 8 are neighbours, those of dp
are tp · cp · ep apart.

    inside a node   a ring over NVLink
    across nodes    a ring that enters each node once; the ranks of the axis inside a node send with
                    all of their network cards

    direct          each rank sends a block to each other rank: those of other nodes by its own card

                    reduce-scatter, all-gather    (n − 1)/n · bytes / bandwidth + (n − 1) steps
                    all-reduce                    twice that
                    all-to-all                    what leaves the node goes by the cards; direct:
                                                  bytes / n / bandwidth + a step, n − 1 times
                    send and receive              bytes / bandwidth + a step

Source of the forms: closed_forms.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from parallel101.cost.closed_forms import ring_cost
from parallel101.cost.hardware import Chip, KernelFigures, Level, Torus, chip_of
from parallel101.cost.kernels import memory_seconds
from parallel101.cost.model_shape import check_whole


@dataclass(frozen=True)
class Cluster:
    """A cluster of `gpus` GPUs in nodes of `nodes_of`.

    Attributes:
        chip: one of hardware.py's GPUs, or its name.
        gpus: of the whole cluster.
        nodes_of: the GPUs of a node, which NVLink joins.
        memory: bytes of a GPU; None: the chip's.
        network: bytes per second of a node's network cards together, one way; None: the chip's.
    """

    chip: Chip
    gpus: int
    nodes_of: int = 8
    memory: float | None = None
    network: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "chip", chip_of(self.chip))
        if isinstance(self.chip.links, Torus) or self.chip.kernels is None:
            raise ValueError(
                f"Cluster({self.chip.name!r}): expected a GPU with figures of its kernels, such as "
                "'A100', 'H100' or 'B200'"
            )
        check_whole(self, "gpus", "nodes_of")
        for name in ("memory", "network"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"Cluster({name}={value!r}): expected bytes, more than 0")

    def __hash__(self) -> int:
        return hash((self.chip.name, self.gpus, self.nodes_of))  # caches ask for it often

    @property
    def memory_bytes(self) -> float:
        return self.chip.hbm_bytes if self.memory is None else float(self.memory)

    @property
    def kernels(self) -> KernelFigures:
        assert self.chip.kernels is not None
        return self.chip.kernels

    @property
    def levels(self) -> tuple[Level, ...]:
        """The chip's levels of switches, from the inside out, with this cluster's node size."""
        links = self.chip.links
        assert not isinstance(links, Torus)
        node, *outside = links
        inside = Level(node.name, self.nodes_of, node.bandwidth, node.latency)
        if not outside:
            return (inside,)
        leaf = outside[0]
        whole = self.network or leaf.rail_bandwidth * self.nodes_of
        rails = min(leaf.rails, self.nodes_of)
        return (inside, Level(leaf.name, leaf.size, whole, leaf.latency, rails), *outside[1:])

    @cached_property
    def inside_bandwidth(self) -> float:
        """Bytes per second that a GPU's NVLink reaches, one way."""
        return self.levels[0].bandwidth * self.kernels.nvlink_reached

    @cached_property
    def card_bandwidth(self) -> float:
        """Bytes per second that a GPU's share of its node's network cards reaches, one way."""
        return self.levels[1].bandwidth / self.nodes_of * self.kernels.network_reached

    def network_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `Network.two_level` for this cluster.

        Latencies and bandwidths are those that the seconds of collectives below use.
        """
        figures = self.kernels
        return {
            "ranks_per_node": self.nodes_of,
            "latency": figures.network_step,
            "bandwidth": self.card_bandwidth * self.nodes_of,
            "inside_latency": figures.nvlink_step,
            "inside_bandwidth": self.inside_bandwidth,
            "rails": self.nodes_of,
        }


# ── seconds of a collective along an axis of a layout ──


class AxisLinks(NamedTuple):
    """The links that a ring along an axis uses."""

    inside: int  # how many of its ranks are in a node
    bandwidth: float  # bytes per second, of a rank
    latency: float  # seconds of all steps once round


def axis_links(cluster: Cluster, ranks: int, stride: int) -> AxisLinks:
    """Return the links of a ring of `ranks` ranks whose numbers are `stride` apart."""
    inside = max(1, min(ranks, cluster.nodes_of // stride))
    has = cluster.kernels
    nodes = -(-ranks // inside)
    if nodes == 1:
        return AxisLinks(ranks, cluster.inside_bandwidth, (ranks - 1) * has.nvlink_step)
    bandwidth = cluster.card_bandwidth * inside
    if inside > 1:
        bandwidth = min(bandwidth, cluster.inside_bandwidth)
    steps = (nodes - 1) * has.network_step + (ranks - nodes) * has.nvlink_step
    return AxisLinks(inside, bandwidth, steps)


@lru_cache(maxsize=1 << 16)
def all_gather_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-gather of `nbytes` in total; a reduce-scatter takes as long."""
    if ranks == 1 or not nbytes:
        return 0.0
    links = axis_links(cluster, ranks, stride)
    if algorithm == "ring" or links.inside in (1, ranks):
        return ring_cost("all_gather", ranks, nbytes).path / links.bandwidth + links.latency
    has, outside = cluster.kernels, ranks - links.inside
    return max(  # the card and NVLink send at the same time
        outside * (nbytes / ranks / cluster.card_bandwidth + has.network_step),
        (links.inside - 1) * (nbytes / ranks / cluster.inside_bandwidth + has.nvlink_step),
    )


def all_reduce_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_seconds(cluster, nbytes, ranks, stride, algorithm=algorithm)


def added_seconds(cluster: Cluster, nbytes: float, ranks: int) -> float:
    """Return the seconds of the kernel that adds one other rank's block.

    Our own reduce-scatter runs it for each block. NCCL's kernels add while they receive.
    """
    return memory_seconds(cluster.chip, 3 * nbytes / ranks) if ranks > 1 else 0.0


def all_to_all_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-to-all of `nbytes` on each rank, in equal parts.

    "direct" is pairwise: a message to one other rank after the other. NCCL's are under way at once.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    links, has, each = axis_links(cluster, ranks, stride), cluster.kernels, nbytes / ranks
    if algorithm == "direct":
        near = (links.inside - 1) * (each / cluster.inside_bandwidth + has.nvlink_step)
        return near + (ranks - links.inside) * (each / cluster.card_bandwidth + has.network_step)
    if links.inside == ranks:
        path = ring_cost("all_to_all", ranks, nbytes).path
        return path / cluster.inside_bandwidth + has.nvlink_step
    out = nbytes * (ranks - links.inside) / ranks / cluster.card_bandwidth
    return out + has.network_step


def send_seconds(cluster: Cluster, nbytes: float, stride: int = 1, *, ranks: int = 2) -> float:
    """Return the seconds in which all `ranks` of an axis send the next one `nbytes` at once."""
    if not nbytes:
        return 0.0
    if stride * ranks <= cluster.nodes_of:
        return nbytes / cluster.inside_bandwidth + cluster.kernels.nvlink_step
    return nbytes / cluster.card_bandwidth + cluster.kernels.network_step
