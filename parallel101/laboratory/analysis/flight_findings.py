"""Says what a job was stuck in, from the dumps of torch's flight recorder.

    rank 0  … all_reduce 6 ✓   all_reduce 7 …          called it, and waits
    rank 1  … all_reduce 6 ✓                           missing in all_reduce number 7

torch has an analyzer of its own (`torch.distributed.flight_recorder`, the command `torchfrtrace`),
which prints the first call of each group that doesn't match. This file goes further:

- It follows who waits for whom from group to group, to the rank that waits for nobody or to a
  cycle. torch's analyzer looks at one group at a time.
- The ranks that differ are those of the smaller number. torch's takes the first rank for right.
- It also works without a dump of each rank, with ring buffers that have wrapped, and if the ranks
  made different numbers of calls (it compares numbers of one group; torch's aligns all calls of a
  rank by their position).
- It prints the line of your program and not torch's frames, and reads gloo's dumps, which lack the
  groups' ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from parallel101.laboratory.record.flight_recorder import (
    MAIN_GROUP,
    FlightCall,
    FlightGroup,
    FlightJob,
    StackFrame,
)
from parallel101.laboratory.record.units import listed, ranks_text
from parallel101.laboratory.record.wait_for import cycle
from parallel101.laboratory.record.where import shown

# of Python's and torch's decorators and launchers
PLUMBING = (
    "/typing_extensions.py",
    "/contextlib.py",
    "/functools.py",
    "/threading.py",
    "/runpy.py",
)
MOST_FRAMES = 8  # of a stack that is printed
# collectives for which each rank passes the same number of elements; for scatter, each gets it
SAME_INPUT = ("all_reduce", "allreduce", "broadcast", "reduce", "gather", "all_gather", "allgather")


class FlightFinding(NamedTuple):
    """Something that the dumps show to be wrong.

    Attributes:
        kind: "missing" (a rank did not make a call that others made), "operation", "sizes",
            "message" (a send or a receive without its other side), or "unfinished".
        group: the group's label.
        number: of the collective in its group, from 1; 0 for a message.
        ranks: the ranks that are missing, that differ, or whose call has not finished.
        text: the finding in several lines.
    """

    kind: str
    group: str
    number: int
    ranks: tuple[int, ...]
    text: str


class CollectiveCalls(NamedTuple):
    """What each rank called as one collective of a group.

    Several calls that torch joined into one have the same number.
    """

    group: FlightGroup
    ranks: tuple[int, ...]  # of the group
    number: int
    calls: dict[int, list[FlightCall]]  # by rank

    def waiting(self) -> list[int]:
        """The ranks whose calls have not finished."""
        return [rank for rank, of in self.calls.items() if not all(c.finished for c in of)]

    def name(self) -> str:
        first = next(iter(self.calls.values()))
        return f"{_operation(first)} number {self.number} of {self.group.label}"


class FlightVerdict(NamedTuple):
    """What the dumps of a job show.

    Attributes:
        conclusion: who keeps the others waiting, in a sentence or two for each such rank. Empty if
            no rank waits for another.
        findings: what is wrong, the causes first. Empty if every call has finished on every rank.
    """

    conclusion: str
    findings: list[FlightFinding]


def flight_verdict(job: FlightJob) -> FlightVerdict:
    """What a job was stuck in, and who keeps the others waiting."""
    needs: dict[int, set[int]] = defaultdict(set)  # who waits for whom
    found: list[FlightFinding] = []
    parts = _groups(job)
    collectives = [_collectives(part) for part in parts]
    for of in collectives:
        found += _first(of, _different_operations) or _first(of, _different_sizes)
        found += _missing(job, of, needs)
    for part in parts:
        found += _messages(job, part, needs)
    if not found:
        found = [one for of in collectives for one in _first(of, _unfinished)]
    # a rank that is missing and itself waits for others is an effect
    waiting = {rank for rank in needs if needs[rank]}
    found.sort(key=lambda one: one.kind == "missing" and set(one.ranks) <= waiting)
    return FlightVerdict(_conclusion(job, needs), found)


def _conclusion(job: FlightJob, needs: Mapping[int, set[int]]) -> str:
    graph = {rank: sorted(of) for rank, of in needs.items() if of}
    roots = sorted({peer for of in graph.values() for peer in of} - graph.keys())
    if roots:
        return "\n".join(_root(job, rank, _that_reach(rank, graph)) for rank in roots)
    if around := cycle(graph):
        chain = ", ".join(
            f"rank {a} waits for rank {b}" for a, b in zip(around, around[1:] + around[:1])
        )
        return (
            f"The ranks wait for each other: {chain}. All ranks must make the calls of all groups "
            "in one order."
        )
    return ""


def _that_reach(root: int, graph: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks that wait for a rank, or for one that waits for it."""
    reached = {root}
    while more := {r for r, of in graph.items() if r not in reached and reached & set(of)}:
        reached |= more
    return sorted(reached - {root})


