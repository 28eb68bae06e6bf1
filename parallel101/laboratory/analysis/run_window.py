"""Finds when a run, or one rank's part of it, took place, and cuts a record between two times."""

from __future__ import annotations

from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.totals import is_call
from parallel101.laboratory.record.trace import Trace


def script_marks(trace: Trace) -> list[Event]:
    """Return the spans without length that mark the start and the end of the script on each rank.

    `parallel101 run` makes them.
    """
    return [e for e in [*trace.earlier, *trace.spans()] if "script" in (e.args or {})]


def run_times(trace: Trace, rank: int | None = None) -> tuple[float, float]:
    """Return the start and the end of a run, or of one rank's part of it.

    Calls that never ended count. A script on real ranks starts with the first call (see
    first_call). (0, 0) if nothing is recorded.
    """
    every = [*trace.events, *trace.unfinished, *trace.earlier]
    events = [event for event in every if rank in (None, event.rank)]
    start = min((event.start for event in events), default=0.0)
    end = max((event.end for event in events), default=0.0)
    return min(max(start, first_call(trace)), end), end


def first_call(trace: Trace) -> float:
    """Return the time of a real script's first send, receive or collective, in seconds.

    Before it, the ranks import torch and build their models, which isn't computing. 0 on the
    virtual clock, where imports take no time, and for a record that is not of a script.
    """
    if trace.backend == "sim" or not script_marks(trace):
        return 0.0
    events = [*trace.events, *trace.unfinished, *trace.earlier]
    return min((event.posted for event in events if is_call(event)), default=0.0)


def recorded_from(trace: Trace) -> float:
    """Return the time from which the record has all events: 0 unless it has only the last ones."""
    return max((event.end for event in trace.earlier), default=0.0)


def window(trace: Trace, begin: float, end: float) -> Trace:
    """Return the part of a record between two times, with events cut at its ends."""
    inside = [
        e._replace(start=max(e.start, begin), end=min(e.end, end))
        for e in trace.events
        if e.end > begin and e.start < end
    ]
    return Trace(inside, trace.world_size, trace.backend)
