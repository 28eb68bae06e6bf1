"""Reconstructs what each rank held after each step of an algorithm, from its messages.

    a message arrives ──▶ did the rank add it to its own data, or replace its data with it?

The record does not say what a rank did with the data it received. What the rank sends or returns
afterwards does: if that contains both its own data and the received data, it added them. Nothing
here knows the name of an algorithm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import add, ge
from typing import Any, NamedTuple

from parallel101.laboratory.analysis.chunks import Chunk, Chunks, Counts, chunks_of
from parallel101.laboratory.analysis.logical_topology import (
    LogicalTopology,
    connected_ranks,
    topology_of,
)
from parallel101.laboratory.analysis.provenance import ElementOrigin, decode, flat_values
from parallel101.laboratory.analysis.steps import steps_of
from parallel101.laboratory.record.events import Message
from parallel101.laboratory.record.trace import Trace

# the moments at which a cell changes, and what it holds from then on
States = list[tuple[float, Counts]]
# moments are numbers: START is before the first step, s the start of step s, s + 0.5 the arrival of
# its messages
START = -1.0
Decoded = Sequence[ElementOrigin]


class Landing(NamedTuple):
    """One chunk of one message, as it arrives."""

    chunk: int
    carried: Counts
    added: bool  # to what the rank held, in place of replacing it


@dataclass
class Replay:
    """A run, step by step.

    If the origin of its values is not known (`known` is False), there are no chunks and no cells.
    """

    trace: Trace
    ranks: list[int]  # those that took part
    topology: LogicalTopology
    messages: list[Message]
    step: list[int]  # of each message
    steps: int
    results: Sequence[Any]  # by rank, as it was returned
    numel: int | None  # of the tensor that each rank was given
    known: bool = False
    sums: bool = False  # data was added up somewhere, not only moved
    chunks: list[Chunk] = field(default_factory=list)
    numbers: Chunks | None = None  # the number of each element's chunk
    landings: list[list[Landing]] = field(default_factory=list)  # of each message
    cells: dict[tuple[int, int], States] = field(default_factory=dict)  # of each (rank, chunk)
    # by rank; None if not known
    returned: list[dict[int, Counts] | None] = field(default_factory=list)
    # by rank, element by element what it returned; None if not known
    origins: list[Decoded | None] = field(default_factory=list)
    no_data: bool = False  # the messages hold only zeros, as those of a barrier do
    # of each message: whether memory that was never written is in it
    unwritten: list[bool] = field(default_factory=list)

    def in_step(self, step: int) -> list[int]:
        """Return the indices of a step's messages."""
        return self._by_step[step]

    @cached_property
    def _by_step(self) -> dict[int, list[int]]:
        by_step: dict[int, list[int]] = defaultdict(list)
        for i, step in enumerate(self.step):
            by_step[step].append(i)
        return by_step

    @cached_property
    def connected(self) -> dict[int, set[int]]:
        """For each rank, the ranks whose data could have reached it."""
        return connected_ranks(self.ranks, [(m.src, m.dst) for m in self.messages])

    @cached_property
    def expected(self) -> dict[int, set[int]]:
        """These, and those of its group that have no message: their data was forgotten."""
        busy = {rank for m in self.messages for rank in (m.src, m.dst)}
        pairs = [(m.src, m.dst) for m in self.messages]
        pairs += [(m.src, r) for m in self.messages for r in {*m.send.group.ranks} - busy]
        return connected_ranks(self.ranks, pairs)

    def elements(self, rank: int) -> Decoded:
        """Return what a rank returned, element by element: nothing if that isn't known."""
        return (self.origins[rank] if self.origins else None) or []

    def number(self, element: ElementOrigin) -> int | None:
        """Return the chunk of an element; None if nothing that was sent or returned is in it."""
        return None if self.numbers is None else self.numbers.number(element)

    def adds(self, step: int) -> bool:
        """Return whether a rank adds data that arrives in this step to its own."""
        return self.known and any(
            landing.added for i in self.in_step(step) for landing in self.landings[i]
        )

    def sent_bytes(self, step: int) -> dict[int, int]:
        """Return the bytes that each rank has sent by the end of `step`."""
        sent = dict.fromkeys(self.ranks, 0)
        for message, its_step in zip(self.messages, self.step, strict=True):
            if its_step <= step:
                sent[message.src] += message.nbytes
        return sent

    def final(self, rank: int) -> dict[int, Counts]:
        """Return the data that a rank returned; if that is not known, what it held at the end."""
        returned = self.returned[rank] if self.returned else None
        if returned is not None:
            return returned
        last = {chunk: self.cells[rank, chunk][-1][1] for chunk in range(len(self.chunks))}
        return {chunk: counts for chunk, counts in last.items() if any(counts)}


