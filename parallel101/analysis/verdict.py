"""The verdict on a run: which collective it was, what is wrong with its result, and the sentence that says so.

A collective is named only if the values prove it: "all-reduce" if every rank ends with every rank's data in every chunk, once.
Any other result is described as it is, with the data that is in a sum twice or missing from it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

from parallel101.analysis.replay import Replay
from parallel101.record.units import chunk_letters, ranks_text, sentence


class Fault(NamedTuple):
    """Data that a sum contains twice, or lacks, or that was added at the wrong position."""

    kind: str  # "twice", "missing" or "mixed"
    chunk: int
    times: int  # how often it is in the sum
    holders: tuple[int, ...]  # the ranks that ended with it
    origins: tuple[int, ...]  # whose data it is


class Verdict:
    """What a run computed, and whether it is right."""

    def __init__(self, replay: Replay):
        self.replay = replay

    @cached_property
    def operation(self) -> str | None:
        """The collective that this run computed, or None."""
        replay = self.replay
        n, whole = len(replay.ranks), set(range(len(replay.chunks)))
        if n < 2 or not replay.known or any(chunk.mixed for chunk in replay.chunks):
            return None
        held = {
            rank: {c for c, counts in replay.final(rank).items() if all(counts[r] == 1 for r in replay.chunks[c].stripes)}
            for rank in replay.ranks
        }
        if any(set(replay.final(rank)) != held[rank] for rank in replay.ranks if replay.returned[rank] is not None):
            return None  # some rank returned something unfinished
        everyone = all(held[rank] == whole for rank in replay.ranks)
        holders = [rank for rank in replay.ranks if held[rank]]
        alone = len(holders) == 1 and held[holders[0]] == whole
        in_order = [chunk for rank in replay.ranks for chunk in sorted(held[rank])]  # parts in the ranks' order are the ranks' own
        in_parts = len(holders) > 1 and in_order == sorted(whole)
        origins = {stripe for chunk in replay.chunks for stripe in chunk.stripes}
        if replay.sums:
            return "all-reduce" if everyone else "reduce" if alone else "reduce-scatter" if in_parts else None
        if len(origins) == 1:
            return "broadcast" if everyone else "scatter" if in_parts else None
        if in_parts and any(len(chunk.stripes) > 1 for chunk in replay.chunks):
            return "all-to-all"
        return "all-gather" if everyone else "gather" if alone else None

    @cached_property
    def faults(self) -> list[Fault]:
        """Everything that is wrong with the sums, in the order of the chunks."""
        replay = self.replay
        found: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)  # (chunk, kind, count, origin): who ended with it
        for rank in replay.ranks:
            for chunk, counts in replay.final(rank).items():
                if replay.chunks[chunk].mixed:
                    found[chunk, "mixed", 0, 0].append(rank)
                    continue
                for origin, count in enumerate(counts):
                    if count > 1:
                        found[chunk, "twice", count, origin].append(rank)
                for origin in lacks(replay, rank, chunk):
                    found[chunk, "missing", 0, origin].append(rank)
        together: dict[tuple[int, str, int, tuple[int, ...]], list[int]] = defaultdict(list)
        for (chunk, kind, count, origin), holders in sorted(found.items()):
            together[chunk, kind, count, tuple(holders)].append(origin)
        return [Fault(kind, chunk, count, holders, tuple(origins)) for (chunk, kind, count, holders), origins in together.items()]

    def sentence(self) -> str:
        """The sentence that describes the result."""
        replay, op = self.replay, self.operation
        if self.faults:
            shown = self.faults if len(self.faults) <= 2 else self.faults[:1]
            more = f" And {len(self.faults) - 1} more." if len(self.faults) > 2 else ""
            return " ".join(self._describe(fault) for fault in shown) + more
        k = len(replay.chunks)
        whole = "all of it" if k == 1 else "both chunks" if k == 2 else f"all {k} chunks"
        once = f"with the data of {'both' if len(replay.ranks) == 2 else f'all {len(replay.ranks)}'} ranks in it once"
        holder = next((r for r in replay.ranks if len(replay.final(r)) == len(replay.chunks)), None)
        endings = {
            "all-reduce": f"Every rank ends with {whole}, {once}.",
            "reduce": f"Rank {holder} ends with {whole}, {once}.",
            "reduce-scatter": f"Each rank ends with its own part, {once}.",
            "broadcast": f"Every rank ends with {whole}.",
            "all-gather": f"Every rank ends with {whole}.",
            "gather": f"Rank {holder} ends with {whole}.",
            "scatter": "Each rank ends with its own part.",
            "all-to-all": "Each rank ends with its part of every rank's data.",
        }
        if op is not None:
            return endings[op]
        ends = [(r, chunk_letters([replay.chunks[c].label for c in sorted(replay.final(r))])) for r in replay.ranks if replay.final(r)]
        if len(ends) <= 4 and len(replay.chunks) > 1:
            return sentence(", ".join(f"rank {r} ends with {what}" for r, what in ends))
        return "This is what each rank ends with."

    def _describe(self, fault: Fault) -> str:
        where = f"on {ranks_text(fault.holders, self.replay.ranks)}"
        chunk = chunk_name(self.replay, fault.chunk)
        if fault.kind == "twice":
            times = {2: "twice", 7: "seven times or more"}.get(fault.times, f"{fault.times} times")
            return sentence(f"{where}, {chunk} has {data_of(fault.origins)} {times}")
        if fault.kind == "missing":
            return sentence(f"{where}, {chunk} lacks {data_of(fault.origins)}")
        return sentence(f"elements from different positions were added together, {where}")


def lacks(replay: Replay, rank: int, chunk: int) -> list[int]:
    """The ranks whose data could be in the chunk that `rank` returned, and is not. Empty if it is not known what it returned."""
    returned = replay.returned[rank] if replay.returned else None
    if not replay.sums or returned is None or chunk not in returned or replay.chunks[chunk].mixed:
        return []
    return [r for r in replay.chunks[chunk].stripes if r in replay.connected[rank] and not returned[chunk][r]]


def chunk_name(replay: Replay, chunk: int) -> str:
    return f"chunk {replay.chunks[chunk].label}" if len(replay.chunks) > 1 else "the sum"


def data_of(numbers: tuple[int, ...] | list[int]) -> str:
    return f"rank {numbers[0]}'s data" if len(numbers) == 1 else f"the data of {ranks_text(numbers)}"
