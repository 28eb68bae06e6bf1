"""A job's record is in files of its ranks, and a long one has the last events only, with sums of
those before them: it gives the tables that all events give, also from machines whose clocks differ.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.cli import main
from parallel101.laboratory.analysis.traffic import collective_totals, slowest_links, traffic
from parallel101.laboratory.analysis.waiting import rank_times, slowest_calls, waits
from parallel101.laboratory.record.events import span_event
from parallel101.laboratory.record.last_events import LastEvents
from parallel101.laboratory.record.rank_files import RankFiles, join_rank_files
from parallel101.laboratory.record.totals import MOST_SUMS, summed, sums_of
from parallel101.laboratory.record.trace import Trace, shifted
from parallel101.spans import recorder, span
from tests.sim.programs import run, trace

SIZE, STEPS = 3, 60


def program():
    recorder().record_waits = True
    rank = dist.get_rank()
    with span("start of the script", script="train.py", host=f"node {rank // 2}"):
        pass
    for step in range(STEPS):
        p101.compute(1.0 + (rank == step % SIZE))
        dist.all_reduce(torch.ones(4 + step % 5))
        work = dist.isend(torch.ones(8), (rank + 1) % SIZE)
        dist.recv(torch.empty(8), (rank - 1) % SIZE)
        work.wait()
        if step % 10 == 0:
            dist.broadcast(torch.ones(100), 1)


@pytest.fixture(scope="module")
def whole():
    network = p101.Network(latency=0.25, bandwidth=1e9)
    return Trace(trace(run(lambda rank: program(), SIZE, network)).events, SIZE, "gloo")


def kept(trace, rank, limit, writer=None, every=1):
    """What a rank of the same run has recorded if it keeps its last events only.

    `every`: how many events it records between two looks of the thread.
    """
    recorded = []
    last = LastEvents(limit, recorded, lambda events: events, list, writer)
    mine = sorted((e for e in trace.events if e.rank == rank), key=lambda e: e.end)
    for start in range(0, len(mine), every):
        recorded += mine[start : start + every]
        last.take_batches()
        assert len(recorded) <= 2 * last.size
        assert sum(last.size for _ in last.batches) + len(recorded) <= limit + 2 * last.size
    last.write_rest()
    return last.rows(lambda: [tuple(event) for event in recorded])


def window(trace, limit, every=1):
    records = [kept(trace, rank, limit, None, every) for rank in range(trace.world_size)]
    rows = [row for events, _ in records for row in events]
    earlier = [row for _, sums in records for row in sums]
    return Trace.from_rows(rows, trace.world_size, "gloo", (), earlier)


def tables_of(trace):
    """All that the tables of a run say, but for what only both sides of a call tell."""
    waited = waits(trace)
    ranks = [row._replace(waited_for={}) for row in rank_times(trace, waited)]
    links = sorted((row.src, row.dst, row.messages, row.nbytes) for row in slowest_links(trace))
    calls = [row._replace(last={}) for row in slowest_calls(waited, trace.earlier)]
    counts = trace.bytes_sent, trace.bytes_received, trace.messages_sent, [trace.makespan]
    lines = [[row.seconds for row in calls], [row.longest for row in calls]]
    numbers = [n for row in ranks for n in row[:-1]] + [
        n for of in counts + tuple(lines) for n in of
    ]
    words = [(row.where, row.kind, row.waits) for row in calls]
    return numbers, [links, collective_totals(trace), words, traffic(trace)]


@pytest.mark.parametrize(("limit", "every"), [(20, 1), (40, 1000), (200, 1)])
def test_tables_are_those_of_all_events(whole, limit, every, tmp_path):
    part = window(whole, limit, every)
    assert 0 < len(part.events) < len(whole.events)
    of_part, of_whole = tables_of(part), tables_of(whole)
    assert of_part[0] == pytest.approx(of_whole[0])
    assert of_part[1] == of_whole[1]
    # the same from a file
    part.save(tmp_path / "part.json.gz")
    loaded = Trace.load(tmp_path / "part.json.gz")
    assert tables_of(loaded) == of_part
    assert loaded.kept_text == part.kept_text != "" and part.kept_text in repr(loaded)
    # messages pair up by their numbers, as in the whole record
    pairs = {(m.src, m.dst, m.send.seq) for m in part.messages()}
    assert all(m.send.seq == m.recv.seq for m in part.messages())
    assert pairs < {(m.src, m.dst, m.send.seq) for m in whole.messages()}


def test_what_counts_steps_refuses_a_part_of_a_record(whole):
    part = window(whole, 40)
    with pytest.raises(ValueError, match=r"the last \d+ events of [\d,]+"):
        part.need_all_events("explain")
    whole.need_all_events("explain")
    assert whole.kept_text == window(whole, 100_000).kept_text == ""


def write(trace, directory, ranks=range(SIZE), size=SIZE, start=""):
    """The whole files of some ranks. `start`: a name for this start of the job."""
    for rank in ranks:
        rows = [
            e._replace(args={**e.args, "attempt": start}) if e.args else e
            for e in trace.events
            if e.rank == rank
        ]
        RankFiles(directory, rank, size, "gloo").write(rows)


@pytest.mark.parametrize("dies", [False, True])
def test_files_rotate_and_those_of_a_killed_rank_are_read(whole, dies, tmp_path):
    limit = 40
    for rank in range(SIZE):
        files = RankFiles(tmp_path, rank, SIZE, "gloo")
        rows, earlier = kept(whole, rank, limit, files)
        # the batches that are kept, those that are not taken yet, and none of those before
        assert 10 <= len(list(tmp_path.glob(f"rank-{rank}.*"))) <= 12
        if not (dies and rank == 1):
            files.write(rows, (), earlier)
            assert len(list(tmp_path.glob(f"rank-{rank}.*"))) == 1
    joined, missing, _, cut_short = join_rank_files(tmp_path)
    assert missing == [] and cut_short == [1] * dies
    assert joined.kept_text == window(whole, limit).kept_text
    assert tables_of(joined)[1] == tables_of(whole)[1]


@pytest.mark.parametrize("ahead", [0.0, 1000.0], ids=["one clock", "a clock for each machine"])
def test_joined_files_are_the_whole_trace(whole, tmp_path, ahead):
    clocks = [
        shifted((e for e in whole.events if e.rank == r), -ahead * (r // 2)) for r in range(3)
    ]
    write(Trace(itertools.chain(*clocks), SIZE, "gloo"), tmp_path)
    joined, missing, *_ = join_rank_files(tmp_path)
    assert missing == [] and joined.world_size == SIZE
    ours, theirs = (tables_of(of)[0] for of in (joined, whole))
    assert ours == pytest.approx(theirs)
    ours, theirs = (
        sorted((m.src, m.dst, m.send.seq, round(m.start, 6), round(m.end, 6)) for m in messages)
        for messages in (joined.messages(), whole.messages())
    )
    assert ours == theirs


@pytest.mark.parametrize("size", [SIZE, SIZE + 2])
def test_a_rank_without_a_file_of_this_start_of_the_job_is_named(whole, tmp_path, size, capsys):
    """torchrun starts the others again when a rank has died. If that had a rank that the new job
    lacks, or was on another host, its file remains.
    """
    with pytest.raises(ValueError, match="has no files of ranks: record them with torchrun"):
        join_rank_files(tmp_path)
    write(whole, tmp_path, ranks=(0, 1))
    joined, missing, *_ = join_rank_files(tmp_path)
    assert missing == [2] and joined.bytes_sent == [*whole.bytes_sent[:2], 0]
    write(whole, tmp_path, start="first", size=size)
    write(whole, tmp_path, ranks=(0, 1), start="second")
    joined, missing, left_out, _ = join_rank_files(tmp_path)
    assert left_out == [2] == missing and joined.world_size == SIZE
    assert {e.rank for e in joined.events} == {0, 1}
    assert main(["merge", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "the record of rank 2 is of another start of the job than rank 0's" in said


def test_a_program_with_many_names_has_the_rest_of_its_sums_together():
    spans = [span_event(0, f"step {i}", 0.0, 1.0) for i in range(MOST_SUMS + 10)]
    sums = summed(spans)
    assert len(sums) == MOST_SUMS + 1 == len(summed([*sums, *spans]))
    assert sum(sums_of(e).events for e in sums) == len(spans)