def replay_of(
    trace: Trace,
    results: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    watched: Sequence[int] | None = None,
    idle: bool = False,
) -> Replay:
    """Replay a trace.

    `results` and `inputs` are what each rank returned and was given, by rank, if that is known.

    A rank takes part if it is in the group of a message. `watched`: the shape of the tensor that
    `watch` gave each rank. `idle`: all ranks take part.

    Raises ValueError if `results` or `inputs` do not have one entry a rank, or if the trace lacks
    the earlier events of its run.
    """
    trace.need_all_events("A replay")
    n = trace.world_size
    for name, values in (("results", results), ("inputs", inputs)):
        if values is not None and len(values) != n:
            raise ValueError(
                f"{name} has {len(values)} entries for {n} ranks: pass one entry for each rank, in "
                "order"
            )
    messages = [m for m in trace.messages() if m.src != m.dst]
    groups = dict.fromkeys((m.send.group.ranks, m.send.group.axis) for m in messages)
    busy = {rank for m in messages for rank in (m.src, m.dst, *m.send.group.ranks)}
    ranks = list(range(n)) if idle or not busy else sorted(busy)
    in_time = sorted(messages, key=lambda m: (m.start, m.end))
    topology = topology_of(ranks, [(m.src, m.dst) for m in in_time], groups)
    step = steps_of(messages, port_per_link=topology.kind in ("ring", "chain"))
    numel = None if watched is None else math.prod(watched)
    replay = Replay(trace, ranks, topology, messages, step, max(step, default=-1) + 1, (), numel)
    payloads = [decode(m.payload, n) for m in messages]
    sent = [payload for payload in payloads if payload is not None]
    if len(sent) < len(messages):
        return replay
    replay.results = results or ()
    replay.origins = [None] * n
    if any(result is not None for result in replay.results):
        replay.origins = [decode(flat_values(result), n) for result in replay.results]
    replay.no_data = bool(messages) and not any(
        any(element.counts) or element.unwritten for payload in sent for element in payload
    )
    replay.unwritten = [any(element.unwritten for element in payload) for payload in sent]
    given = [decode(flat_values(x), n) for x in inputs] if inputs is not None else [None] * n
    _fill_in(replay, sent, given)
    return replay


