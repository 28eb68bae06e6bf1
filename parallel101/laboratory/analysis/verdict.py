"""Names the collective that a run was, and what is wrong with its result.

A collective is named only if the values prove it: "all-reduce" if every rank ends with every rank's
data in every chunk, once, and each element is where it belongs. Any other result is described as
it is, with the data that is in a sum twice or missing from it, or with what is wrong with its
order, place or factor.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.analysis.results import (
    Fault,
    joined_along,
    keys_of,
    part_faults,
    value_faults,
)
from parallel101.laboratory.record.units import chunk_letters, listed, ranks_text, sentence


class Verdict:
    """The collective that a run computed, and the faults in its result."""

    def __init__(self, replay: Replay):
        self.replay = replay

    @property
    def operation(self) -> str | None:
        """Return the collective that this run computed, or None."""
        return None if self.faults else self._candidate

    @cached_property
    def _candidate(self) -> str | None:
        """Return the collective after which the ranks hold the chunks that they hold.

        Their places in the results are not looked at.
        """
        replay = self.replay
        n, whole = len(replay.ranks), set(range(len(replay.chunks)))
        if n < 2 or not replay.known or any(chunk.mixed for chunk in replay.chunks):
            return None
        held = {
            rank: {
                c
                for c, counts in replay.final(rank).items()
                if all(counts[r] == 1 for r in replay.chunks[c].stripes)
            }
            for rank in replay.ranks
        }
        if any(
            set(replay.final(rank)) != held[rank]
            for rank in replay.ranks
            if replay.returned[rank] is not None
        ):
            return None  # some rank returned something unfinished
        everyone = all(held[rank] == whole for rank in replay.ranks)
        holders = [rank for rank in replay.ranks if held[rank]]
        alone = len(holders) == 1 and held[holders[0]] == whole
        in_parts = len(holders) > 1 and sorted(
            chunk for rank in replay.ranks for chunk in held[rank]
        ) == sorted(whole)
        if replay.sums and everyone:
            return "all-reduce"
        if replay.sums:
            return "reduce" if alone else "reduce-scatter" if in_parts else None
        if len(self._origins) == 1:
            return "broadcast" if everyone else "scatter" if in_parts else None
        if in_parts and any(len(chunk.stripes) > 1 for chunk in replay.chunks):
            return "all-to-all"
        return "all-gather" if everyone else "gather" if alone else None

    @property
    def _origins(self) -> set[int]:
        return {stripe for chunk in self.replay.chunks for stripe in chunk.stripes}

    @cached_property
    def faults(self) -> list[Fault]:
        """Return all faults of the result, in the order of the chunks."""
        if self.replay.known and not any(self.replay.final(rank) for rank in self.replay.ranks):
            return [Fault("nothing", 0, 0, tuple(self.replay.ranks), ())]
        faults = self._chunk_faults()
        return faults or (
            value_faults(self.replay, self._candidate)
            if self._candidate
            else part_faults(self.replay)
        )

    def _chunk_faults(self) -> list[Fault]:
        replay = self.replay
        # (chunk, kind, count, origin): who ended with it
        holders_of: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)
        for rank in replay.ranks:
            for chunk in lacks_chunks(replay, rank):
                holders_of[chunk, "absent", 0, 0].append(rank)
            for chunk, counts in replay.final(rank).items():
                if replay.chunks[chunk].mixed:
                    holders_of[chunk, "mixed", 0, 0].append(rank)
                    continue
                if not any(counts):
                    holders_of[chunk, "unwritten", 0, 0].append(rank)
                for origin, count in enumerate(counts):
                    if count > 1:
                        holders_of[chunk, "twice", count, origin].append(rank)
                for origin in lacks(replay, rank, chunk) if any(counts) else ():
                    holders_of[chunk, "missing", 0, origin].append(rank)
            if (
                replay.known
                and not holders_of
                and any(element.unwritten for element in replay.elements(rank))
            ):
                # it is not known which chunk was meant to be there
                holders_of[len(replay.chunks), "unwritten", 0, 0].append(rank)
        together: dict[tuple[int, str, int, tuple[int, ...]], list[int]] = defaultdict(list)
        for (chunk, kind, count, origin), holders in sorted(holders_of.items()):
            together[chunk, kind, count, tuple(holders)].append(origin)
        return [
            Fault(kind, chunk, count, holders, tuple(origins))
            for (chunk, kind, count, holders), origins in together.items()
        ]

    def sentence(self) -> str:
        """Return the sentence that describes the result."""
        replay, op = self.replay, self.operation
        if self.faults:
            return self._fault_text()
        k, p = len(replay.chunks), len(replay.ranks)
        whole = "all of it" if k == 1 else "both chunks" if k == 2 else f"all {k} chunks"
        ranks = "both" if p == 2 else f"all {p}"
        once = (
            f"with the mean of the data of {ranks} ranks in it"
            if self.mean
            else f"with the data of {ranks} ranks in it once"
        )
        holder = next((r for r in replay.ranks if len(replay.final(r)) == k), None)
        root = next(iter(self._origins), None)
        every = "all" if k == 1 else whole
        endings = {
            "all-reduce": f"Every rank ends with {whole}, {once}.",
            "reduce": f"Rank {holder} ends with {whole}, {once}.",
            "reduce-scatter": f"Each rank ends with its own part, {once}.",
            "broadcast": f"Every rank ends with {every} of rank {root}'s data.",
            "all-gather": f"Every rank ends with {whole}{self._joined()}.",
            "gather": f"Rank {holder} ends with {whole}{self._joined()}.",
            "scatter": f"Each rank ends with its own part of rank {root}'s data.",
            "all-to-all": f"Each rank ends with its part of every rank's data{self._joined()}.",
        }
        if op is not None:
            return endings[op] + self._not_judged()
        ends = [
            (r, chunk_letters([replay.chunks[c].label for c in sorted(replay.final(r))]))
            for r in replay.ranks
            if replay.final(r)
        ]
        if len(ends) <= 4 and len(replay.chunks) > 1:
            return (
                sentence(", ".join(f"rank {r} ends with {what}" for r, what in ends))
                + self._not_judged()
            )
        return "This is what each rank ends with." + self._not_judged()

    @property
    def mean(self) -> bool:
        """Return whether a rank returned a sum that was divided."""
        replay = self.replay
        return any(
            element.divisor > 1 for rank in replay.ranks for element in replay.elements(rank)
        )

    @property
    def unreadable(self) -> list[int]:
        """Return the ranks with values that can't be interpreted, such as a sum plus 1."""
        replay = self.replay
        return [
            rank
            for rank in replay.ranks
            if replay.results and replay.results[rank] is not None and replay.origins[rank] is None
        ]

    def _not_judged(self) -> str:
        ranks = self.unreadable
        if not ranks:
            return ""
        who = (
            "the ranks return"
            if ranks == self.replay.ranks
            else f"{ranks_text(ranks)} return{'s' * (len(ranks) == 1)}"
        )
        return (
            f" What {who} can't be read as copies, sums or means of the data, so it is not judged."
        )

    def _joined(self) -> str:
        """Return ", joined along dim 1" if the parts of the results are, else ""."""
        replay = self.replay
        if not any(replay.origins):
            return ""
        dims = {
            joined_along(replay, rank, keys_of(replay, rank, whose=True))
            for rank in replay.ranks
            if replay.elements(rank)
        }
        return f", joined along dim {next(iter(dims))}" if len(dims) == 1 and dims != {0} else ""

    def _fault_text(self) -> str:
        faults = self.faults
        if {fault.kind for fault in faults} == {"place"}:
            first, *others = faults
            parts = [
                f"rank {fault.holders[0]} with {self.replay.chunks[fault.chunk].label}"
                for fault in others
            ]
            if len(parts) > 3:
                parts[2:] = [f"{len(parts) - 2} more ranks with another's"]
            rest = f"; {listed(parts)}" if parts else ""
            return (
                f"Rank {first.holders[0]} ends with {chunk_name(self.replay, first.chunk)}, which "
                f"is rank {first.origins[0]}'s part{rest}."
            )
        shown = faults if len(faults) <= 2 else faults[:1]
        more = f" And {len(faults) - 1} more." if len(faults) > 2 else ""
        return " ".join(self._describe(fault) for fault in shown) + more

    def _describe(self, fault: Fault) -> str:
        replay, where = self.replay, f"on {ranks_text(fault.holders, self.replay.ranks)}"
        known = fault.chunk < len(replay.chunks)
        chunk = chunk_name(replay, fault.chunk) if known else ""
        whose = data_of(fault.origins) if fault.origins else ""
        times = {2: "twice", 7: "seven times or more"}.get(fault.times, f"{fault.times} times")
        written = f"{chunk} was" if known else "the result contains memory that was"
        texts = {
            "nothing": "no rank ends with any of the data",
            "twice": f"{where}, {chunk} has {whose} {times}",
            "missing": f"{where}, {chunk} lacks {whose}",
            "absent": f"{where}, the result lacks {chunk}",
            "unwritten": f"{where}, {written} never written",
            "mixed": f"elements from different positions were added together, {where}",
        }
        others = {"lost": self._lost, "order": self._order, "factor": self._factor}
        if fault.kind in texts:
            return sentence(texts[fault.kind])
        return sentence(others[fault.kind](fault, where, chunk, whose))

    def _lost(self, fault: Fault, where: str, chunk: str, whose: str) -> str:
        numel = self.replay.numel
        if fault.holders:
            return (
                f"{ranks_text(fault.holders)} end with {chunk}, and {fault.times} of the {numel} "
                f"elements of {whose} are in no result"
            )
        if fault.origins:
            return f"no rank ends with {whose}"
        lost = "1 element is" if fault.times == 1 else f"{fault.times} elements are"
        return f"of the {numel} elements of each rank's tensor, {lost} in no result"

    def _order(self, fault: Fault, where: str, chunk: str, whose: str) -> str:
        labels = [self.replay.chunks[chunk].label for chunk in fault.origins]
        in_order = labels == sorted(labels, key=lambda label: (len(label), label))
        if len(set(labels)) < len(labels) or in_order or len(labels) > 8:
            order = "wrong order"  # the chunks do not tell in which
        else:
            order = f"order {', '.join(labels)}, and not in the ranks' order"
        return f"{where}, the parts lie in the {order}"

    def _factor(self, fault: Fault, where: str, chunk: str, whose: str) -> str:
        replay, share = self.replay, f"1/{fault.times} of the"
        n = sum(replay.final(fault.holders[0])[fault.chunk])
        if not replay.sums:
            is_ = f"{share} data" if fault.times > 1 else "not divided, as other results are"
        elif fault.times == 1:
            is_ = "the sum, and other results are means"
        elif fault.times == n:
            is_ = f"{share} sum; other results are the whole sum"
        else:
            is_ = f"{share} sum; the mean of {n} ranks is 1/{n}"
        return f"{where}, {chunk if len(replay.chunks) > 1 else 'the result'} is {is_}"


