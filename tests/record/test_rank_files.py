"""The files of a job's ranks become the trace of the whole job, also if the ranks were on
machines with different clocks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.record.rank_files import join_rank_files, write_rank_file
from parallel101.record.spans import span

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
    return p101.launch(
        program, world_size=SIZE, backend="sim", network=p101.Network(latency=0.25, bandwidth=1e9)
    ).trace


def write(trace, directory, ranks=range(SIZE), size=SIZE, zero=lambda rank: 0.0):
    for rank in ranks:
        rows = [
            tuple(
                e._replace(
                    start=e.start + zero(rank), end=e.end + zero(rank), posted=e.posted + zero(rank)
                )
            )
            for e in trace.events
            if e.rank == rank
        ]
        write_rank_file(directory, rank, size, "gloo", rows, [])


@pytest.mark.parametrize(
    "zero",
    [lambda rank: 50.0, lambda rank: 1000.0 * (rank // 2)],
    ids=["one clock", "a clock for each machine"],
)
def test_joined_files_are_the_whole_trace(whole, tmp_path, zero):
    write(whole, tmp_path, zero=zero)
    joined, missing = join_rank_files(tmp_path)
    assert missing == [] and joined.world_size == SIZE
    assert joined.makespan == pytest.approx(whole.makespan)
    assert joined.bytes_sent == whole.bytes_sent and joined.bytes_received == whole.bytes_received
    for trace in (joined, whole):
        trace.times = sorted(
            (m.src, m.dst, m.send.seq, round(m.start, 6), round(m.end, 6)) for m in trace.messages()
        )
    assert joined.times == whole.times


def test_files_that_are_missing_or_of_another_run_are_named(whole, tmp_path):
    with pytest.raises(ValueError, match="has no files of ranks: record them with torchrun"):
        join_rank_files(tmp_path)
    write(whole, tmp_path, ranks=(0, 1, 3))
    joined, missing = join_rank_files(tmp_path)
    assert missing == [2] and joined.bytes_sent == [96, 96, 0, 96]
    write(whole, tmp_path, ranks=(2,), size=5)
    with pytest.raises(
        ValueError,
        match=(
            "are from different runs, of 4 ranks on gloo and 5 ranks on gloo: delete those of "
            "the older one"
        ),
    ):
        join_rank_files(tmp_path)
