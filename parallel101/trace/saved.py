"""A trace from what a file says: whatever does not fit is named here, and not by whoever first trips over it.

{"world_size": 2, "backend": "sim", "groups": {"world": [0, 1]}, "events": [[0, "send", 1, …], …], "unfinished": []}
"""

from __future__ import annotations

from typing import Any

from parallel101.trace.collector import collector_paused
from parallel101.trace.events import Event, Trace

NUMBER, NONE = (int, float), type(None)
FIELDS: dict[str, Any] = {  #  what JSON has for each field of an Event
    "rank": int, "kind": str, "peer": (int, NONE), "tag": int, "nbytes": int, "start": NUMBER, "end": NUMBER, "where": str,
    "posted": NUMBER, "group": str, "seq": int, "shape": list, "dtype": str, "payload": (list, NONE), "name": (str, NONE),
    "args": (dict, NONE),
}  # fmt: skip
TYPES = tuple(FIELDS.values())
SHAPE = Event._fields.index("shape")


def trace_in(content: dict[str, Any]) -> Trace:
    """The trace that a file's JSON holds. Raises ValueError for what is missing, of another type, or speaks of a rank that is not there."""
    content = {"unfinished": [], **content}  #  files from before there were such events
    world_size, backend, groups = _entry(content, "world_size", int), _entry(content, "backend", str), _entry(content, "groups", dict)
    if world_size < 1:
        raise ValueError(f"its world_size is {world_size}, and a world has at least one rank")
    for name, ranks in groups.items():
        if not isinstance(ranks, list) or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in ranks):
            raise ValueError(f"its group {name!r} is {ranks!r:.80}, which are not ranks of a world of {world_size}")
    with collector_paused():
        events, unfinished = ([_event(row, world_size) for row in _entry(content, name, list)] for name in ("events", "unfinished"))
    return Trace(events, world_size, backend, groups, unfinished)


def _entry(content: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(content.get(name), kind):
        what = f"its {name!r} is {content[name]!r:.80}" if name in content else f"it has no {name!r}"
        raise ValueError(f"{what}, where a {kind.__name__} was expected")
    return content[name]


def _event(row: Any, world_size: int) -> Event:
    if not isinstance(row, list) or len(row) != len(FIELDS):
        raise ValueError(f"an event is a list of {len(FIELDS)} fields, and one of its events is {row!r:.80}")
    if not all(map(isinstance, row, TYPES)):
        name, value = next((name, value) for (name, kind), value in zip(FIELDS.items(), row, strict=True) if not isinstance(value, kind))
        raise ValueError(f"one of its events has {value!r:.80} as its {name}")
    row[SHAPE] = tuple(row[SHAPE])
    event = Event._make(row)
    for name, rank in (("rank", event.rank), ("peer", event.peer)):
        if rank is not None and not 0 <= rank < world_size:
            raise ValueError(f"one of its events has {name} {rank}, in a world of {world_size}")
    return event
