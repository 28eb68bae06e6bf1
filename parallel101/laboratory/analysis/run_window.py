"""When a run, or one rank's part of it, took place, and the part of a record between two times."""

from __future__ import annotations

from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.trace import Trace


def script_marks(trace: Trace) -> list[Event]:
    """The spans without length that mark the start and the end of the script on each rank.

    `parallel101 run` makes them.
    """
    marks = [mark for earlier in trace.earlier.values() for mark in earlier.marks]
    return marks + [span for span in trace.spans() if "script" in (span.args or {})]


def run_times(trace: Trace, rank: int | None = None) -> tuple[float, float]:
    """The start and the end of a run, or of one rank's part of it, with the calls that never ended.

    (0, 0) if nothing is recorded.
    """
    events = [event for event in [*trace.events, *trace.unfinished] if rank in (None, event.rank)]
    earlier = [of for number, of in trace.earlier.items() if rank in (None, number)]
    starts = [event.start for event in events] + [of.begin for of in earlier]
    ends = [event.end for event in events] + [of.until for of in earlier]
    return min(starts, default=0.0), max(ends, default=0.0)


def recorded_from(trace: Trace) -> float:
    """The time from which on the record has all events: 0 unless it has the last ones only."""
    return max((of.until for of in trace.earlier.values()), default=0.0)


def window(trace: Trace, begin: float, end: float) -> Trace:
    """The part of a record between two times, with events cut at its ends."""
    inside = [
        e._replace(start=max(e.start, begin), end=min(e.end, end))
        for e in trace.events
        if e.end > begin and e.start < end
    ]
    return Trace(inside, trace.world_size, trace.backend)