def lacks(replay: Replay, rank: int, chunk: int) -> list[int]:
    """Return the ranks whose data could be in the chunk that `rank` returned, and is not.

    Empty if it is not known what it returned.
    """
    returned = replay.returned[rank] if replay.returned else None
    if returned is None or chunk not in returned or replay.chunks[chunk].mixed:
        return []
    if not any(returned[chunk]):  # memory that was never written
        return list(replay.chunks[chunk].stripes)
    if not replay.sums:
        return []
    return [
        r
        for r in replay.chunks[chunk].stripes
        if r in replay.expected[rank] and not returned[chunk][r]
    ]


def lacks_chunks(replay: Replay, rank: int) -> list[int]:
    """Return the chunks that a result lacks although it is long enough to hold all of them.

    Each is one rank's data.
    """
    returned = replay.returned[rank] if replay.returned else None
    if (
        not returned
        or replay.sums
        or len({chunk.stripes for chunk in replay.chunks}) != len(replay.ranks)
    ):
        return []
    full = len(replay.elements(rank)) == sum(chunk.elements for chunk in replay.chunks)
    return [c for c in range(len(replay.chunks)) if c not in returned] if full else []


def chunk_name(replay: Replay, chunk: int) -> str:
    whole = "the sum" if replay.sums else "the result"
    return f"chunk {replay.chunks[chunk].label}" if len(replay.chunks) > 1 else whole


def data_of(numbers: tuple[int, ...] | list[int]) -> str:
    return (
        f"rank {numbers[0]}'s data" if len(numbers) == 1 else f"the data of {ranks_text(numbers)}"
    )
