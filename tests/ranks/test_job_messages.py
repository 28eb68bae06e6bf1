"""Ranks of a job tell each other JSON and tensors, and unpickle nothing that another rank wrote."""

from __future__ import annotations

import collections
import json
import os
import pickle

import numpy as np
import pytest
import torch

import parallel101 as p101
from parallel101.laboratory.ranks.job_messages import (
    from_json,
    pack_for_all,
    pack_record,
    to_json,
    unpack_from,
    unpack_record,
)
from parallel101.laboratory.ranks.wire import RankRecord
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.wait_for import RankStatus
from parallel101.trainers.history import History, StepResult

CALL = Call(1, "all_to_all", (0, 2), "world", 3, "a.py:7", shape=torch.Size([2, 3]))
CALL = CALL._replace(alike=(("dim", "0"),), gives={0: 4, 2: 8}, within=("all_to_all", (0, 1, 2)))


@pytest.mark.parametrize(
    "value",
    [
        RankStatus(),
        RankStatus(
            CALL,
            posted={("send", 2, 0, "world"): [(3, "a.py:8", 4), (4, "a.py:9", 8)]},
            collectives={"world": (3, ["barrier", "all_reduce"])},
            dropped={(("recv", None, 0, "world"), 2): "a.py:9"},
        ),
        [CALL, CALL._replace(nbytes=5, gives=None)],
    ],
    ids=["nothing", "a status", "calls"],
)
def test_what_is_read_equals_what_was_written(value):
    assert from_json(to_json(value).encode()) == value


@pytest.mark.parametrize(
    "error",
    [
        p101.DeadlockError(
            {0: ("recv", 1, "a.py:1"), 1: ("all_reduce", (0, 2), "a.py:2")}, [0, 1], [2], ["d"]
        ),
        p101.RankFailed("rank 1 raised ValueError: é", 1, -6),
        p101.MisuseError("different shapes", 3),
        p101.LaunchTimeout("after 3 s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was(error):
    again = from_json(to_json(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    "text",
    [b"\x80\x04.", "{", '{"Popen": ["id"]}', '{"Call": [1]}', '{"dict": 1}', "[" * 100_000],
    ids=["a pickle", "half", "another class", "too few", "no pairs", "too deep"],
)
def test_other_text_is_refused_in_words(text):
    with pytest.raises(ValueError, match=r"another rank wrote .* Use the same version"):
        from_json(text)


Point = collections.namedtuple("Point", "x y")


def test_results_are_tensors_and_plain_values():
    history = History()
    history.add(StepResult(step=1, loss=2.5, seconds=0.1, samples=4, tokens=0))
    weights = torch.ones(3, requires_grad=True)
    large = torch.zeros(1 << 20)
    value = {
        "numbers": (1, 2.5, 1j, None, True, {3}, frozenset({4}), range(5), b"\xff"),
        "numpy": [np.float32(1.5), np.int64(2)],
        "history": history,
        "ordered": collections.OrderedDict(a=[torch.float32, torch.Size([2])]),
    }
    again = unpack_from(pack_for_all(value, 0), 0)
    assert again == value and type(again["numbers"][7]) is range
    tensors = [weights, (weights * 2).sum(), large[5:7], np.arange(4), np.array(["a", "bc"])]
    packed = pack_for_all(tensors, 0)
    assert len(packed) < 20_000, "a slice is sent without the rest of its tensor"
    again = unpack_from(packed, 0)
    assert all(torch.equal(a, b) for a, b in zip(again[:3], tensors))
    assert all(map(np.array_equal, again[3:], tensors[3:]))
    assert [t.requires_grad for t in again[:3]] == [True, False, False]


def test_other_classes_are_refused_until_the_program_allows_them():
    with pytest.raises(TypeError, match=rf"rank 2 returned a value with a {__name__}\.Point.*add_"):
        pack_for_all(Point(1, 2), 2)
    with pytest.raises(TypeError, match="rank 2 returned a generator that can't be pickled"):
        pack_for_all((i for i in range(3)), 2)
    with torch.serialization.safe_globals([Point]):
        assert unpack_from(pack_for_all([Point(1, 2)], 2), 2) == [Point(1, 2)]


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_what_would_run_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bomb"
    torch.save([Bomb()], file)
    for data in (file.read_bytes(), pickle.dumps(Bomb())):
        with pytest.raises(TypeError, match="rank 1 returned"):
            unpack_from(data, 1)
    assert not (tmp_path / "exploded").exists()


def test_a_record_arrives_as_it_was():
    def program():
        with p101.span("forward", microbatch=3, dtype=torch.float32):
            torch.distributed.all_reduce(torch.ones(2))

    trace = p101.launch(program, world_size=2, backend="sim").trace
    rows = [tuple(event) for event in trace.events]
    record = unpack_record(pack_record(RankRecord(rows, rows[:1], [CALL]), 2, "gloo"))
    labels = [{"microbatch": 3, "dtype": "torch.float32"}] * 2
    assert [event.args for event in record.events if event.kind == "span"] == labels
    without = [[e._replace(args=None) for e in of.events] for of in (record, trace)]
    assert without[0] == without[1]
    assert len(record.unfinished) == 1 and record.unwaited == [CALL]
    content = json.loads(pack_record(record, 2, "gloo"))
    content[1]["events"][0][0] = 9  # a rank that does not exist
    with pytest.raises(ValueError, match="an event is a list"):
        unpack_record(json.dumps(content).encode())
