"""Reconstructs what each rank held after each step of an algorithm, from its messages.

    a message arrives ──▶ did the rank add it to its own data, or replace its data with it?

The record does not say what a rank did with the data it received. What the rank sends or returns
afterwards does: if that contains both its own data and the received data, it added them. Nothing
here knows the name of an algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from parallel101.laboratory.analysis.chunks import Chunk, Counts, Element, chunks_of
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
    known: bool = False
    sums: bool = False  # data was added up somewhere, not only moved
    chunks: list[Chunk] = field(default_factory=list)
    landings: list[list[Landing]] = field(default_factory=list)  # of each message
    cells: dict[tuple[int, int], States] = field(default_factory=dict)  # of each (rank, chunk)
    # by rank; None if not known
    returned: list[dict[int, Counts] | None] = field(default_factory=list)
    # by rank, element by element what it returned; None if not known
    origins: list[list[ElementOrigin] | None] = field(default_factory=list)
    number: Callable[[ElementOrigin], int] = lambda _: 0  # the chunk of an element of a result
    results: Sequence[Any] = ()  # by rank, as it was returned
    numel: int | None = None  # of the tensor that each rank was given
    no_data: bool = False  # the messages hold only zeros, as those of a barrier do
    # of each message: whether memory that was never written is in it
    unwritten: list[bool] = field(default_factory=list)
    # for each rank, the ranks whose data could have reached it
    connected: dict[int, set[int]] = field(default_factory=dict)
    # and those of its group that have no message: their data was forgotten
    expected: dict[int, set[int]] = field(default_factory=dict)

    def in_step(self, step: int) -> list[int]:
        """Return the indices of a step's messages."""
        return self._by_step.get(step, [])

    @cached_property
    def _by_step(self) -> dict[int, list[int]]:
        by_step: dict[int, list[int]] = {}
        for i, step in enumerate(self.step):
            by_step.setdefault(step, []).append(i)
        return by_step

    def elements(self, rank: int) -> list[ElementOrigin]:
        """Return what a rank returned, element by element: nothing if that isn't known."""
        return (self.origins[rank] if self.origins else None) or []

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
        return {
            c: self.cells[rank, c][-1][1]
            for c in range(len(self.chunks))
            if any(self.cells[rank, c][-1][1])
        }


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
    for name, values in (("results", results), ("inputs", inputs)):
        if values is not None and len(values) != trace.world_size:
            raise ValueError(
                f"{name} has {len(values)} entries for {trace.world_size} ranks: pass one entry "
                "for each rank, in order"
            )
    messages = [m for m in trace.messages() if m.src != m.dst]
    busy = {rank for m in messages for rank in (m.src, m.dst)}
    groups = dict.fromkeys((m.send.group.ranks, m.send.group.axis) for m in messages)
    ranks = (
        list(range(trace.world_size))
        if idle or not busy
        else sorted(busy.union(*(members for members, _ in groups)))
    )
    topology = topology_of(
        ranks, [(m.src, m.dst) for m in sorted(messages, key=lambda m: (m.start, m.end))], groups
    )
    step = steps_of(messages, port_per_link=topology.kind in ("ring", "chain"))
    replay = Replay(trace, ranks, topology, messages, step, max(step, default=-1) + 1)
    replay.numel = None if watched is None else math.prod(watched)
    payloads = [_decode(m.payload, trace.world_size) for m in messages]
    if all(payload is not None for payload in payloads):
        returned: list[list[ElementOrigin] | None] = [None] * trace.world_size
        if results is not None and any(result is not None for result in results):
            returned = [_decode(flat_values(result), trace.world_size) for result in results]
        given = (
            None if inputs is None else [_decode(flat_values(x), trace.world_size) for x in inputs]
        )
        replay.origins, replay.results = returned, results or ()
        pairs = [(m.src, m.dst) for m in messages]
        forgotten = [
            (m.src, rank)
            for rank in ranks
            if rank not in busy
            for m in messages
            if rank in m.send.group.ranks
        ]
        replay.connected, replay.expected = (
            connected_ranks(ranks, pairs),
            connected_ranks(ranks, pairs + forgotten),
        )
        replay.no_data = bool(messages) and not any(
            any(element.counts) or element.unwritten for p in payloads for element in p or ()
        )
        sent = [payload or [] for payload in payloads]
        replay.unwritten = [any(element.unwritten for element in payload) for payload in sent]
        _fill_in(replay, sent, returned, given)
    return replay


def _decode(values: list | None, world_size: int) -> list[ElementOrigin] | None:
    return None if values is None else decode(values, world_size)


