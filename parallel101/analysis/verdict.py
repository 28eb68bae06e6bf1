"""What came of a run: which collective it was, what is wrong with it, and the sentence that says so.

A name is given only to what the values prove: "all-reduce" where every rank ends with every rank's data in every chunk,
once. Whatever else came out is described as it is, and what is in a sum twice, or missing from it, is named.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

from parallel101.analysis.replay import History
from parallel101.record.units import labels, ranks, sentence


class Fault(NamedTuple):
    """Something that a learner wants to see."""

    kind: str  #  "twice", "missing" or "mixed"
    column: int
    times: int  #  how often it is in the sum
    holders: tuple[int, ...]  #  the ranks that ended with it
    origins: tuple[int, ...]  #  whose data it is


class Outcome:
    """What a history came to."""

    def __init__(self, history: History):
        self.history = history

    @cached_property
    def operation(self) -> str | None:
        """The collective that this run turned out to be, or None."""
        history = self.history
        n, whole = len(history.ranks), set(range(len(history.columns)))
        if n < 2 or not history.known or any(column.mixed for column in history.columns):
            return None
        held = {
            rank: {c for c, counts in history.final(rank).items() if all(counts[r] == 1 for r in history.columns[c].stripes)}
            for rank in history.ranks
        }
        if any(set(history.final(rank)) != held[rank] for rank in history.ranks if history.returned[rank] is not None):
            return None  #  some rank returned something unfinished
        everyone = all(held[rank] == whole for rank in history.ranks)
        holders = [rank for rank in history.ranks if held[rank]]
        alone = len(holders) == 1 and held[holders[0]] == whole
        in_turn = [column for rank in history.ranks for column in sorted(held[rank])]  # parts in the ranks' order are the ranks' own
        parted = len(holders) > 1 and in_turn == sorted(whole)
        origins = {stripe for column in history.columns for stripe in column.stripes}
        if history.sums:
            return "all-reduce" if everyone else "reduce" if alone else "reduce-scatter" if parted else None
        if len(origins) == 1:
            return "broadcast" if everyone else "scatter" if parted else None
        if parted and any(len(column.stripes) > 1 for column in history.columns):
            return "all-to-all"
        return "all-gather" if everyone else "gather" if alone else None

    @cached_property
    def faults(self) -> list[Fault]:
        """All that is wrong with the sums, in order of chunk."""
        history = self.history
        found: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)  # (column, kind, count, origin): who ended with it
        for rank in history.ranks:
            for column, counts in history.final(rank).items():
                if history.columns[column].mixed:
                    found[column, "mixed", 0, 0].append(rank)
                    continue
                for origin, count in enumerate(counts):
                    if count > 1:
                        found[column, "twice", count, origin].append(rank)
                for origin in lacks(history, rank, column):
                    found[column, "missing", 0, origin].append(rank)
        together: dict[tuple[int, str, int, tuple[int, ...]], list[int]] = defaultdict(list)
        for (column, kind, count, origin), holders in sorted(found.items()):
            together[column, kind, count, tuple(holders)].append(origin)
        return [Fault(kind, column, count, holders, tuple(origins)) for (column, kind, count, holders), origins in together.items()]

    def sentence(self) -> str:
        """The sentence that ends the story."""
        history, op = self.history, self.operation
        if self.faults:
            told = self.faults if len(self.faults) <= 2 else self.faults[:1]
            more = f" And {len(self.faults) - 1} more." if len(self.faults) > 2 else ""
            return " ".join(self._tell(fault) for fault in told) + more
        k = len(history.columns)
        whole = "all of it" if k == 1 else "both chunks" if k == 2 else f"all {k} chunks"
        once = f"with the data of {'both' if len(history.ranks) == 2 else f'all {len(history.ranks)}'} ranks in it once"
        holder = next((r for r in history.ranks if len(history.final(r)) == len(history.columns)), None)
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
        ends = [(r, labels([history.columns[c].label for c in sorted(history.final(r))])) for r in history.ranks if history.final(r)]
        if len(ends) <= 4 and len(history.columns) > 1:
            return sentence(", ".join(f"rank {r} ends with {what}" for r, what in ends))
        return "This is what each rank ends with."

    def _tell(self, fault: Fault) -> str:
        where = f"on {ranks(fault.holders, self.history.ranks)}"
        chunk = chunk_name(self.history, fault.column)
        if fault.kind == "twice":
            times = {2: "twice", 7: "seven times or more"}.get(fault.times, f"{fault.times} times")
            return sentence(f"{where}, {chunk} has {data_of(fault.origins)} {times}")
        if fault.kind == "missing":
            return sentence(f"{where}, {chunk} lacks {data_of(fault.origins)}")
        return sentence(f"elements of different places were added together, {where}")


def lacks(history: History, rank: int, column: int) -> list[int]:
    """The ranks whose data could have been in the chunk that `rank` returned, and is not. None where it is not known what was returned."""
    returned = history.returned[rank] if history.returned else None
    if not history.sums or returned is None or column not in returned or history.columns[column].mixed:
        return []
    return [r for r in history.columns[column].stripes if r in history.groups[rank] and not returned[column][r]]


def chunk_name(history: History, column: int) -> str:
    return f"chunk {history.columns[column].label}" if len(history.columns) > 1 else "the sum"


def data_of(numbers: tuple[int, ...] | list[int]) -> str:
    return f"rank {numbers[0]}'s data" if len(numbers) == 1 else f"the data of {ranks(numbers)}"
