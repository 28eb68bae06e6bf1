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
from typing import Any

from parallel101.cost.closed_forms import ring_cost
from parallel101.cost.hardware import Chip, KernelFigures, chip_of
from parallel101.cost.kernels import figures
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
        figures(self.chip)  # raises if it has none
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
        return figures(self.chip)

    @cached_property
    def inside_bandwidth(self) -> float:
        """Bytes per second that a GPU's NVLink reaches, one way."""
        return self.chip.links[0].bandwidth * self.kernels.nvlink_reached  # type: ignore[index]

    @cached_property
    def card_bandwidth(self) -> float:
        """Bytes per second that a GPU's share of its node's network cards reaches, one way."""
        cards: Any = self.chip.links[1]  # type: ignore[index]
        share = self.network / self.nodes_of if self.network else cards.rail_bandwidth
        return share * self.kernels.network_reached

    def network_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `Network.two_level` for this cluster.

        Latencies and bandwidths are those that the seconds of collectives below use.
        """
        return {
            "ranks_per_node": self.nodes_of,
            "latency": self.kernels.network_step,
            "bandwidth": self.card_bandwidth * self.nodes_of,
            "inside_latency": self.kernels.nvlink_step,
            "inside_bandwidth": self.inside_bandwidth,
            "rails": self.nodes_of,
        }


# ── seconds of a collective along an axis of a layout ──


def ranks_inside(cluster: Cluster, ranks: int, stride: int) -> int:
    """Return how many of an axis' ranks, whose numbers are `stride` apart, are in one node."""
    return max(1, min(ranks, cluster.nodes_of // stride))


@lru_cache(maxsize=1 << 16)
def all_gather_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-gather of `nbytes` in total; a reduce-scatter takes as long."""
    if ranks == 1 or not nbytes:
        return 0.0
    has, inside = cluster.kernels, ranks_inside(cluster, ranks, stride)
    if algorithm == "direct" and 1 < inside < ranks:
        return max(  # the card and NVLink send at the same time
            (ranks - inside) * (nbytes / ranks / cluster.card_bandwidth + has.network_step),
            (inside - 1) * (nbytes / ranks / cluster.inside_bandwidth + has.nvlink_step),
        )
    nodes, bandwidth = -(-ranks // inside), cluster.inside_bandwidth
    steps = (nodes - 1) * has.network_step + (ranks - nodes) * has.nvlink_step
    if nodes > 1:  # with the cards of all ranks that are in a node
        cards = cluster.card_bandwidth * inside
        bandwidth = cards if inside == 1 else min(cards, bandwidth)
    return ring_cost("all_gather", ranks, nbytes).path / bandwidth + steps


def all_reduce_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_seconds(cluster, nbytes, ranks, stride, algorithm=algorithm)


def all_to_all_seconds(
    cluster: Cluster, nbytes: float, ranks: int, stride: int = 1, *, algorithm: str = "ring"
) -> float:
    """Return the seconds of an all-to-all of `nbytes` on each rank, in equal parts.

    "direct" is pairwise: a message to one other rank after the other. NCCL's are under way at once.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    has, each, near = cluster.kernels, nbytes / ranks, ranks_inside(cluster, ranks, stride)
    inside, card = each / cluster.inside_bandwidth, each / cluster.card_bandwidth
    if algorithm == "direct":
        out = (ranks - near) * (card + has.network_step)
        return (near - 1) * (inside + has.nvlink_step) + out
    if near == ranks:
        return (ranks - 1) * inside + has.nvlink_step
    return (ranks - near) * card + has.network_step


def send_seconds(cluster: Cluster, nbytes: float, stride: int = 1, *, ranks: int = 2) -> float:
    """Return the seconds in which all `ranks` of an axis send the next one `nbytes` at once."""
    if not nbytes:
        return 0.0
    if stride * ranks <= cluster.nodes_of:
        return nbytes / cluster.inside_bandwidth + cluster.kernels.nvlink_step
    return nbytes / cluster.card_bandwidth + cluster.kernels.network_step
