"""Every failure of a rank is reported at once, with its rank and place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import fails, line_of


def test_arguments_that_the_function_does_not_take():
    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(lambda x: x, world_size=2)
    assert "missing 1 required positional argument: 'x'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("how", [{"trace": True}, {"backend": "sim"}])
def test_a_failed_recorded_run_keeps_its_record_and_what_had_not_ended(tmp_path, how):
    def program():
        peer = 1 - dist.get_rank()
        dist.all_reduce(torch.ones(2))
        work = dist.isend(torch.ones(3), peer, tag=5)
        dist.recv(torch.empty(1), peer)
        work.wait()

    error = fails(p101.DeadlockError, program, world_size=2, **how)
    trace = error.trace
    assert [event.kind for event in trace.events] == ["all_reduce", "all_reduce"]
    assert sorted((e.rank, e.kind, e.peer, e.tag, e.nbytes) for e in trace.unfinished) == [
        (0, "recv", 1, 0, 4),
        (0, "send", 1, 5, 12),
        (1, "recv", 0, 0, 4),
        (1, "send", 0, 5, 12),
    ]
    places = {line_of(program, text) for text in ("isend", "dist.recv")}
    assert {e.where for e in trace.unfinished} == places
    assert all(0 <= e.start <= e.end for e in trace.unfinished)
    assert trace.messages_sent == [0, 0], "what did not end is not counted"
    trace.save(tmp_path / "trace.json")
    assert p101.Trace.load(tmp_path / "trace.json").unfinished == trace.unfinished
    trace.to_chrome(tmp_path / "chrome.json")
    assert (tmp_path / "chrome.json").read_text().count("never ended") == 4


def test_messages_in_flight_on_sim_are_unfinished():
    def program():
        rank, x = dist.get_rank(), torch.ones(2)
        if rank < 4:  # two pairs
            (dist.send if rank % 2 == 0 else dist.recv)(x, rank ^ 1)
        elif rank < 7:  # two messages for one link
            (dist.send if rank < 6 else lambda x, _: [dist.recv(x, 4), dist.recv(x, 5)])(x, 6)
        else:
            p101.compute(0.5)
            raise ValueError(rank)

    network = p101.Network(latency=1.0)
    error = fails(p101.RankFailed, program, world_size=8, backend="sim", network=network)
    unfinished = sorted((e.rank, e.kind, e.peer) for e in error.trace.unfinished)
    sends = [(0, "send", 1), (2, "send", 3), (4, "send", 6), (5, "send", 6)]
    assert unfinished == sorted([*sends, (1, "recv", 0), (3, "recv", 2), (6, "recv", 4)])
    assert all((e.start, e.end) == (0.0, 0.5) for e in error.trace.unfinished)
