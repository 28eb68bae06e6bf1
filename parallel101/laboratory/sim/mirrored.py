"""Runs in which one rank stands for many that do the same at the same time.

    mesh (pp 2, dp 3, tp 2)     only two of the twelve ranks have a thread, one for each stage:
                                dp and tp are mirrored
    rank 0 sends to rank 4      which has no thread. By symmetry rank 8 sends the same to rank 0 at
    rank 0 receives from 8      the same time: rank 0's own receive gets rank 0's own message

A message to the rank k positions further on an axis is matched with the receive from the rank k
positions before, and both are this rank's own. So what a program does must depend on a rank's
position on the mirrored axes only as in a rotation: direct exchanges, rings, Bruck's algorithm and
dissemination do, trees and doubling don't (on two ranks they do). Other ranks' numbers are this
rank's own: right for what ranks gather when all have the same, wrong for a sum (so refused), and
no question on the meta device.

A message takes the route between the two real ranks. It holds its sender's link out, and the link
in of the rank that stands for its receiver. Compared with a run of all ranks, the times are

    on a switch        the same, to rounding (tests: 1e-12), for collectives and for whole steps of
                       dp, tp, pp, sequence parallelism and ZeRO 3
    on nodes with a    the same for direct exchanges, and for whole steps whose tp is inside a node
    rail for each rank
    on nodes that      not the same. A message takes as long as its images that share the rail take
    share rails        together. Rings are within 10 %; in direct exchanges of all ranks the
                       messages get in each other's way, and take up to a third longer
    rings over several axes with nodes: only the image that stays in a node is seen

On every network there are three more differences:

    ties               Messages of two axes may ask for one link at the same instant. With all ranks
                       the lower sender is first, which differs from rank to rank; here one order
                       holds for all. That is a latency
    ZeRO 1 and 2       Ranks along dp own other pieces of parameters, so that the optimizer of one
                       rank doesn't stand for all: steps of toy models were 1.4 to 3.3 % shorter
                       than with all ranks
    cp, "zigzag"       Ranks along cp aren't quite alike: a step of a toy model was 0.03 % shorter
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from parallel101.laboratory.sim.network import (
    Network,
    NetworkRoute,
    Router,
    SwitchTopology,
    TwoLevelTopology,
)


@dataclass(frozen=True)
class MirroredAxes:
    """The axes of a mesh. Along each mirrored one, only the first rank has a thread.

    Args:
        sizes: name of an axis → its size, in the order in which ranks are numbered; the last axis
            varies fastest. All ranks of the run are on this mesh.
        mirrored: the axes along which all ranks do the same at the same time.
    """

    sizes: Mapping[str, int]
    mirrored: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := [name for name in self.mirrored if name not in self.sizes]:
            raise ValueError(
                f"mirrored={self.mirrored!r}: the mesh has no axis {unknown[0]!r}: expected some "
                f"of {', '.join(self.sizes)}"
            )

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @functools.cached_property
    def strides(self) -> list[tuple[int, int]]:
        """Return (stride, size) of each mirrored axis: how a rank's number changes along it."""
        strides, stride = [], 1
        for name, size in reversed([*self.sizes.items()]):
            strides += [(stride, size)] * (name in self.mirrored)
            stride *= size
        return strides

    @functools.cached_property
    def present(self) -> list[int]:
        """Return the ranks that have a thread, in order."""
        return [rank for rank in range(self.world_size) if self.representative(rank) == rank]

    def representative(self, rank: int) -> int:
        """Return the rank with a thread that stands for this one."""
        return rank - sum(rank // stride % size * stride for stride, size in self.strides)

    def moved(self, rank: int, by: int, sign: int = 1) -> int:
        """Move `rank` along the mirrored axes, as far as `by` is from its own representative.

        `sign`: −1 for the opposite direction.
        """
        for stride, size in self.strides:
            here, steps = rank // stride % size, sign * (by // stride % size)
            rank += ((here + steps) % size - here) * stride
        return rank

    def router(self, network: Network) -> Router:
        """Return the function that gives the route of a message of a rank with a thread.

        Raises ValueError for a network on which ranks without a thread would be missed.
        """
        real, topology = network.router(self.world_size), network.topology
        if network.latency_overlaps or not isinstance(topology, SwitchTopology | TwoLevelTopology):
            raise ValueError(
                f"mirrored ranks on {network}: expected a switch (Network(…)) or nodes "
                "(Network.two_level(…)) with latency_overlaps=False, on which a message holds a "
                "link of its sender and one of its receiver"
            )
        of_node = topology.ranks_per_node if isinstance(topology, TwoLevelTopology) else 1

        @functools.lru_cache(maxsize=1 << 16)
        def route(src: int, dst: int) -> NetworkRoute:
            if src == dst or self.representative(src) != src:
                return real(src, dst)
            to = self.representative(dst)
            # the links out of the node: how long its ranks' images of this message hold each
            first = src // of_node * of_node
            held: dict[int, tuple[float, float]] = {}
            for image in range(first, min(first + of_node, self.world_size)):
                if self.representative(image) != src:
                    continue
                latency, bandwidth, hops = real(image, self.moved(dst, image))
                before = held.get(hops[0][0], (0.0, 0.0))
                held[hops[0][0]] = before[0] + latency, before[1] + 1 / bandwidth
            out, into = real(src, dst).hops[0][0], real(self.moved(src, dst, -1), to).hops[0][-1]
            latency = max(seconds for seconds, _ in held.values())
            per_byte = max(seconds for _, seconds in held.values())
            return NetworkRoute(latency, 1 / per_byte if per_byte else math.inf, ((out, into),))

        return route
