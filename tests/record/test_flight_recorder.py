"""Dumps of torch's flight recorder are read without running anything that is in them, and a file
that is no whole dump is named with the reason.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle

import pytest

from parallel101 import cli
from parallel101.laboratory.record.flight_recorder import has_flight_dumps, read_flight_dumps

ENTRY = {
    "record_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[4]],
    "output_sizes": [[4]],
    "input_dtypes": ["Float"],
    "state": "completed",
    "frames": [{"filename": "train.py", "line": 3, "name": "<module>"}],
}
DUMP = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
    "entries": [ENTRY],
}


class Calls:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def write(directory, *contents):
    for rank, content in enumerate(contents):
        data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
        (directory / f"nccl_trace_rank_{rank}").write_bytes(data)
    return directory


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
def test_the_calls_and_the_groups_of_a_dump(tmp_path, as_json):
    data = json.dumps(DUMP).encode() if as_json else DUMP
    job = read_flight_dumps(write(tmp_path, data))
    assert (job.world_size, job.missing, job.unreadable) == (3, [1, 2], {})
    (call,) = job.dumps[0].calls
    assert (call.operation, call.seq, call.finished, call.input_sizes) == (
        "all_reduce",
        1,
        True,
        [[4]],
    )
    assert call.group.ranks == (0, 1, 2) and call.frames[0].line == 3


@pytest.mark.parametrize(
    "call",
    [
        (os.mkdir, "made"),
        (builtins.exec, "import os; os.mkdir('made')"),
        (builtins.eval, "1"),
        (set, [1]),
    ],
    ids=["os", "exec", "eval", "set"],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_asks_for_code_is_refused_and_not_run(tmp_path, monkeypatch, call, protocol):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({**DUMP, "entries": [Calls(*call)]}, protocol=protocol)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    job = read_flight_dumps(write(dumps, DUMP, b"\x80\x02" + data if protocol == 0 else data))
    assert list(job.dumps) == [0] and not (tmp_path / "made").exists()
    assert "is refused: it is a pickle that asks for" in job.unreadable[1]
    (dumps / "nccl_trace_rank_0").unlink()
    with pytest.raises(ValueError, match="asks for"):
        read_flight_dumps(dumps)


WHOLE = pickle.dumps(DUMP, protocol=2)
BROKEN = {
    "cut": (WHOLE[: len(WHOLE) // 2], "is not a whole dump"),
    "json cut": (json.dumps(DUMP).encode()[:-9], "is not a whole dump"),
    "empty": (b"", "is empty"),
    "a list": (pickle.dumps([1, 2]), "is not a flight recorder's dump"),
    "new format": (pickle.dumps({**DUMP, "version": "3.0"}), "has the format 3.0, and 2.x"),
    "no state": (
        pickle.dumps({**DUMP, "entries": [{**ENTRY, "state": 1, "input_sizes": 4}]}),
        "is not a dump as torch writes it",
    ),
    "lacks": (
        pickle.dumps({**DUMP, "entries": [{"record_id": 0}]}),
        "it lacks 'process_group'",
    ),
    "a huge memo": (b"\x80\x02}r\xff\xff\xff\xff.", "is not"),
    "persistent": (b"\x80\x02U\x01xQ.", "is not a whole dump"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_and_the_others_are_read(tmp_path, case):
    data, words = BROKEN[case]
    job = read_flight_dumps(write(tmp_path, DUMP, data))
    assert list(job.dumps) == [0] and words in job.unreadable[1]
    assert job.unreadable[1].startswith("nccl_trace_rank_1 ")


def test_what_cannot_be_read_at_all(tmp_path, capsys):
    assert not has_flight_dumps(tmp_path) and not has_flight_dumps(tmp_path / "nothing")
    write(tmp_path, b"")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["merge", str(tmp_path)])
    assert stopped.value.code == 2 and "nccl_trace_rank_0 is empty" in capsys.readouterr().err
    write(tmp_path, DUMP)
    (tmp_path / "comm_lib_trace_rank_0").write_bytes(WHOLE)
    with pytest.raises(ValueError, match="are both of rank 0: keep the files of one job"):
        read_flight_dumps(tmp_path)
    (tmp_path / "rank-0.json.gz").write_bytes(b"")  # a record of our own comes first
    assert not has_flight_dumps(tmp_path)
