"""The common part of the ZeRO stages: gradients in flight, and the report of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from parallel101.collectives.asynchronous import AsyncCollective
from parallel101.mesh import group_of
from parallel101.spans import wait_span
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.support.memory import readable
from parallel101.trainers.zero.flat import Flat, Sharing


class ShardedSync(GradientSync):
    """A GradientSync in which each rank owns 1/n of each flat array.

    Args: flats: all arrays, in the same order on every rank.
    """

    arrays: str  # what the report calls the flat arrays

    def __init__(self, flats: Sequence[Flat], sharing: Sharing):
        super().__init__({name: piece for flat in flats for name, piece in flat.owned.items()})
        self.placements = {n: pieces for flat in flats for n, pieces in flat.placements.items()}
        self.flats, self.sharing, self.live = flats, sharing, sharing.live
        self.in_flight: list[tuple[Flat, AsyncCollective]] = []

    def begin(self) -> None:
        self.live.begin()
        self.receive()  # what a step has left that an error has ended
        for flat in self.flats:
            flat.begin()

    def reduce_scatter(self, flat: Flat) -> None:
        """Begin to sum the gradients of all ranks, each block at its owner.

        Two arrays travel at a time. Once they have arrived, all but this rank's block is freed.
        """
        self.in_flight.append((flat, flat.reduce_scatter()))
        self.receive(leave=1)

    def receive(self, leave: int = 0) -> None:
        """Wait for the sums of this rank's blocks, but not for the last `leave`."""
        while len(self.in_flight) > leave:
            flat, total = self.in_flight.pop(0)
            with wait_span("wait for gradients"):
                flat.add(total.wait())

    def finish(self) -> list[str]:
        self.receive()
        for flat in self.flats:
            flat.give_gradients()
        return [name for flat in self.flats for name in flat.parameters if name not in flat.reached]

    # ── the report ──

    def held(self) -> Mapping[str, list[Tensor]]:
        weights = [t for flat in self.flats for t in (flat.shard, flat.whole) if t is not None]
        gradients = [
            t for flat in self.flats for t in (flat.grad, flat.whole_grad) if t is not None
        ]
        return {"weights": weights, "gradients": gradients}

    def peaks(self) -> Mapping[str, int]:
        weights, gradients = self.live.peak["weights"], self.live.peak["gradients"]
        return {"gathered (peak)": weights, "gradients in flight (peak)": gradients}

    def describe(self) -> str:
        names = sum(len(flat.parameters) for flat in self.flats)
        largest = max(flat.shard.nbytes * group_of(flat.group).size for flat in self.flats)
        padding = sum(flat.padding for flat in self.flats)
        return (
            f"ZeRO stage {self.zero_stage}: {len(self.owned)} pieces of {names} parameters on "
            f"this rank, in {len(self.flats)} {self.arrays}, the largest {readable(largest)}; "
            f"{padding} elements of padding"
        )