def _root(job: FlightJob, rank: int, waiting: Sequence[int]) -> str:
    who = f"{ranks_text(waiting).capitalize()} wait{'s' * (len(waiting) == 1)} for rank {rank}"
    if (dump := job.dumps.get(rank)) is None:
        return f"{who}, which left no dump that can be read. Look at its log first."
    if not dump.calls:
        return f"{who}, which has made no call at all. Look at how it starts."
    last = dump.calls[-1]
    if not last.finished:
        return (
            f"{who}. It is in {last.operation}{_at(last)}, which has not finished, in "
            f"{last.group.label}. Look at the other ranks of that group."
        )
    return (
        f"{who}. Its last call, {last.operation}{_at(last)}, has finished. Look at what it does "
        "after that: an early return, another branch, an endless loop, a lock, slow data."
    )


# ── Groups and their calls


class GroupCalls(NamedTuple):
    """The calls in one group, by rank."""

    group: FlightGroup
    ranks: tuple[int, ...]  # of the group
    calls: dict[int, list[FlightCall]]


def _groups(job: FlightJob) -> list[GroupCalls]:
    """All groups in which something was called."""
    parts: dict[FlightGroup, dict[int, list[FlightCall]]] = {}
    for dump in job.dumps.values():
        for call in dump.calls:
            parts.setdefault(call.group, defaultdict(list))[dump.rank].append(call)
    everyone = tuple(range(job.world_size))

    def ranks(group: FlightGroup, callers: Collection[int]) -> tuple[int, ...]:
        return group.ranks or (everyone if group.desc == MAIN_GROUP else tuple(sorted(callers)))

    return [GroupCalls(group, ranks(group, of), of) for group, of in parts.items()]


def _collectives(part: GroupCalls) -> list[CollectiveCalls]:
    """The collectives of a group, in order."""
    calls: dict[int, dict[int, list[FlightCall]]] = defaultdict(lambda: defaultdict(list))
    for rank, of in part.calls.items():
        for call in of:
            if not call.message:
                calls[call.seq][rank].append(call)
    return [CollectiveCalls(part.group, part.ranks, n, dict(calls[n])) for n in sorted(calls)]


def _first(
    collectives: Sequence[CollectiveCalls], look: Callable[[CollectiveCalls], FlightFinding | None]
) -> list[FlightFinding]:
    """The first finding of a group. What comes after a mismatch may be its consequence."""
    return next(
        ([found] for collective in collectives if (found := look(collective)) is not None), []
    )


# ── What can be wrong with them


