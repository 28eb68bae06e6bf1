"""Who held what, when: the run told again from its messages, step by step.

    a message lands ──▶ is it added to what the rank has, or put in its place?

The record does not say what a rank did with what it got. But what it sends or returns afterwards does: if that holds both
what it had and what came, it was added. Nothing here knows the name of an algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallel101.analysis.columns import Column, Counts, columns_of
from parallel101.analysis.diagram import Layout, groups_of, layout_of
from parallel101.analysis.provenance import Term, decode, flat_values
from parallel101.analysis.steps import steps_of
from parallel101.record.events import Message
from parallel101.record.trace import Trace

States = list[tuple[float, Counts]]  #  from which moment on a cell holds what
START = -1.0  #  moments: START is before the first step, s is the begin of step s, s + 0.5 the landing of its messages


class Landing(NamedTuple):
    """One chunk of one message, as it arrives."""

    column: int
    carried: Counts
    added: bool


@dataclass
class History:
    """A run as pictures need it. Without provenance (`known` is False) there are no columns, and no cells."""

    trace: Trace
    ranks: list[int]  #  those that took part
    layout: Layout
    messages: list[Message]
    step: list[int]  #  of each message
    steps: int
    known: bool = False
    sums: bool = False
    columns: list[Column] = field(default_factory=list)
    landings: list[list[Landing]] = field(default_factory=list)  #  of each message
    cells: dict[tuple[int, int], States] = field(default_factory=dict)  #  of each (rank, column)
    returned: list[dict[int, Counts] | None] = field(default_factory=list)  #  by rank; None where not known
    groups: dict[int, set[int]] = field(default_factory=dict)  #  for each rank, whose data could have reached it

    def in_step(self, step: int) -> list[int]:
        """The messages of a step, by their index."""
        return [i for i, s in enumerate(self.step) if s == step]

    def adds(self, step: int) -> bool:
        """Whether something that arrives in a step is added to what was there."""
        return self.known and any(landing.added for i in self.in_step(step) for landing in self.landings[i])

    def sent_bytes(self, step: int) -> dict[int, int]:
        """Bytes each rank has sent after `step`."""
        sent = dict.fromkeys(self.ranks, 0)
        for message, s in zip(self.messages, self.step, strict=True):
            sent[message.src] += message.nbytes if s <= step else 0
        return sent

    def final(self, rank: int) -> dict[int, Counts]:
        """What a rank returned, where that is known, or else what it held at the end."""
        returned = self.returned[rank] if self.returned else None
        if returned is not None:
            return returned
        return {c: self.cells[rank, c][-1][1] for c in range(len(self.columns)) if any(self.cells[rank, c][-1][1])}


def history_of(trace: Trace, results: Sequence[Any] | None = None, inputs: Sequence[Any] | None = None) -> History:
    """Read a trace. `results` and `inputs` are what each rank returned and was given, by rank, where that is known."""
    for name, given in (("results", results), ("inputs", inputs)):
        if given is not None and len(given) != trace.world_size:
            raise ValueError(f"{name} has {len(given)} entries for {trace.world_size} ranks: pass one a rank, in order")
    messages = [m for m in trace.messages() if m.src != m.dst]
    talked = sorted({rank for m in messages for rank in (m.src, m.dst)})
    ranks = talked or list(range(trace.world_size))
    pairs = [(m.src, m.dst) for m in sorted(messages, key=lambda m: (m.start, m.end))]
    layout = layout_of(ranks, pairs)
    step = steps_of(messages, port_per_link=layout.kind in ("ring", "chain"))
    history = History(trace, ranks, layout, messages, step, max(step, default=-1) + 1)
    payloads = [_decode(m.payload, trace.world_size) for m in messages]
    if all(p is not None for p in payloads):
        returned: list[list[Term] | None] = [None] * trace.world_size
        if results is not None and any(result is not None for result in results):
            returned = [_decode(flat_values(result), trace.world_size) for result in results]
        given = None if inputs is None else [_decode(flat_values(x), trace.world_size) for x in inputs]
        _tell(history, [p for p in payloads if p is not None], returned, given)
    return history


def _decode(values: list | None, world_size: int) -> list[Term] | None:
    return None if values is None else decode(values, world_size)


def _tell(history: History, payloads: list[list[Term]], returned: list[list[Term] | None], given: list[list[Term] | None] | None) -> None:
    """Fill in the chunks, and what each rank held of them."""
    chunks = columns_of(payloads, [*returned, *(given or [])], history.ranks)
    if not chunks.columns:
        return
    n = history.trace.world_size
    history.known, history.sums, history.columns = True, chunks.sums, chunks.columns
    history.returned = chunks.in_results[:n]
    history.groups = groups_of(history.ranks, [(m.src, m.dst) for m in history.messages])
    landed: dict[tuple[int, int], Landing] = {}
    for rank in history.ranks:
        for column in range(len(chunks.columns)):
            begin = chunks.in_results[n + rank] if given else None
            first = _begin(history, chunks.columns[column], rank) if begin is None else begin.get(column, (0,) * n)
            history.cells[rank, column] = _follow(history, chunks.in_messages, landed, rank, column, first)
    history.landings = [[landed[i, c] for c in sorted(content)] for i, content in enumerate(chunks.in_messages)]


def _begin(history: History, column: Column, rank: int) -> Counts:
    """What a rank has of a chunk before the first message: its own part, if the chunk has one."""
    own = rank in column.stripes and not column.mixed
    return tuple(int(own and r == rank) for r in range(history.trace.world_size))


def _follow(
    history: History, content: list[dict[int, Counts]], landed: dict[tuple[int, int], Landing], rank: int, column: int, held: Counts
) -> States:
    """One cell through time: (moment, what it holds from then on). Notes in `landed` whether each message that arrives was added."""
    story: list[tuple[float, bool, int]] = []  #  (when, it is a send, message)
    for i, m in enumerate(history.messages):
        if column in content[i]:
            if m.dst == rank:
                story.append((m.recv.end, False, i))
            if m.src == rank:
                story.append((m.send.posted, True, i))
    story.sort(key=lambda event: (event[0], history.step[event[2]], event[1]))
    result = history.returned[rank]
    later = None if result is None else result.get(column)  # what the rank shows of this chunk after the last event
    witnesses: list[tuple[Counts | None, bool]] = []  # for each event: what it shows next, and whether nothing arrives in between
    alone = True
    for _, is_send, i in reversed(story):
        witnesses.append((later, alone))
        later, alone = (content[i][column], True) if is_send else (later, False)
    states = [(START, held)]
    for (_, is_send, i), (later, alone) in zip(story, reversed(witnesses), strict=True):
        carried, moment = content[i][column], history.step[i] + (0.0 if is_send else 0.5)
        if not history.sums:
            after = tuple(map(max, held, carried))
        elif is_send:
            after = carried
        elif later is not None and alone:
            after = later  # what it shows next is what it made of it
        else:
            after = _made_of(held, carried, later)
        if not is_send:
            landed[i, column] = Landing(column, carried, history.sums and any(held) and after not in (carried, held))
        if after != held:
            states.append((max(moment, states[-1][0]), after))
            held = after
    return states


def _made_of(held: Counts, carried: Counts, later: Counts | None) -> Counts:
    """What a rank has after an arrival, where other arrivals follow before it shows what it has, or where it never does."""
    total = tuple(a + b for a, b in zip(held, carried, strict=True))
    if later is not None and _holds(later, total):
        return total
    if later is not None and _holds(later, carried):
        return carried
    return carried if _holds(carried, held) else total  # whoever is given more than it has takes it


def _holds(whole: Counts, part: Counts) -> bool:
    return all(a >= b for a, b in zip(whole, part, strict=True))
