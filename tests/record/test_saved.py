"""Trace.load names the file, and what is wrong with it."""

from __future__ import annotations

import gzip
import json

import pytest

from parallel101.laboratory.record.events import Event, EventGroup
from parallel101.laboratory.record.trace import FIELDS, Trace

SEND = Event(
    0,
    "send",
    1,
    0,
    8,
    0.0,
    1.0,
    "a.py:1",
    0.0,
    EventGroup("world", (1, 0), "dp"),
    0,
    (1,),
    "int64",
    [7],
    None,
    {"layer": 3},
)


@pytest.fixture
def saved(tmp_path):
    """A correct file, and its content."""
    path = tmp_path / "trace.json"
    Trace(
        [SEND, SEND._replace(kind="recv", rank=1, peer=0)],
        2,
        "sim",
        unfinished=[SEND._replace(seq=1, peer=None)],
    ).save(path)
    return path, json.loads(path.read_text())


def test_every_field_has_its_type(saved):
    path, _ = saved
    trace = Trace.load(path)
    assert set(FIELDS) == set(Event._fields)
    assert (
        trace.events[0] == SEND
        and trace.unfinished[0].peer is None
        and trace.messages_sent == [1, 0]
    )


@pytest.mark.parametrize("name", ["world_size", "backend", "groups", "events"])
def test_a_missing_entry_is_named(saved, name):
    path, content = saved
    for changed, message in (
        ({**content, name: None}, f"its '{name}' is None"),
        ({**content, name: ...}, f"it has no '{name}'"),
    ):
        path.write_text(
            json.dumps({key: value for key, value in changed.items() if value is not ...})
        )
        with pytest.raises(
            ValueError,
            match=(
                rf"trace\.json is not as Trace\.save wrote it: {message}, where a .* was "
                r"expected"
            ),
        ):
            Trace.load(path)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("where", ["events", "unfinished"])
def test_a_field_of_another_type_is_named(saved, where, field):
    path, content = saved
    content[where][0][Event._fields.index(field)] = (
        3 if isinstance("text", FIELDS[field]) else "text"
    )
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"trace\.json.* an event is a list of .*{field}.*; one is"
    ):
        Trace.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["events"][0].pop(),
            r"a list of 17 fields .* one is \[0, 'send'",
        ),
        (lambda c: c["events"][0].append(1), "a list of 17 fields"),
        (lambda c: c["events"].append(None), "a list of 17 fields .* one is None"),
        (lambda c: c["events"][0].__setitem__(0, 2), "ranks of a world of 2; one is"),
        (lambda c: c["events"][0].__setitem__(0, -1), "ranks of a world of 2; one is"),
        (lambda c: c["events"][0].__setitem__(2, 5), "ranks of a world of 2; one is"),
        (lambda c: c.update(world_size=0), "its world_size is 0"),
        (lambda c: c["events"][0].__setitem__(9, 1), "one of 1 groups"),
        (lambda c: c["events"][0].__setitem__(9, -1), "one of 1 groups"),
        (
            lambda c: c["groups"].append(["world", [0, 2], None]),
            r"one of its groups is \['world', \[0, 2\]",
        ),
        (lambda c: c["groups"].append(["world", 3, None]), r"one of its groups is \['world', 3"),
        (lambda c: c["groups"].append([3, [0], None]), r"one of its groups is \[3, \[0\]"),
        (
            lambda c: c["groups"].append(["world", [0], 3]),
            r"one of its groups is \['world', \[0\], 3\]",
        ),
        (lambda c: c["groups"].append(["world"]), r"one of its groups is \['world'\]"),
    ],
    ids=[
        "a field too few",
        "a field too many",
        "no event",
        "a rank too high",
        "a negative rank",
        "a peer too high",
        "no ranks",
        "a group too high",
        "a negative group",
        "a group with a rank too high",
        "a group without a list of ranks",
        "a group whose name is a number",
        "a group whose axis is a number",
        "a group of a name only",
    ],
)
def test_events_groups_and_ranks_that_are_impossible_are_named(saved, change, message):
    path, content = saved
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"trace\.json is not as Trace\.save wrote it: .*{message}"
    ):
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
