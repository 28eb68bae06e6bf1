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
from tests.ranks.faults import wait_for


def everything():
    """On rank 0 of three: each kind of call, and what is recorded of it."""
    rank, x = dist.get_rank(), torch.ones(6)
    right, left = (rank + 1) % 3, (rank - 1) % 3
    for values in (torch.full((5,), float(rank)), torch.ones(10_000)):
        inbox = torch.empty_like(values)
        if dist.get_backend() == "nccl":  # where both sends would wait for each other
            batch = [dist.P2POp(dist.isend, values, right), dist.P2POp(dist.irecv, inbox, left)]
            wait_for(dist.batch_isend_irecv(batch))
            continue
        work = aliased_isend(values, right)
        dist.recv(inbox, left)
        work.wait()
    with p101.span("forward", microbatch=3):
        dist.broadcast(x, 1)
    p101.compute(5.0)  # virtual seconds: it does nothing on a real rank
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.reduce(x, 2)
    dist.all_gather([torch.empty(6) for _ in range(3)], x)
    dist.all_gather_into_tensor(torch.empty(18), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, by a function around it
        dist.reduce_scatter_tensor(torch.empty(2), x)
    dist.all_to_all_single(torch.empty(6), x)
    parts = [torch.empty(6) for _ in range(3)] if rank == 0 else None
    dist.gather(x, parts, 0)
    dist.scatter(x, parts, 0)
    if dist.get_backend() != "nccl":
        dist.monitored_barrier()
    dist.barrier()
    pair = dist.new_group([2, 0])
    if rank in (0, 2):
        dist.all_reduce(torch.ones(1), group=pair)
    return inbox


CALLS = [  # rank 0's: kind, bytes, peer, name
    *[("send", n, 1, None) for n in (20, 40_000)],
    *[("recv", n, 2, None) for n in (20, 40_000)],
    ("broadcast", 24, 1, None),
    ("span", 0, None, "forward"),
    ("all_reduce", 24, None, "max"),
    ("reduce", 24, 2, "sum"),
    *[("all_gather", 72, None, None)] * 2,
    ("reduce_scatter", 24, None, "sum"),
    ("all_to_all", 24, None, None),
    ("gather", 72, 0, None),
    ("scatter", 72, 0, None),
    *[("barrier", 0, None, None)] * 2,
    ("all_reduce", 4, None, "sum"),
]


@pytest.mark.parametrize("world", ["gloo", "sim", pytest.param("nccl", marks=pytest.mark.nccl(3))])
def test_every_call_is_recorded_once_with_its_ends_its_bytes_and_its_line(world):
    run = p101.launch(everything, world_size=3, backend=world, trace="payload")
    trace = run.trace
    own = [e for e in trace.events if e.rank == 0]
    expected = CALLS if world != "nccl" else [*CALLS[:-2], CALLS[-1]]
    key = lambda call: (call[0], str(call))  # noqa: E731
    assert sorted(((e.kind, e.nbytes, e.peer, e.name) for e in own), key=key) == sorted(
        expected, key=key
    )
    assert trace.bytes_sent == trace.bytes_received == [40_020] * 3, "of messages only"
    assert trace.messages_sent == [2] * 3 and not trace.unfinished
    calls = ["batch_isend_irecv("] * 2 if world == "nccl" else ["aliased_isend(", "dist.recv"]
    places = tuple(line_of(everything, call) for call in calls)
    for message in trace.messages():
        assert message.dst == (message.src + 1) % 3
        assert (message.send.where, message.recv.where) == places
        assert message.send.seq == message.recv.seq and message.send.dtype == "float32"
        assert message.send.shape == message.recv.shape
        small = message.send.shape == (5,)
        assert message.payload == ([float(message.src)] * 5 if small else None)
        assert 0 <= message.start <= message.end <= trace.makespan
    (span,) = [e for e in own if e.kind == "span"]
    (inside,) = [e for e in own if e.kind == "broadcast"]
    assert span.args == {"microbatch": 3}
    assert span.start <= inside.start <= inside.end <= span.end
    (scatter,) = [e for e in own if e.kind == "reduce_scatter"]
    assert scatter.where == line_of(everything, "reduce_scatter_tensor")
    assert {e.group.ranks for e in own if e.nbytes == 4} == {(0, 2)}
    assert (trace.makespan > 5.0) == (world == "sim")


def test_unrecorded_runs_have_no_trace_and_the_same_results():
    plain, recorded = (
        p101.launch(everything, world_size=3, trace=trace) for trace in (False, True)
    )
    assert plain.trace is None
    assert all(torch.equal(a, b) for a, b in zip(plain.results, recorded.results, strict=True))
    assert all(m.payload is None for m in recorded.trace.messages())
    with pytest.raises(ValueError, match="trace=True"):
        plain.animate()
    with p101.span("outside a run"):
        pass  # outside a recorded run it does nothing


def dropped_send(rank):
    work = dist.isend(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
    dist.barrier()
    del work


def test_works_that_nobody_waits_for_have_ended_if_all_ranks_have_done_their_part(backend):
    def program():
        dist.all_reduce(torch.ones(4), async_op=True)
        dist.barrier()

    trace = p101.launch(program, world_size=2, backend=backend, trace=True).trace
    kinds = [e.kind for e in trace.events]
    assert sorted(kinds) == ["all_reduce"] * 2 + ["barrier"] * 2 and not trace.unfinished
    if backend == "gloo":
        with pytest.warns(RuntimeWarning, match="rank 0 does not wait for a send"):
            trace = p101.launch(
                lambda: dropped_send(dist.get_rank()), world_size=2, trace=True
            ).trace
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


def runs_for_ever():
    with p101.span("inner"):
        dist.barrier()
    sent = dist.get_rank() and dist.isend(torch.ones(1), 0)
    while sent:
        pass


def receives_too_much():
    peer = 1 - dist.get_rank()
    dist.all_reduce(torch.ones(2))
    work = dist.isend(torch.ones(3), peer, tag=5)
    dist.recv(torch.empty(1), peer)
    work.wait()


def never_waits():
    work = dist.isend(torch.ones(4), 1) if dist.get_rank() == 0 else dist.irecv(torch.ones(4), 0)
    dist.barrier()
    del work
    dist.barrier()


IN_FLIGHT = [(r, kind, 1 - r, n) for r in (0, 1) for kind, n in (("recv", 4), ("send", 12))]
FAILED = {  # a program: its error, what had ended, and what had not (rank, kind, peer, bytes)
    runs_for_ever: (
        p101.LaunchTimeout,
        ["barrier", "barrier", "span", "span"],
        [(1, "send", 0, 4)],
    ),
    receives_too_much: (p101.DeadlockError, ["all_reduce", "all_reduce"], IN_FLIGHT),
    never_waits: (p101.MisuseError, ["barrier"] * 4, [(0, "send", 1, 16), (1, "recv", 0, 16)]),
}


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("program", FAILED, ids=lambda program: program.__name__)
def test_a_failed_recorded_run_keeps_its_record_and_what_had_not_ended(tmp_path, program, backend):
    kind, ended, unfinished = FAILED[program]
    timeout = 1.0 if kind is p101.LaunchTimeout else 60.0
    error = fails(kind, program, world_size=2, backend=backend, trace=True, timeout=timeout)
    trace = error.trace
    assert sorted(e.kind for e in trace.events if e.kind not in ("send", "recv")) == ended
    if backend == "gloo" or kind is not p101.MisuseError:  # on sim, the message itself arrives
        assert sorted((e.rank, e.kind, e.peer, e.nbytes) for e in trace.unfinished) == unfinished
        assert trace.messages_sent == [0, 0], "what did not end is not counted"
    assert all(0 <= e.start <= e.end for e in trace.unfinished)
    assert all(e.where == line_of(program, f"i{e.kind}(") for e in trace.unfinished if e.tag)
    trace.save(tmp_path / "trace.json")
    assert p101.Trace.load(tmp_path / "trace.json").unfinished == trace.unfinished
    trace.to_chrome(tmp_path / "chrome.json")
    count = (tmp_path / "chrome.json").read_text().count("never ended")
    assert count == len(trace.unfinished)


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