def _missing(
    job: FlightJob, collectives: Sequence[CollectiveCalls], needs: dict[int, set[int]]
) -> list[FlightFinding]:
    """The first collective of a group that some ranks wait in and others have not called.

    Adds to `needs` who waits for whom.
    """
    last: dict[int, int] = defaultdict(int)
    for collective in collectives:
        last.update(dict.fromkeys(collective.calls, collective.number))
    found: list[FlightFinding] = []
    for collective in collectives:
        waiting = collective.waiting()
        absent = [
            r
            for r in collective.ranks
            if last[r] < collective.number and not _lost(job, r, last[r])
        ]
        for rank in waiting:
            needs[rank].update(r for r in absent if r in job.dumps or not found)
        missing = tuple(rank for rank in absent if rank in job.dumps)
        if found or not waiting or not absent:
            continue
        gone = [rank for rank in absent if rank not in job.dumps]
        verb = "are" if len(missing) > 1 else "is"
        title = f"{collective.name()}: " + (
            f"{ranks_text(missing)} {verb} missing"
            if missing
            else f"nothing is known of {ranks_text(gone)}, which left no dump that can be read"
        )
        lines = [title, *_called(collective)]
        lines += [_before(job, collective, rank, last[rank]) for rank in missing]
        if missing and gone:
            lines.append(f"{ranks_text(gone)} left no dump that can be read")
        lines += _stack(collective.calls[waiting[0]][0])
        ranks = missing or tuple(gone)
        found.append(
            FlightFinding("missing", collective.group.label, collective.number, ranks, _text(lines))
        )
    return found


def _lost(job: FlightJob, rank: int, last: int) -> bool:
    """Whether a rank's buffer has wrapped and has no call of the group any more."""
    return last == 0 and rank in job.dumps and job.dumps[rank].wrapped


def _before(job: FlightJob, collective: CollectiveCalls, rank: int, last: int) -> str:
    mine = [c for c in job.dumps[rank].calls if c.group == collective.group and c.seq == last]
    if not last or not mine:
        return f"rank {rank} has made no call in this group"
    state = "finished" if mine[-1].finished else "not finished"
    return f"rank {rank} came as far as {mine[-1].operation} number {last}{_at(mine[-1])}, {state}"


def _different_operations(collective: CollectiveCalls) -> FlightFinding | None:
    return _different(collective, "operation", _operation)


def _different_sizes(collective: CollectiveCalls) -> FlightFinding | None:
    def passed(calls: Sequence[FlightCall]) -> str:
        said = [_elements(call) for call in calls]
        return ", ".join(text for text in said if text)

    return _different(collective, "sizes", passed)


