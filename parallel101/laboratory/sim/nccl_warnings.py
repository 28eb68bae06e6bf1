"""Warns under rules="nccl" of calls that may hang on GPUs, although this run has ended.

A simulated run is one of many that are possible, and the rules in queues.py give each communicator
a queue of its own. Two habits get by there, and on some machines on NCCL, too:

    rank 0: A.all_reduce(async), B.all_reduce(async)     two groups' collectives, both in flight,
    rank 1: B.all_reduce(async), A.all_reduce(async)     in a different order: if the GPU has room
                                                         for one kernel only, each waits for the
                                                         other rank's (NCCL User Guide, "Using
                                                         multiple NCCL communicators concurrently")

    rank 0, rank 1: new_group([0, 1])                    torch asks all ranks of the job to call
    rank 2: nothing                                      new_group, also those outside the group,
                                                         in the same order (torch's docs, new_group)

Each gets a warning. A cycle over three groups of which no two ranks share two is not looked for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import ranks_text

MOST_IN_FLIGHT = 64  # collectives of a rank that are remembered
MOST_TOLD = 4  # warnings of each sort

CollectiveKey = tuple  # group, number, kind: the same on all of its ranks


class InFlight(NamedTuple):
    """A collective that a rank has begun and not waited for."""

    key: CollectiveKey
    ranks: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.key[-1]} among {ranks_text(self.ranks)} ({shown(self.where)})"


class NcclWarnings:
    """Gathers calls that may hang, while the run goes on."""

    def __init__(self, world_size: int):
        self.everyone = range(world_size)
        self.in_flight: dict[int, dict[CollectiveKey, InFlight]] = defaultdict(dict)  # by rank
        # of two collectives in flight together: the ranks that began them in this order
        self.orders: dict[tuple[CollectiveKey, CollectiveKey], int] = {}
        # by torch's name of the group and its ranks: where each rank called new_group
        self.made: dict[tuple[str, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
        # by the lines, so that each is told once
        self.in_other_order: dict[tuple[str, str], str] = {}

    def begins(self, rank: int, key: CollectiveKey, ranks: list[int], where: str) -> None:
        """Note that a rank begins a collective of a group."""
        now, before = InFlight(key, tuple(ranks), where), self.in_flight[rank]
        for first in before.values():
            if first.key[0] == key[0]:
                continue  # of the same group: one queue
            self.orders.setdefault((first.key, key), rank)
            other = self.orders.get((key, first.key))
            if other is not None:
                self.in_other_order.setdefault(
                    (first.where, where),
                    f"rank {rank} begins {first} before {now}, and rank {other} begins them in the "
                    "other order, and both are in flight. On GPUs this hangs if there is room for "
                    "one of them only. Begin them in the same order on all ranks, or wait() for "
                    "the first before the second begins",
                )
        if len(before) < MOST_IN_FLIGHT:
            before[key] = now

    def waits(self, rank: int, key: CollectiveKey) -> None:
        """Note that a rank has waited for a collective."""
        self.in_flight[rank].pop(key, None)

    def makes_group(self, rank: int, name: str, ranks: list[int], where: str) -> None:
        """Note that a rank calls new_group, and that torch has given the group this name.

        With use_local_synchronization=True only the members call, and the name isn't a number.
        """
        if name.isdigit():
            self.made[name, tuple(ranks)][rank] = where

    def texts(self) -> list[str]:
        """Return the warnings, in sentences."""
        alone = [
            f"{ranks_text(calls)} called new_group({list(ranks)}) at "
            f"{shown(next(iter(calls.values())))}, and "
            f"{ranks_text([rank for rank in self.everyone if rank not in calls])} did not. torch "
            "asks all ranks to call new_group, also those outside the group: on NCCL the groups "
            "that are made later may not fit together. Call it on all ranks, or pass "
            "use_local_synchronization=True"
            for (_, ranks), calls in self.made.items()
            if len(calls) < len(self.everyone)
        ]
        return [*alone[:MOST_TOLD], *list(self.in_other_order.values())[:MOST_TOLD]]
