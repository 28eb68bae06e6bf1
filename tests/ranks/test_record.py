"""The record of a real run: every message and collective, whoever sends it, with both ends, sizes, lines and (where asked) values."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import isend as aliased_isend

import parallel101 as p101


def ring():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, inbox = torch.full((5,), float(rank)), torch.empty(5)
    for _ in range(3):
        work = aliased_isend(x, (rank + 1) % n)
        dist.recv(inbox, (rank - 1) % n)
        work.wait()
    return inbox


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_message_is_there_with_both_its_ends(backend, world_size):
    trace = p101.launch(lambda: ring(), world_size=world_size, backend=backend, trace=True).trace
    assert trace.bytes_sent == trace.bytes_received == [3 * 5 * 4] * world_size
    assert trace.messages_sent == [3] * world_size
    lines, first = inspect.getsourcelines(ring)
    line = {kind: first + next(i for i, text in enumerate(lines) if kind in text) for kind in ("aliased_isend(", "dist.recv")}
    for message in trace.messages():
        assert message.dst == (message.src + 1) % world_size
        assert (message.send.where, message.recv.where) == (f"{__file__}:{line['aliased_isend(']}", f"{__file__}:{line['dist.recv']}")
        assert message.send.shape == message.recv.shape == (5,)
        assert message.send.dtype == "float32"
        assert 0 <= message.start <= message.end <= trace.makespan
    for rank in range(world_size):
        assert [e.seq for e in trace.events if e.rank == rank and e.kind == "recv"] == [1, 2, 3]


def test_unrecorded_runs_have_no_trace_and_the_same_results():
    plain, recorded = (p101.launch(lambda: ring(), world_size=3, trace=trace) for trace in (False, True))
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
        dist.gather(x, [torch.empty(6) for _ in range(n)] if dist.get_rank() == 0 else None, 0)
        dist.scatter(x, [torch.empty(6) for _ in range(n)] if dist.get_rank() == 0 else None, 0)
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
        p101.compute(5.0)  #  virtual seconds: nothing on a real rank

    trace = p101.launch(program, world_size=2, trace=True).trace
    for rank in range(2):
        (span,) = [e for e in trace.spans("forward") if e.rank == rank]
        (inside,) = [e for e in trace.events if e.rank == rank and e.kind == "all_reduce"]
        assert span.args == {"microbatch": 3}
        assert span.start <= inside.start <= inside.end <= span.end
    assert trace.makespan < 5.0
    with p101.span("outside a run"):
        pass  #  does nothing, and harms nothing


def test_values_are_kept_where_asked_and_few():
    def program():
        rank = dist.get_rank()
        for count in (3, 10_000):
            if rank == 0:
                dist.send(torch.arange(count), 1)
            else:
                dist.recv(torch.empty(count, dtype=torch.int64), 0)

    messages = p101.launch(program, world_size=2, trace="payload").trace.messages()
    assert [m.payload for m in messages] == [[0, 1, 2], None]
    assert all(m.payload is None for m in p101.launch(program, world_size=2, trace=True).trace.messages())


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
    assert sorted(trace.groups[message.send.group]) == [0, 2]
    assert trace.groups["world"] == [0, 1, 2]


def test_saved_and_loaded_is_the_same(tmp_path):
    trace = p101.launch(lambda: ring(), world_size=2, trace="payload").trace
    for name in ("trace.json", "trace.json.gz"):
        trace.save(tmp_path / name)
        loaded = p101.Trace.load(tmp_path / name)
        assert loaded.events == trace.events
        assert (loaded.world_size, loaded.backend, loaded.groups) == (2, "gloo", trace.groups)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a trace"):
        p101.Trace.load(tmp_path / "other.json")
    trace.to_chrome(tmp_path / "chrome.json")
    slices = [e for e in json.loads(Path(tmp_path / "chrome.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(trace.events)


MISUSES = {
    "different op": (lambda r: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if r else dist.ReduceOp.SUM), "different reductions"),
    "different collective": (lambda r: dist.all_reduce(torch.ones(2)) if r else dist.broadcast(torch.ones(2), 0), "different operations"),
    "different dtype": (lambda r: dist.all_reduce(torch.ones(2, dtype=torch.int32 if r else torch.float32)), "different dtypes"),
    "different shape": (lambda r: dist.all_reduce(torch.ones((2, 3) if r else (3, 2))), "different shapes"),
    "different root": (lambda r: dist.broadcast(torch.ones(2), r), "different roots"),
    "short send": (lambda r: dist.send(torch.ones(2), 1) if r == 0 else dist.recv(torch.ones(4), 0), "shorter than the receive"),
    "long send": (lambda r: dist.send(torch.ones(4), 1) if r == 0 else dist.recv(torch.ones(2), 0), "longer than the receive"),
    "message dtype": (
        lambda r: dist.send(torch.ones(2), 1) if r == 0 else dist.recv(torch.ones(2, dtype=torch.int32), 0),
        "different dtypes",
    ),
    "message shape": (lambda r: dist.send(torch.ones(6), 1) if r == 0 else dist.recv(torch.ones(2, 3), 0), "different shapes"),
    "strided collective": (lambda r: dist.all_reduce(torch.ones(4, 4)[:, r]), "strided"),
    "strided message": (lambda r: dist.send(torch.ones(4, 4)[:, 0], 1) if r == 0 else dist.recv(torch.ones(4), 0), "strided"),
}


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("name", list(MISUSES))
def test_a_checked_run_names_misuse(name, backend):
    call, said = MISUSES[name]
    with pytest.raises(p101.MisuseError, match=said) as raised:
        p101.launch(lambda: call(dist.get_rank()) if dist.get_rank() < 2 else None, world_size=2, backend=backend, trace=True)
    assert __file__ in str(raised.value)
    assert raised.value.rank in (0, 1)


UNEVEN = {  #  of three ranks; rank 1 and rank 2 disagree
    "equal shares": lambda r: (torch.ones(6 if r == 2 else 3), torch.ones(3)),
    "splits": lambda r: (torch.ones(3), torch.ones(3), [1, 1, 1], [1, 0, 2] if r == 1 else [1, 1, 1]),
    "rows": lambda r: (torch.ones(6, 2), torch.ones(6, 2), [2, 2, 2], [2, 1, 3] if r == 1 else [2, 2, 2]),
}


@pytest.mark.parametrize("case", list(UNEVEN))
def test_an_all_to_all_in_which_two_disagree(case):
    with pytest.raises(p101.MisuseError, match=r"rank \d gives rank \d \d+ bytes, and rank \d expects \d+\n") as raised:
        p101.launch(lambda: dist.all_to_all_single(*UNEVEN[case](dist.get_rank())), world_size=3, trace=True)
    assert raised.value.rank in (1, 2)
    assert __file__ in str(raised.value)


def test_an_uneven_all_to_all_is_no_misuse():
    def program():
        rank, n = dist.get_rank(), dist.get_world_size()
        take, give = [rank + other for other in range(n)], [rank + other for other in range(n)]
        out = torch.empty(sum(take), 2)
        dist.all_to_all_single(out, torch.ones(sum(give), 2) * rank, take, give)
        return out.sum().item()

    assert p101.launch(program, world_size=3, trace=True).results == [2 * sum(o * (r + o) for o in range(3)) for r in range(3)]


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("count", [4, 1 << 20])
def test_a_tensor_changed_while_it_is_being_sent(backend, count):
    def program():
        x = torch.ones(count)
        if dist.get_rank() == 0:
            work = dist.isend(x, 1)
            x.mul_(2)
            work.wait()
        else:
            dist.recv(x, 0)

    with pytest.raises(p101.MisuseError, match=r"rank 0 changed|changed") as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True)
    assert raised.value.rank == 0


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_another_part_of_the_same_memory_may_change(backend):
    def program():
        whole = torch.arange(8.0)
        mine, theirs = whole.chunk(2)
        work = dist.isend(mine, 1 - dist.get_rank())
        inbox = torch.empty(4)
        dist.recv(inbox, 1 - dist.get_rank())
        theirs.add_(inbox)
        work.wait()
        return whole.tolist()

    run = p101.launch(program, world_size=2, backend=backend, trace=True)
    assert run.results == [[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]] * 2


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("odd", [0, 2])
def test_requires_grad_that_differs_is_named(backend, odd):
    """Its backward would wait for ever for the ranks that have none."""

    def program():
        x = torch.ones(2, requires_grad=dist.get_rank() != odd)
        p101.all_reduce(p101.all_gather(torch.ones(2)))  #  the same on all: agreed
        y = p101.all_reduce(x)
        if y.requires_grad:
            y.sum().backward()

    with pytest.raises(p101.MisuseError, match="requires_grad is not the same") as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert raised.value.rank == odd
    assert "all_reduce" in str(raised.value)


def test_the_odd_one_out_is_named():
    def program():
        dist.all_reduce(torch.ones(3 if dist.get_rank() == 1 else 2))

    with pytest.raises(p101.MisuseError) as raised:
        p101.launch(program, world_size=4, trace=True)
    assert raised.value.rank == 1
