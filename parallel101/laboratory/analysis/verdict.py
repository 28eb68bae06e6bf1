"""Names the collective that a run was, and what is wrong with its result.

A collective is named only if the values prove it: "all-reduce" if every rank ends with every rank's
data in every chunk, once, and each element is where it belongs. Any other result is described as
it is, by its faults:

    twice      chunk a has rank 1's data twice        nothing    no rank ends with any data
    missing    chunk a lacks rank 1's data            lost       elements that are in no result
    absent     the result lacks chunk a               order      an all-gather returns c b a
    unwritten  chunk a was never written              place      rank 0 ends with rank 1's part
    mixed      sums of different positions            factor     1/16 of the sum; the mean is 1/4

The first ones are seen in the chunks that a rank holds. Order, place, factor and lost elements are
looked for if the ranks hold the chunks that they should.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.analysis.provenance import ElementOrigin
from parallel101.laboratory.analysis.replay import Replay
from parallel101.laboratory.record.units import chunk_letters, listed, ranks_text, sentence

# what an element of a result is: (its origin, or 0 for a sum; its position)
ElementKey = tuple[int, int]
READABLE = "copies, sums or means of the data"
WITH_ORIGINS = ("all-gather", "gather", "all-to-all")  # a result has parts of several ranks' data


class Fault(NamedTuple):
    """A fault in the values that ranks returned."""

    chunk: int
    kind: str
    # how often it is in the sum; what the sum was divided by; how many elements were lost (0: all
    # of `about`)
    times: int
    holders: tuple[int, ...]  # the ranks that ended with it
    # the ranks whose data it is; of "place": whose part; of "order": the chunks in their order
    about: tuple[int, ...]


def faults_of(seen: Iterable[tuple[int, str, int, Any, int]]) -> list[Fault]:
    """Return a fault for all ranks and all origins of which the same is true.

    Each of `seen` is (chunk, kind, times, about, rank).
    """
    holders: dict[tuple, list[int]] = defaultdict(list)
    for *key, rank in seen:
        holders[tuple(key)].append(rank)
    together: dict[tuple, list] = defaultdict(list)
    for (chunk, kind, times, about), ranks in sorted(holders.items()):
        together[chunk, kind, times, tuple(ranks)].append(about)
    return [Fault._make((*key, tuple(about))) for key, about in together.items()]


class Verdict:
    """The collective that a run computed, and the faults in its result."""

    def __init__(self, replay: Replay):
        self.replay = replay

    @property
    def operation(self) -> str | None:
        """Return the collective that this run computed; None if it is wrong or not judged."""
        return None if self.faults or self.unreadable else self._candidate

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
        if any(replay.returned[r] is not None and {*replay.final(r)} != held[r] for r in held):
            return None  # some rank returned something unfinished
        everyone = all(chunks == whole for chunks in held.values())
        holders = [chunks for chunks in held.values() if chunks]
        alone = holders == [whole]
        in_parts = len(holders) > 1 and sorted(c for each in holders for c in each) == [*whole]
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

    # ---- faults ----

    @cached_property
    def faults(self) -> list[Fault]:
        """Return all faults of the result, in the order of the chunks."""
        replay = self.replay
        if replay.known and not any(map(replay.final, replay.ranks)):
            return [Fault(0, "nothing", 0, tuple(replay.ranks), ())]
        if faults := faults_of(self._chunk_faults()):
            return faults
        if not self._candidate:
            return self._same_part()
        there = self._origins
        expected = {rank for origin in there for rank in replay.expected[origin]}
        if (forgotten := tuple(sorted(expected - there))) and self._candidate in WITH_ORIGINS:
            return [Fault(0, "lost", 0, (), forgotten)]
        if not any(replay.origins):
            return []
        keys = {rank: self._keys(rank) for rank in replay.ranks if replay.elements(rank)}
        kinds = (self._orders(keys), self._places(keys), self._factors())
        return [*(fault for kind in kinds for fault in faults_of(kind)), *self._losses(keys)]

    def _chunk_faults(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield what is wrong with the chunks that each rank ends with, for `faults_of`."""
        replay, none = self.replay, True
        for rank in replay.ranks:
            seen = [(chunk, "absent", 0, 0, rank) for chunk in lacks_chunks(replay, rank)]
            for chunk, counts in replay.final(rank).items():
                if replay.chunks[chunk].mixed:
                    seen.append((chunk, "mixed", 0, 0, rank))
                elif not any(counts):
                    seen.append((chunk, "unwritten", 0, 0, rank))
                else:
                    twice = [(origin, n) for origin, n in enumerate(counts) if n > 1]
                    seen += [(chunk, "twice", n, origin, rank) for origin, n in twice]
                    gone = lacks(replay, rank, chunk)
                    seen += [(chunk, "missing", 0, origin, rank) for origin in gone]
            none = none and not seen
            if none and replay.known and any(e.unwritten for e in replay.elements(rank)):
                # it is not known which chunk was meant to be there
                none, seen = False, [(len(replay.chunks), "unwritten", 0, 0, rank)]
            yield from seen

    def _same_part(self) -> list[Fault]:
        """Return the fault if each rank has one part of one rank's data, but two have the same.

        Then another part is in no result.
        """
        replay, origins = self.replay, tuple(self._origins)
        parts = [replay.final(rank) for rank in replay.ranks]
        one = len(origins) == 1 and all(len(part) == 1 for part in parts)
        if replay.sums or replay.numel is None or not one:
            return []
        holders: dict[int, list[int]] = defaultdict(list)
        for rank, (part,) in zip(replay.ranks, parts, strict=True):
            holders[part].append(rank)
        lost = replay.numel - sum(replay.chunks[chunk].elements for chunk in holders)
        double = min((chunk for chunk, ranks in holders.items() if len(ranks) > 1), default=None)
        if len(holders) < 2 or double is None or lost <= 0:
            return []
        return [Fault(double, "lost", lost, tuple(holders[double]), origins)]

    def _placed(self, rank: int) -> list[ElementOrigin]:
        """Return the elements of a result that are copies, sums or means of one position."""
        return [element for element in self.replay.elements(rank) if element.position is not None]

    def _chunks(self, rank: int) -> list[int]:
        """Return the chunk of each element that a rank returned, in order."""
        return [self.replay.number(element) or 0 for element in self._placed(rank)]

    def _keys(self, rank: int) -> list[ElementKey]:
        whose = self._candidate in WITH_ORIGINS
        return [(e.origin or 0 if whose else 0, e.position or 0) for e in self._placed(rank)]

    def _orders(self, keys: dict[int, list[ElementKey]]) -> Iterator[tuple]:
        for rank, elements in keys.items():
            if self._dim(rank, elements) is None:
                chunks = tuple(chunk for chunk, _ in groupby(self._chunks(rank)))
                yield chunks[0], "order", 0, chunks, rank

    def _dim(self, rank: int, elements: list[ElementKey]) -> int | None:
        """Return the dim along which the parts of a result are joined in order, or None."""
        result, in_order = self.replay.results[rank], sorted(set(elements))
        if elements == in_order:
            return 0
        # several tensors, such as a list of blocks and their sum
        if isinstance(result, Sequence) and len(in_order) < len(elements):
            sizes = [part.numel() if isinstance(part, torch.Tensor) else 1 for part in result]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            parts = [elements[start : start + size] for start, size in zip(starts, sizes)]
            return 0 if all(part == sorted(part) for part in parts) else None
        if not isinstance(result, torch.Tensor) or result.numel() != len(elements):
            return None
        sizes = [size for _, size in sorted(Counter(origin for origin, _ in elements).items())]
        indices = torch.arange(len(elements)).reshape(result.shape)
        for dim in range(1, result.dim()):
            lengths = [size * result.shape[dim] // len(elements) for size in sizes]
            if sum(lengths) == result.shape[dim]:
                joined = torch.cat([part.flatten() for part in indices.split(lengths, dim)])
                if [elements[index] for index in joined.tolist()] == in_order:
                    return dim
        return None

    def _places(self, keys: dict[int, list[ElementKey]]) -> Iterator[tuple]:
        """Yield parts on a wrong rank. The parts belong to the ranks in order."""
        if self._candidate not in ("scatter", "reduce-scatter", "all-to-all"):
            return
        first = {rank: min(p for _, p in elements) for rank, elements in keys.items() if elements}
        for rank, owner in zip(sorted(first, key=lambda rank: first[rank]), sorted(first)):
            if rank != owner:
                yield self._chunks(rank)[0], "place", 0, owner, rank

    def _factors(self) -> Iterator[tuple]:
        """Yield results that are a fraction of the sum other than its mean.

        Results that differ in this are faults, too.
        """
        replay = self.replay
        divisors: dict[tuple[int, int], int] = {}  # of each (rank, chunk)
        right: Counter[bool] = Counter()  # how many elements are sums, and how many are means
        for rank in replay.ranks:
            for element, chunk in zip(self._placed(rank), self._chunks(rank)):
                divisors[rank, chunk] = max(element.divisor, divisors.get((rank, chunk), 1))
                if element.divisor in (1, sum(element.counts)):
                    right[element.divisor == 1] += 1
        means = replay.sums and right[False] > right[True]
        for (rank, chunk), divisor in divisors.items():
            if divisor != (sum(replay.final(rank)[chunk]) if means else 1):
                yield chunk, "factor", divisor, 0, rank

    def _losses(self, keys: dict[int, list[ElementKey]]) -> list[Fault]:
        """Return a fault for a remainder of the input that is in no result.

        (A function may leave out more on purpose, which isn't a fault.)
        """
        replay = self.replay
        inputs = len(replay.ranks) if self._candidate in WITH_ORIGINS else 1
        lost = (replay.numel or 0) * inputs - len(set().union(*keys.values()))
        remainder = 0 < lost < len(replay.ranks) * inputs and lost % inputs == 0
        return [Fault(0, "lost", lost // inputs, (), ())] if remainder else []

    # ---- in words ----

    def sentence(self) -> str:
        """Return the sentence that describes the result."""
        replay, op = self.replay, self.operation
        if self.faults:
            return self._fault_text()
        if ranks := self.unreadable:
            who = f"{ranks_text(ranks)} return{'s' * (len(ranks) == 1)}"
            who = "the ranks return" if ranks == replay.ranks else who
            return f"What {who} can't be read as {READABLE}, so it is not judged."
        k, p = len(replay.chunks), len(replay.ranks)
        whole = "all of it" if k == 1 else "both chunks" if k == 2 else f"all {k} chunks"
        data = f"data of {'both' if p == 2 else f'all {p}'} ranks in it"
        once = f"with the mean of the {data}" if self.mean else f"with the {data} once"
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
        text = endings.get(op or "", "This is what each rank ends with.")
        ends = {r: sorted(final) for r in replay.ranks if (final := replay.final(r))}
        if op is None and len(ends) <= 4 and k > 1:
            letters = {r: chunk_letters([replay.chunks[c].label for c in ends[r]]) for r in ends}
            text = sentence(", ".join(f"rank {r} ends with {what}" for r, what in letters.items()))
        return text

    @property
    def mean(self) -> bool:
        """Return whether a rank returned a sum that was divided."""
        returned = map(self.replay.elements, self.replay.ranks)
        return any(element.divisor > 1 for elements in returned for element in elements)

    @property
    def unreadable(self) -> list[int]:
        """Return the ranks with values that can't be interpreted, such as a sum plus 1."""
        results, origins = self.replay.results, self.replay.origins
        has = [rank for rank in self.replay.ranks if results and results[rank] is not None]
        return [rank for rank in has if origins[rank] is None]

    def _joined(self) -> str:
        """Return ", joined along dim 1" if the parts of the results are, else ""."""
        ranks = [rank for rank in self.replay.ranks if self.replay.elements(rank)]
        dims = {self._dim(rank, self._keys(rank)) for rank in ranks}
        return f", joined along dim {next(iter(dims))}" if len(dims) == 1 and dims != {0} else ""

    def _fault_text(self) -> str:
        faults = self.faults
        if {fault.kind for fault in faults} == {"place"}:
            first, *others = sorted(faults, key=lambda fault: fault.holders)
            chunks = self.replay.chunks
            parts = [
                f"rank {other.holders[0]} with {chunks[other.chunk].label}" for other in others
            ]
            if len(parts) > 3:
                parts[2:] = [f"{len(parts) - 2} more ranks with another's"]
            rest = f"; {listed(parts)}" if parts else ""
            return (
                f"Rank {first.holders[0]} ends with {chunk_name(self.replay, first.chunk)}, which "
                f"is rank {first.about[0]}'s part{rest}."
            )
        shown = faults if len(faults) <= 2 else faults[:1]
        more = f" And {len(faults) - 1} more." if len(faults) > 2 else ""
        return " ".join(sentence(self._describe(fault)) for fault in shown) + more

    def _describe(self, fault: Fault) -> str:
        replay, where = self.replay, f"on {ranks_text(fault.holders, self.replay.ranks)}"
        known = fault.chunk < len(replay.chunks)
        chunk = chunk_name(replay, fault.chunk) if known else ""
        whose = data_of(fault.about) if fault.about and fault.kind != "order" else ""
        times = {2: "twice", 7: "seven times or more"}.get(fault.times, f"{fault.times} times")
        written = f"{chunk} was" if known else "the result contains memory that was"
        texts = {
            "nothing": "no rank ends with any of the data",
            "twice": f"{where}, {chunk} has {whose} {times}",
            "missing": f"{where}, {chunk} lacks {whose}",
            "absent": f"{where}, the result lacks {chunk}",
            "unwritten": f"{where}, {written} never written",
            "mixed": f"elements from different positions were added together, {where}",
            "place": f"{where}, {chunk} is {whose}",
        }
        others = {"lost": self._lost, "order": self._order, "factor": self._factor}
        return texts.get(fault.kind) or others[fault.kind](fault, where, chunk, whose)

    def _lost(self, fault: Fault, where: str, chunk: str, whose: str) -> str:
        if fault.holders:
            return (
                f"{ranks_text(fault.holders)} end with {chunk}, and {fault.times} of the "
                f"{self.replay.numel} elements of {whose} are in no result"
            )
        if fault.about:
            return f"no rank ends with {whose}"
        lost = "1 element is" if fault.times == 1 else f"{fault.times} elements are"
        return f"of the {self.replay.numel} elements of each rank's tensor, {lost} in no result"

    def _order(self, fault: Fault, where: str, chunk: str, whose: str) -> str:
        (chunks,) = fault.about
        labels = [self.replay.chunks[chunk].label for chunk in chunks]  # type: ignore[attr-defined]
        in_order = labels == sorted(labels, key=lambda label: (len(label), label))
        order = f"order {', '.join(labels)}, and not in the ranks' order"
        if len(set(labels)) < len(labels) or in_order or len(labels) > 8:
            order = "wrong order"  # the chunks do not tell in which
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
    stripes, counts = replay.chunks[chunk].stripes, returned[chunk]
    if not any(counts):  # memory that was never written
        return list(stripes)
    return [r for r in stripes if replay.sums and r in replay.expected[rank] and not counts[r]]


def lacks_chunks(replay: Replay, rank: int) -> list[int]:
    """Return the chunks that a result lacks although it is long enough to hold all of them.

    Each is one rank's data.
    """
    returned, chunks = replay.returned[rank] if replay.returned else None, replay.chunks
    one_each = len({chunk.stripes for chunk in chunks}) == len(replay.ranks)
    if not returned or replay.sums or not one_each:
        return []
    full = len(replay.elements(rank)) == sum(chunk.elements for chunk in chunks)
    return [c for c in range(len(chunks)) if full and c not in returned]


def chunk_name(replay: Replay, chunk: int) -> str:
    whole = "the sum" if replay.sums else "the result"
    return f"chunk {replay.chunks[chunk].label}" if len(replay.chunks) > 1 else whole


def data_of(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}'s data" if len(ranks) == 1 else f"the data of {ranks_text(ranks)}"