def _different(
    collective: CollectiveCalls, kind: str, of: Callable[[Sequence[FlightCall]], str]
) -> FlightFinding | None:
    """The finding if `of` is not the same text for all ranks. Those with "" are left out."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, calls in collective.calls.items():
        if text := of(calls):
            alike[text].append(rank)
    if len(alike) < 2:
        return None
    most, *others = sorted(alike, key=lambda text: (-len(alike[text]), alike[text]))
    ranks = tuple(sorted(rank for text in others for rank in alike[text]))
    what = "different operations" if kind == "operation" else "different sizes or types"
    lines = [f"number {collective.number} of {collective.group.label}: the ranks passed {what}"]
    if kind == "operation":
        lines[0] = (
            f"number {collective.number} of {collective.group.label}: the ranks called {what}"
        )
    for text in (most, *others):
        first = collective.calls[alike[text][0]][0]
        operation = "" if kind == "operation" else f"{first.operation} of "
        lines.append(f"{ranks_text(alike[text])}: {operation}{text}{_at(first)}")
    lines += _stack(collective.calls[ranks[0]][0])
    return FlightFinding(kind, collective.group.label, collective.number, ranks, _text(lines))


def _messages(job: FlightJob, part: GroupCalls, needs: dict[int, set[int]]) -> list[FlightFinding]:
    """A group's sends and receives that have not finished, and whose other side was not posted."""
    pairs: dict[tuple[int, int], dict[str, list[FlightCall]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for rank, calls in part.calls.items():
        for call in calls:
            if call.peer is not None and call.peer < len(part.ranks):
                peer = part.ranks[call.peer]
                pair = (rank, peer) if call.operation == "send" else (peer, rank)
                pairs[pair][call.operation].append(call)
    found = []
    for (src, dst), of in pairs.items():
        lost = any(rank in job.dumps and job.dumps[rank].wrapped for rank in (src, dst))
        for mine, theirs, rank, peer in (("send", "recv", src, dst), ("recv", "send", dst, src)):
            # the k-th send pairs with the k-th receive; if the first ones are lost, count from
            # the first that has not finished
            posted = [c for c in of[mine] if not (lost and c.finished)]
            matched = sum(not (lost and c.finished) for c in of[theirs])
            alone = [call for call in posted[matched:] if not call.finished]
            if not alone:
                continue
            needs[rank].add(peer)
            way, other = ("to", "receive") if mine == "send" else ("from", "send")
            why = (
                f"rank {peer} posted no {other} for it"
                if peer in job.dumps
                else f"rank {peer} left no dump that can be read"
            )
            lines = [f"{mine} {way} rank {peer} on rank {rank}, {part.group.label}: {why}"]
            lines += [f"posted{_at(alone[0])}", *_stack(alone[0])]
            found.append(FlightFinding("message", part.group.label, 0, (peer,), _text(lines)))
    return found


def _unfinished(collective: CollectiveCalls) -> FlightFinding | None:
    """A collective that all known ranks have called, and that has not finished."""
    if not (waiting := collective.waiting()):
        return None
    lines = [
        f"{collective.name()}: all known ranks called it, and it has not finished",
        *_called(collective),
    ]
    lines += _stack(collective.calls[waiting[0]][0])
    lines.append("the dump was written while it ran, or a link or a GPU is stuck")
    return FlightFinding(
        "unfinished", collective.group.label, collective.number, tuple(waiting), _text(lines)
    )


# ── Text


def _text(lines: Sequence[str]) -> str:
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def _operation(calls: Sequence[FlightCall]) -> str:
    """ "all_reduce", or of several calls that torch joined: "2 × broadcast (coalesced)"."""
    names = [call.operation for call in calls]
    if len(names) == 1:
        return names[0]
    parts = [name for name in names if "coalesced" not in name] or names
    kinds = listed(f"{parts.count(name)} × {name}" for name in dict.fromkeys(parts))
    return f"{kinds} (coalesced)"


def _elements(call: FlightCall) -> str:
    """What must be the same on all ranks: elements and type. "" where nothing must."""
    name = call.operation.strip("_")
    if name.startswith("scatter"):
        sizes = call.output_sizes
    elif name.startswith((*SAME_INPUT, "reduce_scatter")):
        sizes = call.input_sizes
    else:  # in an all-to-all each rank may pass another size
        return ""
    if not sizes:
        return ""
    elements = sum(math.prod(shape) for shape in sizes)
    return f"{elements} × {'/'.join(sorted(set(call.dtypes))) or 'unknown'}"


def _called(collective: CollectiveCalls) -> list[str]:
    """ "called by ranks 0 and 2, not finished, at train.py:7: …", a line for each place."""
    places: Mapping[tuple[str, bool], list[int]] = defaultdict(list)
    for rank, calls in collective.calls.items():
        places[_at(calls[0]), all(call.finished for call in calls)].append(rank)
    return [
        f"called by {ranks_text(ranks)}, {'' if done else 'not '}finished{place}"
        for (place, done), ranks in places.items()
    ]


def called_at(call: FlightCall) -> str:
    """The line of the program: "train.py:7: dist.barrier()", or "" if the dump has no stacks."""
    frames = own_frames(call.frames)
    return shown(f"{frames[0].filename}:{frames[0].line}") if frames else ""


def _at(call: FlightCall) -> str:
    place = called_at(call)
    return f", at {place}" if place else ""


def _stack(call: FlightCall) -> list[str]:
    """The program's part of a call's stack, the innermost last, if it has more than one line."""
    frames = own_frames(call.frames)
    if len(frames) < 2:
        return []
    rows = [f'  File "{f.filename}", line {f.line}, in {f.name}' for f in frames[:MOST_FRAMES]]
    more = ["  …"] if len(frames) > MOST_FRAMES else []
    return [f"stack of rank {call.rank}:", *more, *reversed(rows)]


def own_frames(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """The frames of Python code outside torch, the innermost first. All, if there is no other."""

    def own(frame: StackFrame) -> bool:
        name = frame.filename.replace("\\", "/")
        plumbing = "/torch/" in name or name.startswith("<frozen") or name.endswith(PLUMBING)
        return name.endswith((".py", ">")) and not plumbing

    return [frame for frame in frames if own(frame)] or list(frames)
