"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing draw: a process a rank, rows of slices, arrows along messages.

Slices of one row may not overlap there unless one holds the other, and sends do overlap: so each row is as many threads as it needs.
(Format: "Trace Event Format", Google, 2016.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel101.trace.events import Event, Trace

ROWS = ("compute", "send", "receive", "collective")
MICRO = 1e6  #  its unit of time is the microsecond


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """The trace's events, one dict each, as "traceEvents" wants them."""
    out: list[dict[str, Any]] = []
    lane = _lanes(trace)
    for rank in range(trace.world_size):
        out.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        out.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
    everything = [*trace.events, *trace.unfinished]
    for rank, thread in sorted({(event.rank, lane[id(event)]) for event in everything}):
        out.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": ROWS[thread // 1000]}})
    for number, event in enumerate(everything):
        label = (event.name or event.kind if event.kind == "span" else event.kind) + " (never ended)" * (number >= len(trace.events))
        about = {
            "where": event.where,
            "bytes": event.nbytes,
            "shape": list(event.shape),
            "dtype": event.dtype,
            "peer": event.peer,
            "tag": event.tag,
        }
        slice_ = {"ph": "X", "pid": event.rank, "tid": lane[id(event)], "ts": event.start * MICRO, "dur": (event.end - event.start) * MICRO}
        out.append({**slice_, "name": label, "cat": event.kind, "args": event.args or about})
    for number, message in enumerate(trace.messages()):
        arrow = {"name": "message", "cat": "message", "id": number}
        out.append({**arrow, "ph": "s", "pid": message.src, "tid": lane[id(message.send)], "ts": message.send.start * MICRO})
        out.append({**arrow, "ph": "f", "bp": "e", "pid": message.dst, "tid": lane[id(message.recv)], "ts": message.recv.end * MICRO})
    return out


def _lanes(trace: Trace) -> dict[int, int]:
    """For each event, the thread it is drawn on: the first of its row that is free when it starts. Spans nest, and keep one."""
    free: dict[tuple[int, int], list[float]] = {}
    lanes = {}
    for event in [*trace.events, *trace.unfinished]:
        row = _row(event)
        ends = free.setdefault((event.rank, row), [])
        if row == 0:
            lanes[id(event)] = 0
            continue
        number = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        ends[number : number + 1] = [event.end]
        lanes[id(event)] = 1000 * row + number
    return lanes


def _row(event: Event) -> int:
    return {"span": 0, "send": 1, "recv": 2}.get(event.kind, 3)