def _meant_for(replay: Replay, rank: int) -> dict[int, Element]:
    """Return, for each place in a rank's result, whose data belongs there, and at which position.

    That is known if the result has one element for each of the input, or for each of all inputs.
    """
    length, numel = len(replay.elements(rank)), replay.numel or 0
    if length == numel * len(replay.ranks):
        return {i: (replay.ranks[i // numel], i % numel) for i in range(length)}
    return {i: (None, i) for i in range(length)} if length == numel else {}


def _fill_in(
    replay: Replay,
    payloads: list[list[ElementOrigin]],
    returned: list[list[ElementOrigin] | None],
    given: list[list[ElementOrigin] | None] | None,
) -> None:
    """Fill in the chunks, and what each rank held of them."""
    n = replay.trace.world_size
    meant_for = [_meant_for(replay, rank) for rank in range(n)]
    parts = chunks_of(payloads, [*returned, *(given or [])], replay.ranks, meant_for)
    if not parts.chunks:
        return
    replay.known, replay.sums, replay.chunks, replay.number = (
        True,
        parts.sums,
        parts.chunks,
        parts.number,
    )
    replay.returned = parts.in_results[:n]
    landed: dict[tuple[int, int], Landing] = {}
    for rank in replay.ranks:
        for number, chunk in enumerate(parts.chunks):
            begin = parts.in_results[n + rank] if given else None
            first = _own_part(replay, chunk, rank) if begin is None else begin.get(number, (0,) * n)
            replay.cells[rank, number] = _follow(
                replay, parts.in_messages, landed, rank, number, first
            )
    replay.landings = [
        [landed[i, c] for c in sorted(content)] for i, content in enumerate(parts.in_messages)
    ]


def _own_part(replay: Replay, chunk: Chunk, rank: int) -> Counts:
    """Return a rank's part of a chunk before the first message: its own stripe, if there is one."""
    own = rank in chunk.stripes and not chunk.mixed
    return tuple(int(own and r == rank) for r in range(replay.trace.world_size))


def _follow(
    replay: Replay,
    content: list[dict[int, Counts]],
    landed: dict[tuple[int, int], Landing],
    rank: int,
    chunk: int,
    held: Counts,
) -> States:
    """Return the states of one cell over time.

    Writes to `landed` whether each message that arrives was added.
    """
    events: list[tuple[float, bool, int]] = []  # (time, is it a send, message)
    for i, m in enumerate(replay.messages):
        if chunk in content[i]:
            if m.dst == rank:
                events.append((m.recv.end, False, i))
            if m.src == rank:
                events.append((m.send.posted, True, i))
    events.sort(key=lambda event: (event[0], replay.step[event[2]], event[1]))
    result = replay.returned[rank]
    # what the rank next sends or returns of this chunk
    later = None if result is None else result.get(chunk)
    # a result that was multiplied at the end
    if later is not None and (factor := math.gcd(*later)) > 1:
        later = tuple(count // factor for count in later)
    # for each event: that, and whether nothing else arrives in between
    evidence: list[tuple[Counts | None, bool]] = []
    alone = True
    for _, is_send, i in reversed(events):
        evidence.append((later, alone))
        later, alone = (content[i][chunk], True) if is_send else (later, False)
    states = [(START, held)]
    for (_, is_send, i), (later, alone) in zip(events, reversed(evidence), strict=True):
        carried, moment = content[i][chunk], replay.step[i] + (0.0 if is_send else 0.5)
        if not replay.sums:
            after = tuple(map(max, held, carried))
        elif is_send:
            after = carried
        elif later is not None and alone:
            after = later
        else:
            after = _guess(held, carried, later)
        if not is_send:
            landed[i, chunk] = Landing(
                chunk, carried, replay.sums and any(held) and after not in (carried, held)
            )
        if after != held:
            states.append((max(moment, states[-1][0]), after))
            held = after
    return states


def _guess(held: Counts, carried: Counts, later: Counts | None) -> Counts:
    """Guess what a rank holds after an arrival, if its next message or result doesn't show it.

    Either more arrives before the rank sends or returns the chunk, or it never does.
    """
    total = tuple(a + b for a, b in zip(held, carried, strict=True))
    if later is not None and _contains(later, total):
        return total
    if later is not None and _contains(later, carried):
        return carried
    # a rank that receives more than it has keeps what it received
    return carried if _contains(carried, held) else total


def _contains(whole: Counts, part: Counts) -> bool:
    return all(a >= b for a, b in zip(whole, part, strict=True))
