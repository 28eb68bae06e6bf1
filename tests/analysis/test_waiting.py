"""Who waits for whom, by rank and by line, adds up to the run's time: on the virtual clock
exactly, on gloo within what was slept.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.traffic import slowest_links
from parallel101.laboratory.analysis.waiting import (
    rank_times,
    slowest_calls,
    waits,
    with_compute,
)
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.simulate import simulate
from parallel101.laboratory.viz.run_table import heading, tables
from parallel101.spans import recorder, span

NETWORK = p101.Network(latency=1.0, bandwidth=float("inf"))


def recorded(program, size, fails=False):
    def with_waits(rank):
        recorder().record_waits = True
        with span("start of the script", script="train.py", host="here"):
            pass
        program()

    result = simulate(with_waits, size, NETWORK)
    assert (result.error is not None) == fails
    return Trace.from_rows(result.events, size, "sim", result.unfinished)


@pytest.mark.parametrize(("size", "slow"), [(2, 0), (3, 1), (5, 0)])
def test_the_rank_that_computes_longest_is_waited_for(size, slow):
    def program():
        p101.compute(7.0 if dist.get_rank() == slow else 2.0)
        dist.all_reduce(torch.ones(4))

    trace = recorded(program, size)
    rows = rank_times(trace, waits(trace))
    for row in rows:
        assert row.computing + row.waiting == pytest.approx(trace.makespan)
        assert row.computing == (7.0 if row.rank == slow else 2.0)
        assert row.waited_for == ({} if row.rank == slow else {slow: 5.0})
    (call,) = slowest_calls(waits(trace))
    assert call.kind == "all_reduce" and call.waits == size and call.last == {slow: size - 1}
    assert call.seconds == pytest.approx(sum(row.waiting for row in rows))
    assert call.longest == pytest.approx(max(row.waiting for row in rows))
    assert call.where.startswith(f"{__file__}:")


def test_a_receive_waits_for_its_sender_and_then_for_the_data():
    def program():
        if dist.get_rank() == 0:
            p101.compute(3.0)
            dist.send(torch.ones(2), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(2), 0)
            dist.isend(torch.ones(3), 2).wait()
        else:
            work = dist.irecv(torch.empty(3), 1)
            p101.compute(1.0)
            work.wait()

    trace = recorded(program, 3)
    found = {
        (wait.rank, wait.kind): (wait.end - wait.start, wait.last, wait.late)
        for wait in waits(trace)
    }
    assert found[1, "recv"] == (4.0, 0, 3.0)
    # from 1.0, when it began to wait, to 4.0, when rank 1 sent, and on to 5.0
    assert found[2, "recv"] == (4.0, 1, 3.0)
    assert found[0, "send"] == (1.0, 1, 0.0)
    links = [(link[:4], link.seconds) for link in slowest_links(trace)]
    assert links == [((0, 1, 1, 8), 1.0), ((1, 2, 1, 12), 1.0)]


def test_only_the_root_of_a_broadcast_is_waited_for():
    def program():
        p101.compute(float(dist.get_rank()))
        dist.broadcast(torch.ones(1), 0)

    trace = recorded(program, 3)
    assert all(wait.last in (0, None) and wait.late == 0.0 for wait in waits(trace))


def test_pictures_show_compute_between_the_waits():
    def program():
        p101.compute(2.0)
        dist.all_reduce(torch.ones(1))
        p101.compute(3.0)
        dist.barrier()

    drawn = with_compute(recorded(program, 2))
    for rank in (0, 1):
        spans = [e for e in drawn.spans() if e.rank == rank]
        assert [e.end - e.start for e in spans if e.name == "compute"] == [2.0, 3.0]
        assert [e.name for e in spans if e.waiting] == ["all_reduce", "barrier"]


def test_a_call_that_never_ended_is_a_wait():
    def program():
        if dist.get_rank() == 0:
            p101.compute(1.0)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
        dist.recv(torch.ones(1), 0)

    kinds = {wait.rank: wait.kind for wait in waits(recorded(program, 3, fails=True))}
    assert kinds.get(1) == "all_reduce"


def test_a_script_on_real_ranks_is_measured_from_its_first_call():
    def program():
        if dist.get_rank() < 2:
            p101.compute(3.0 + dist.get_rank())  # as long as it imports torch
            dist.all_reduce(
                torch.ones(1), group=dist.new_group([0, 1], use_local_synchronization=True)
            )

    sim = recorded(program, 3)
    events = [event for event in sim.events if event.rank < 2]  # the record of rank 2 is lost
    trace = Trace(events, 3, "gloo")
    rows = rank_times(trace, waits(trace))
    assert [row.recorded for row in rows] == [True, True, False]
    assert [row.computing for row in rows[:2]] == [0.0, 1.0]
    (first,) = with_compute(trace).spans("compute")
    assert (first.rank, first.start, first.end) == (1, 3.0, 4.0)
    assert " s from the first call, 3 s after the script's start" in heading(trace)
    table = tables(trace)[0]
    assert set(table.rows[2][1:]) == {"–"} and "the record of rank 2 is lost" in table.note


def test_on_gloo_waits_are_seen_where_the_program_is_blocked():
    def program():
        recorder().record_waits = True
        rank = dist.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        dist.barrier()
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            time.sleep(0.3)
        loss.backward()  # DDP waits at its end, in C++
        if rank == 0:
            time.sleep(0.3)
        dist.monitored_barrier()
        if rank == 1:
            time.sleep(0.3)
        dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.3)  # the work is done by then, and nobody waits
        work.wait()

    trace = p101.launch(program, world_size=2, trace=True).trace
    waited = waits(trace)
    slept = Counter()
    for w in waited:
        slept[w.rank, w.kind] += w.end - w.start
    assert slept[0, "all_reduce"] > 0.25 > slept[1, "all_reduce"]
    assert min(slept[1, "barrier"], slept[0, "new_group"]) > 0.25
    assert "loss.backward()" in shown(
        next(w.where for w in waited if w.kind == "all_reduce" and w.end - w.start > 0.25)
    )
    late = [row.waited_for for row in rank_times(trace, waited)]
    assert late[0][1] > 0.25 and late[1][0] > 0.25
