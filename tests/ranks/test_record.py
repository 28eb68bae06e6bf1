"""The record of a run on real ranks has every message and collective, with both ends, sizes,
lines and, if asked for, values.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import isend as aliased_isend

import parallel101 as p101
from tests.ranks.failing import fails, line_of


def ring():
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    x, inbox = torch.full((5,), float(rank)), torch.empty(5)
    for _ in range(3):
        if dist.get_backend() == "nccl":  # where both sends would wait for each other
            batch = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, inbox, left)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            continue
        work = aliased_isend(x, right)
        dist.recv(inbox, left)
        work.wait()
    return inbox


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_message_is_recorded_with_both_ends(backend, world_size):
    trace = p101.launch(lambda: ring(), world_size=world_size, backend=backend, trace=True).trace
    assert trace.bytes_sent == trace.bytes_received == [3 * 5 * 4] * world_size
    assert trace.messages_sent == [3] * world_size
    calls = ["batch_isend_irecv("] * 2 if backend == "nccl" else ["aliased_isend(", "dist.recv"]
    at_send, at_recv = (line_of(ring, call) for call in calls)
    for message in trace.messages():
        assert message.dst == (message.src + 1) % world_size
        assert (message.send.where, message.recv.where) == (at_send, at_recv)
        assert message.send.shape == message.recv.shape == (5,)
        assert message.send.dtype == "float32"
        assert 0 <= message.start <= message.end <= trace.makespan
    for rank in range(world_size):
        assert [e.seq for e in trace.events if e.rank == rank and e.kind == "recv"] == [1, 2, 3]


def test_unrecorded_runs_have_no_trace_and_the_same_results():
    plain, recorded = (
        p101.launch(lambda: ring(), world_size=3, trace=trace) for trace in (False, True)
    )
    assert plain.trace is None
    assert all(torch.equal(a, b) for a, b in zip(plain.results, recorded.results, strict=True))
    with pytest.raises(ValueError, match="trace=True"):
        plain.animate()


def test_collectives_of_torch_are_one_event_a_rank_with_their_payload():
    def program():
        n = dist.get_world_size()
        x = torch.ones(6)
        dist.broadcast(x, 1)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.reduce(x, 2)
        dist.all_gather([torch.empty(6) for _ in range(n)], x)
        dist.all_gather_into_tensor(torch.empty(6 * n), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.all_to_all_single(torch.empty(6), x)
        parts = [torch.empty(6) for _ in range(n)] if dist.get_rank() == 0 else None
        dist.gather(x, parts, 0)
        dist.scatter(x, parts, 0)
        dist.barrier()

    trace = p101.launch(program, world_size=3, trace=True).trace
    mine = [(e.kind, e.nbytes, e.peer, e.name) for e in trace.events if e.rank == 0]
    assert mine == [
        ("broadcast", 24, 1, None),
        ("all_reduce", 24, None, "max"),
        ("reduce", 24, 2, "sum"),
        ("all_gather", 72, None, None),
        ("all_gather", 72, None, None),
        ("reduce_scatter", 24, None, "sum"),
        ("all_to_all", 24, None, None),
        ("gather", 72, 0, None),
        ("scatter", 72, 0, None),
        ("barrier", 0, None, None),
    ]
    assert trace.bytes_sent == [0, 0, 0], "only point-to-point messages count as bytes sent"


def test_spans_name_compute():
    def program():
        with p101.span("forward", microbatch=3):
            dist.all_reduce(torch.ones(1))
        p101.compute(5.0)  # virtual seconds: it does nothing on a real rank

    trace = p101.launch(program, world_size=2, trace=True).trace
    for rank in range(2):
        (span,) = [e for e in trace.spans("forward") if e.rank == rank]
        (inside,) = [e for e in trace.events if e.rank == rank and e.kind == "all_reduce"]
        assert span.args == {"microbatch": 3}
        assert span.start <= inside.start <= inside.end <= span.end
    assert trace.makespan < 5.0
    with p101.span("outside a run"):
        pass  # outside a recorded run it does nothing


def test_values_of_small_messages_are_recorded_on_request():
    def program():
        rank = dist.get_rank()
        for count in (3, 10_000):
            x = torch.arange(count)
            dist.recv(x, 0) if rank else dist.send(x, 1)

    messages = p101.launch(program, world_size=2, trace="payload").trace.messages()
    assert [m.payload for m in messages] == [[0, 1, 2], None]
    messages = p101.launch(program, world_size=2, trace=True).trace.messages()
    assert all(m.payload is None for m in messages)


def test_subgroups_are_named_with_their_ranks():
    def program():
        group = dist.new_group([2, 0])
        if dist.get_rank() in (0, 2):
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            dist.send(x, 2, group=group) if dist.get_rank() == 0 else dist.recv(x, 0, group=group)

    trace = p101.launch(program, world_size=3, trace=True).trace
    (message,) = trace.messages()
    assert (message.src, message.dst) == (0, 2)
    assert message.send.group == message.recv.group and message.send.group.ranks == (0, 2)
    assert {e.group.ranks for e in trace.events if e.kind == "all_reduce"} == {(0, 2)}


def unwaited(what: str) -> None:
    rank, x = dist.get_rank(), torch.ones(4)
    if what == "collective":
        dist.all_reduce(x, async_op=True)
    elif what == "message":
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        dist.barrier()
        del work
    elif rank == 0:
        work = dist.isend(x, 1)
        dist.barrier()
        del work
    else:
        dist.recv(x, 0)
        dist.barrier()
    dist.barrier()


def test_a_collective_that_nobody_waits_for_is_recorded(backend):
    trace = p101.launch(unwaited, "collective", world_size=2, backend=backend, trace=True).trace
    kinds = [e.kind for e in trace.events]
    assert sorted(kinds) == ["all_reduce"] * 2 + ["barrier"] * 2 and not trace.unfinished


def test_a_message_that_nobody_waits_for_is_unfinished():
    with pytest.raises(p101.MisuseError, match="rank 1 does not wait for a receive") as raised:
        p101.launch(unwaited, "message", world_size=2, trace=True)
    unfinished = [(e.kind, e.rank) for e in raised.value.trace.unfinished]
    assert sorted(unfinished) == [("recv", 1), ("send", 0)]


def test_a_send_that_nobody_waits_for_has_ended_if_its_receive_has():
    with pytest.warns(RuntimeWarning, match="rank 0 does not wait for a send"):
        trace = p101.launch(unwaited, "send", world_size=2, trace=True).trace
    assert not trace.unfinished and trace.messages_sent == [1, 0]
    (message,) = trace.messages()
    assert message.send.start <= message.send.end <= message.recv.end


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_recorded_values_of_a_collective_are_its_inputs(backend):
    def program():
        for _ in range(50):
            x = torch.full((4,), float(dist.get_rank() + 1))
            dist.all_reduce(x)
            dist.reduce(x.fill_(dist.get_rank() + 1), 0)

    events = p101.launch(program, world_size=2, backend=backend, trace="payload").trace.events
    assert len(events) == 200 and all(e.payload == [e.rank + 1.0] * 4 for e in events)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_run_that_timed_out_has_its_record(backend):
    def program():
        with p101.span("inner"):
            dist.barrier()
        if dist.get_rank() == 1:
            sent = dist.isend(torch.ones(1), 0)
            while sent:
                pass

    with pytest.raises(p101.LaunchTimeout) as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True, timeout=1)
    trace = raised.value.trace
    ended = [(rank, kind) for rank in (0, 1) for kind in ("barrier", "span")]
    assert sorted((e.rank, e.kind) for e in trace.events) == ended
    assert [(e.rank, e.kind, e.peer) for e in trace.unfinished] == [(1, "send", 0)]


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_calls_that_are_recorded_in_ways_of_their_own(backend):
    def program():
        dist.monitored_barrier()
        dist.all_to_all_single(torch.empty(2, 3), torch.ones(2, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, by a function around it
            dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4))

    trace = p101.launch(program, world_size=2, backend=backend, trace=True).trace
    kinds, shapes, places = zip(*((e.kind, e.shape, e.where) for e in trace.events if e.rank == 0))
    assert kinds == ("barrier", "all_to_all", "reduce_scatter") and not trace.unfinished
    assert shapes[1] == (2, 3), "of its input"
    assert places[2] == line_of(program, "reduce_scatter_tensor")


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