def _with_meaning(replay: Replay, result: Decoded) -> Decoded:
    """Return a result in which memory that was never written has the element that belongs there.

    That is known if the result has one element for each of the input, or for each of all inputs.
    """
    numel, ranks = replay.numel or 0, replay.ranks
    if not numel or len(result) not in (numel, numel * len(ranks)):
        return result
    whole = len(result) == numel * len(ranks)
    return [
        element._replace(position=i % numel, meant_for=ranks[i // numel] if whole else None)
        if element.unwritten and not any(element.counts)
        else element
        for i, element in enumerate(result)
    ]


def _fill_in(replay: Replay, sent: Sequence[Decoded], given: Sequence[Decoded | None]) -> None:
    """Fill in the chunks, and what each rank held of them."""
    results = [_with_meaning(replay, result or []) for result in replay.origins]
    parts = chunks_of([*sent, *results, *(x or [] for x in given)], replay.ranks)
    if not parts.chunks:
        return
    replay.known, replay.sums, replay.chunks = True, parts.sums, parts.chunks
    replay.numbers = parts
    replay.returned = [
        None if known is None else parts.held(result)
        for known, result in zip(replay.origins, results)
    ]
    content = [parts.held(payload) for payload in sent]
    replay.landings = [[] for _ in sent]
    for rank in replay.ranks:
        began = parts.held(given[rank] or ())
        for number, chunk in enumerate(parts.chunks):
            # its own stripe, if it isn't known what it was given
            own = given[rank] is None and rank in chunk.stripes and not chunk.mixed
            first = tuple(int(own and r == rank) for r in range(replay.trace.world_size))
            held = began.get(number, first)
            replay.cells[rank, number] = _follow(replay, content, rank, number, held)


def _follow(
    replay: Replay, content: list[dict[int, Counts]], rank: int, chunk: int, held: Counts
) -> States:
    """Return the states of one cell over time, and note each chunk that lands in it."""
    events: list[tuple[float, int, bool, int]] = []  # (time, step, is it a send, message)
    for i, m in enumerate(replay.messages):
        if chunk in content[i]:
            if m.dst == rank:
                events.append((m.recv.end, replay.step[i], False, i))
            if m.src == rank:
                events.append((m.send.posted, replay.step[i], True, i))
    events.sort(key=lambda event: event[:3])
    result = (replay.returned[rank] or {}).get(chunk)
    # a result that was multiplied at the end
    if result is not None and (factor := math.gcd(*result)) > 1:
        result = tuple(count // factor for count in result)
    states = [(START, held)]
    for k, (_, step, is_send, i) in enumerate(events):
        carried, moment, rest = content[i][chunk], step + (0.0 if is_send else 0.5), events[k + 1 :]
        if not replay.sums:
            after = tuple(map(max, held, carried))
        elif is_send:
            after = carried
        else:  # what the rank next sends or returns of this chunk
            later = next((content[j][chunk] for *_, sends, j in rest if sends), result)
            known = later is not None and (not rest or rest[0][2])
            after = later if known else _guess(held, carried, later)  # type: ignore[assignment]
        if not is_send:
            added = replay.sums and any(held) and after not in (carried, held)
            replay.landings[i].append(Landing(chunk, carried, added))
        if after != held:
            states.append((max(moment, states[-1][0]), after))
            held = after
    return states


def _guess(held: Counts, carried: Counts, later: Counts | None) -> Counts:
    """Guess what a rank holds after an arrival, if its next message or result doesn't show it.

    Either more arrives before the rank sends or returns the chunk, or it never does.
    """
    total = tuple(map(add, held, carried))
    for possible in (total, carried):
        if later is not None and all(map(ge, later, possible)):
            return possible
    # a rank that receives more than it has keeps what it received
    return carried if all(map(ge, carried, held)) else total


# ── The blocks that each rank was given and returned, as rows: the matrices of a collective
#
#    given     rank 0  a0 b0 c0        returned   rank 0  a0 a1 a2     all-to-all: a transposition
#              rank 1  a1 b1 c1                   rank 1  b0 b1 b2
#              rank 2  a2 b2 c2                   rank 2  c0 c1 c2
#
# A block is a chunk's part from one rank, or the sum of the parts of several ranks.


class ChunkPart(NamedTuple):
    """Neighbouring elements of one chunk, with the same ranks' data in them."""

    chunk: int | None  # None: data that no rank sent or returned, or none at all
    counts: Counts  # how often each rank's data is in it


def given_blocks(replay: Replay) -> list[list[ChunkPart]]:
    """Return the blocks that each of the replay's ranks was given, in order.

    Raises ValueError for a run whose data can't be followed.
    """
    if replay.numel is None:
        raise ValueError(
            "the blocks of a run are known if its data can be followed: run it with p101.watch(fn, "
            "…)"
        )
    if not replay.known:
        raise ValueError(
            "the data of this run can't be followed: its messages and results hold nothing that "
            "can be read as copies, sums or means of x. The messages inside torch's own "
            "collectives are not recorded: use the package's, such as p101.all_reduce, or your "
            "own, and return a tensor"
        )
    n = replay.trace.world_size
    own = {rank: tuple(int(r == rank) for r in range(n)) for rank in replay.ranks}
    return [
        _in_blocks(_block(replay, ElementOrigin(i, own[rank])) for i in range(replay.numel))
        for rank in replay.ranks
    ]


def returned_blocks(replay: Replay) -> list[list[ChunkPart]]:
    """Return the blocks that each of the replay's ranks returned, in order."""
    return [
        _in_blocks(_block(replay, element) for element in replay.elements(rank))
        for rank in replay.ranks
    ]


def is_transposed(given: list[list[ChunkPart]], returned: list[list[ChunkPart]]) -> bool:
    """Return whether each column of blocks has become a row."""
    return (
        len(given) > 1
        and [list(column) for column in zip(*given)] == returned
        and {len(row) for row in given} == {len(given)}
    )


def _block(replay: Replay, element: ElementOrigin) -> ChunkPart:
    chunk = replay.number(element) if any(element.counts) else None  # else it was never written
    used = chunk is not None and any(element.counts[r] for r in replay.chunks[chunk].stripes)
    return ChunkPart(chunk, element.counts) if used else ChunkPart(None, ())


def _in_blocks(blocks: Iterable[ChunkPart]) -> list[ChunkPart]:
    return [block for block, _ in groupby(blocks)]
