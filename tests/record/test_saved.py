"""Trace.load names the file, and what is wrong with it."""

from __future__ import annotations

import gzip
import json

import pytest

from parallel101.laboratory.record.events import Event, EventGroup
from parallel101.laboratory.record.trace import FIELDS, Trace

GROUP = EventGroup("world", (1, 0), "dp")
SEND = Event(0, "send", 1, 0, 8, 0.0, 1.0, "a.py:1", 0.0, GROUP, 0, (1,), "int64", [7])
SEND = SEND._replace(args={"layer": 3})


@pytest.fixture
def saved(tmp_path):
    """A correct file, and its content."""
    path = tmp_path / "trace.json"
    unfinished = [SEND._replace(seq=1, peer=None)]
    Trace([SEND, SEND._replace(kind="recv", rank=1, peer=0)], 2, "sim", unfinished).save(path)
    return path, json.loads(path.read_text())


def test_every_field_has_its_type(saved):
    path, _ = saved
    trace = Trace.load(path)
    assert set(FIELDS) == set(Event._fields)
    assert trace.events[0] == SEND and trace.messages_sent == [1, 0]
    assert trace.unfinished[0].peer is None


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("where", ["events", "unfinished"])
def test_a_field_of_another_type_is_named(saved, where, field):
    path, content = saved
    other = 3 if isinstance("text", FIELDS[field]) else "text"
    content[where][0][Event._fields.index(field)] = other
    path.write_text(json.dumps(content))
    refused = rf"trace\.json.* an event is a list of .*{field}.*; one is"
    with pytest.raises(ValueError, match=refused):
        Trace.load(path)


EVENT = "a list of 17 fields"
IMPOSSIBLE = {  # what is changed → the words about it
    **{
        f"no {name}": (lambda c, name=name: c.pop(name), f"its '{name}' is None, where a ")
        for name in ("world_size", "backend", "groups", "events")
    },
    "another format": (lambda c: c.update(format="trace 9"), "its format is 'trace 9', not"),
    "a field too few": (lambda c: c["events"][0].pop(), EVENT + r" .* one is \[0, 'send'"),
    "a field too many": (lambda c: c["events"][0].append(1), EVENT),
    "no event": (lambda c: c["events"].append(None), EVENT + " .* one is None"),
    **{
        f"field {i} is {value}": (
            lambda c, i=i, value=value: c["events"][0].__setitem__(i, value),
            of,
        )
        for of, i, values in (
            ("world of 2", 0, (2, -1)),
            ("world of 2", 2, (5,)),
            ("1 groups", 9, (1, -1)),
        )
        for value in values
    },
    **{
        f"the group {group}": (lambda c, group=group: c["groups"].append(group), words)
        for group, words in (
            (["world", [0, 2], None], r"one of its groups is \['world', \[0, 2\]"),
            (["world", 3, None], r"one of its groups is \['world', 3"),
            ([3, [0], None], r"one of its groups is \[3, \[0\]"),
            (["world", [0], 3], r"one of its groups is \['world', \[0\], 3\]"),
            (["world"], r"one of its groups is \['world'\]"),
        )
    },
}


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_events_groups_and_ranks_that_are_impossible_are_named(saved, change, message):
    path, content = saved
    change(content)
    path.write_text(json.dumps(content))
    refused = rf"trace\.json is not a trace that Trace\.save wrote: .*{message}"
    with pytest.raises(ValueError, match=refused):
        Trace.load(path)


# by name: bytes in an id may differ between the processes that collect it (gzip's header holds the
# time)
NO_TRACES = {
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
    "an empty object": b"{}",
    "no text": b"\xff\xfe",
    "gzip cut short": gzip.compress(b"{}", mtime=0)[:-9],
    "gzip's first bytes only": b"\x1f\x8b cut",
    "gzip of nothing": b"\x1f\x8b\x08" + bytes(30),
}


@pytest.mark.parametrize("data", NO_TRACES.values(), ids=NO_TRACES)
def test_a_file_that_is_no_trace(tmp_path, data):
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(ValueError, match=r"other is not a trace that Trace\.save wrote"):
        Trace.load(tmp_path / "other")
