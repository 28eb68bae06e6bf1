"""A cluster: GPUs of one kind in equal nodes, joined by a network.

    node 0   GPU 0 … GPU 7 ── NVLink switch      8 network cards ──┐
    node 1   GPU 8 … GPU 15 ─ NVLink switch      8 network cards ──┴── switches

Ranks are numbered node by node. Source of all figures: hardware.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallel101.cost.field_checks import check_whole
from parallel101.cost.hardware import Chip, KernelFigures, Level, Torus, chip_of


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

        Latencies and bandwidths are those that the closed forms of collective_seconds.py use.
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
