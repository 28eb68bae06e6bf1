"""The files of a job's ranks become the trace of the whole job, also if the ranks were on
machines with different clocks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.cli import main
from parallel101.laboratory.record.rank_files import RankFiles, join_rank_files
from parallel101.spans import span
from tests.sim.programs import run, trace

SIZE = 4


def program():
    rank = dist.get_rank()
    with span("start of the script", script="train.py", host=f"node{rank // 2}"):
        pass
    p101.compute(1.0 + rank)
    dist.all_reduce(torch.ones(2))
    for _ in range(3):
        work = dist.isend(torch.ones(8), (rank + 1) % SIZE)
        dist.recv(torch.empty(8), (rank - 1) % SIZE)
        work.wait()


@pytest.fixture(scope="module")
def whole():
    network = p101.Network(latency=0.25, bandwidth=1e9)
    return trace(run(lambda rank: program(), SIZE, network))


def write(trace, directory, ranks=range(SIZE), size=SIZE, zero=lambda rank: 0.0, start=""):
    """The files of some ranks. `start`: a name for this start of the job."""

    def labelled(e):
        return e._replace(args={**e.args, "attempt": start}) if e.args and start else e

    for rank in ranks:
        rows = [
            tuple(
                labelled(e)._replace(
                    start=e.start + zero(rank), end=e.end + zero(rank), posted=e.posted + zero(rank)
                )
            )
            for e in trace.events
            if e.rank == rank
        ]
        RankFiles(directory, rank, size, "gloo").write(rows)


@pytest.mark.parametrize(
    "zero",
    [lambda rank: 50.0, lambda rank: 1000.0 * (rank // 2)],
    ids=["one clock", "a clock for each machine"],
)
def test_joined_files_are_the_whole_trace(whole, tmp_path, zero):
    write(whole, tmp_path, zero=zero)
    joined, missing, *_ = join_rank_files(tmp_path)
    assert missing == [] and joined.world_size == SIZE
    assert joined.makespan == pytest.approx(whole.makespan)
    assert joined.bytes_sent == whole.bytes_sent and joined.bytes_received == whole.bytes_received
    ours, theirs = (
        sorted((m.src, m.dst, m.send.seq, round(m.start, 6), round(m.end, 6)) for m in messages)
        for messages in (joined.messages(), whole.messages())
    )
    assert ours == theirs


def test_files_that_are_missing_are_named(whole, tmp_path):
    with pytest.raises(ValueError, match="has no files of ranks: record them with torchrun"):
        join_rank_files(tmp_path)
    write(whole, tmp_path, ranks=(0, 1, 3))
    joined, missing, *_ = join_rank_files(tmp_path)
    assert missing == [2] and joined.bytes_sent == [96, 96, 0, 96]


@pytest.mark.parametrize("size", [SIZE, SIZE + 2])
def test_a_rank_of_an_earlier_start_of_the_job_is_left_out(whole, tmp_path, size, capsys):
    """torchrun starts the others again when a rank has died. If that had a rank that the new job
    lacks, or was on another host, its file remains.
    """
    write(whole, tmp_path, start="first", size=size)
    write(whole, tmp_path, ranks=(0, 1, 2), start="second")
    joined, missing, left_out, _ = join_rank_files(tmp_path)
    assert left_out == [3] == missing and joined.world_size == SIZE
    assert {e.rank for e in joined.events} == {0, 1, 2}
    assert main(["merge", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "the record of rank 3 is of another start of the job than rank 0's" in said
