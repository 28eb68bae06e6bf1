"""Exports a trace for ui.perfetto.dev and chrome://tracing.

There is a process for each rank, a slice for each event and an arrow for each message.

    rank 0   compute  ▇▇▇▇ forward ▇▇▇▇
             send           ▇▇▇▇▇─┐
    rank 1   receive       ▇▇▇▇▇▇▼▇▇

Slices of one thread must not overlap, unless one contains the other. Sends do overlap, so each row
gets as many threads as it needs. An arrow belongs to the slice that is open at its time. It ends
inside the receive, because at its end the next one may have begun. (Format: "Trace Event Format",
Google, 2016. Its processes and threads begin at 1: to Perfetto 0 is the idle one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel101.laboratory.record.events import Event, Message

ROWS = ("compute", "send", "receive", "collective")
MICRO = 1e6  # the format's unit of time is the microsecond
# seconds, its resolution: an event that takes no time gets this length, so that an arrow can end
# inside it
SHORTEST = 1e-9


def chrome_events(
    world_size: int,
    events: Sequence[Event],
    unfinished: Sequence[Event],
    messages: Sequence[Message],
) -> list[dict[str, Any]]:
    """Return the entries of the file's list "traceEvents"."""
    out: list[dict[str, Any]] = []
    everything = [*events, *unfinished]
    lane = _lanes(everything)
    for rank in range(world_size):
        process: dict[str, Any] = {"ph": "M", "pid": rank + 1}
        out.append({**process, "name": "process_name", "args": {"name": f"rank {rank}"}})
        out.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
    for rank, thread in sorted({(event.rank, lane[id(event)]) for event in everything}):
        args = {"name": ROWS[thread // 1000]}
        out.append({"ph": "M", "pid": rank + 1, "tid": thread, "name": "thread_name", "args": args})
    for number, event in enumerate(everything):
        label = event.name or event.kind if event.kind == "span" else event.kind
        about = {name: getattr(event, name) for name in ("where", "shape", "dtype", "peer", "tag")}
        group = {"group": event.group.ranks, "axis": event.group.axis, "bytes": event.nbytes}
        out.append(
            {
                "ph": "X",
                "pid": event.rank + 1,
                "tid": lane[id(event)],
                "ts": event.start * MICRO,
                "dur": (_end(event) - event.start) * MICRO,
                "name": label + " (never ended)" * (number >= len(events)),
                "cat": event.kind,
                "args": event.args or about | group,
            }
        )
    for number, message in enumerate(messages):
        send, recv = message.send, message.recv
        # an arrow ends strictly inside the receive's slice: in the middle of the message's flight,
        # or of the receive if two clocks disagree
        begin = message.start if message.start < _end(recv) else recv.start
        for phase, event, time in (("s", send, send.start), ("f", recv, (begin + _end(recv)) / 2)):
            place = {"pid": event.rank + 1, "tid": lane[id(event)], "ts": time * MICRO}
            arrow = {"ph": phase, "name": "message", "cat": "message", "id": number, **place}
            out.append(arrow if phase == "s" else {**arrow, "bp": "e"})
    return out


def _end(event: Event) -> float:
    """Return the end of an event's slice. Spans keep their times, because they nest."""
    return event.end if event.kind == "span" else max(event.end, event.start + SHORTEST)


def _lanes(events: Sequence[Event]) -> dict[int, int]:
    """Return the thread of each event: the first of its row that is free when it starts.

    Spans nest, so they all have the same one.
    """
    free: dict[tuple[int, int], list[float]] = {}
    lanes = {}
    for event in events:
        row = {"span": 0, "send": 1, "recv": 2}.get(event.kind, 3)
        ends = free.setdefault((event.rank, row), [])
        if row == 0:
            lanes[id(event)] = 1
            continue
        number = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        ends[number : number + 1] = [_end(event)]
        lanes[id(event)] = 1000 * row + number + 1
    return lanes
