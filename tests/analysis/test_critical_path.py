"""The critical path covers the run without a gap.

On sim, its messages and bytes are those that the closed forms give.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.cost.closed_forms import FORMS, closed_form
from parallel101.laboratory.analysis.critical_path import CriticalPath, critical_path
from parallel101.laboratory.analysis.run_window import window
from parallel101.laboratory.record.events import Event, EventGroup
from parallel101.laboratory.record.trace import Trace
from tests.collectives.cases import ROOTED
from tests.sim.programs import run
from tests.sim.programs import trace as traced
from tests.viz.drawn import span

ALGORITHMS = [(operation, name) for operation, forms in FORMS.items() for name in forms]


def covered(trace: Trace) -> CriticalPath:
    """The path, if it covers the record from its first start to its last end without a gap."""
    path = critical_path(trace)
    ends = [min(e.start for e in trace.events), *(s.end for s in path.segments)]
    assert [s.start for s in path.segments] == ends[:-1] and ends[-1] == max(
        e.end for e in trace.events
    )
    return path


def array_bytes(name: str, p: int) -> int:
    return 1_500_000 // p * p if name == "pipelined_chain" else 3 * p


def run_all(rank: int) -> None:
    p = dist.get_world_size()
    for operation, name in ALGORITHMS:
        function = collectives.fixed(operation, vars(collectives))[name]
        x = torch.ones(
            array_bytes(name, p) // (p if operation in ("gather", "all_gather") else 1),
            dtype=torch.uint8,
        )
        dist.barrier()
        with p101.span(f"{operation} {name}"):
            function() if operation == "barrier" else function(
                x, p - 1
            ) if operation in ROOTED else function(x)


@pytest.mark.parametrize("p", [4, 7])
@pytest.mark.parametrize("unit", ["steps", "bytes"])
def test_every_algorithm_on_sim(p, unit):
    network = p101.Network(1.0, math.inf) if unit == "steps" else p101.Network(0.0, 1.0)
    trace = traced(run(run_all, p, network))
    for operation, name in ALGORITHMS:
        spans = trace.spans(f"{operation} {name}")
        part = window(trace, min(s.start for s in spans), max(s.end for s in spans))
        part = Trace([e for e in part.events if e.kind in ("send", "recv")], p, "sim")
        path, cost = covered(part), closed_form(operation, name, p, array_bytes(name, p))
        assert {s.kind for s in path.segments} == {"message"}, (operation, name)
        assert (
            (path.messages if unit == "steps" else path.nbytes)
            == part.makespan
            == (cost.steps if unit == "steps" else cost.path)
        )


def late_rank() -> None:
    rank = dist.get_rank()
    with p101.span("forward"):
        p101.compute(5.0 if rank == 2 else 1.0)
    p101.all_reduce(torch.ones(4), algorithm="ring")
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        p101.compute(2.0)
        with p101.span("optimizer"):
            p101.compute(3.0)


def test_compute_collectives_and_links_on_a_late_rank():
    network = p101.Network(1.0, math.inf)
    launched = p101.launch(late_rank, world_size=4, backend="sim", network=network)
    path = covered(launched.trace)
    assert [(s.kind, s.end - s.start) for s in path.segments if s.kind != "message"] == [
        ("compute", 5.0),
        ("all_reduce", 6.0),
        ("between calls", 2.0),
        ("compute", 3.0),
    ]
    assert path.segments[0].label == "rank 2: forward"
    assert path.messages == 6 == path.seconds("message")
    said = "6 messages with 24 B take 6 s, compute 8 s, all_reduce 6 s, between calls 2 s"
    assert str(path) == said
    svg = launched.timeline(critical_path=True).svg()
    assert "On the critical path: 6 messages with 24 B take 6 s" in svg
    assert svg.count('class="number"') == 6
    assert 'class="number"' not in launched.timeline().svg()


def test_on_a_congested_ring_messages_wait_for_links():
    network = p101.Network.ring(latency=1.0, bandwidth=1.0)
    trace = traced(run(lambda _: p101.all_gather(torch.ones(1), algorithm="direct"), 8, network))
    assert covered(trace).seconds() == pytest.approx(trace.makespan)


def message(seq, src, dst, sent, received) -> list[Event]:
    """Both sides of a message, each with its start and end."""
    group, rest = EventGroup("world", (0, 1, 2), None), (seq, (2,), "float32")
    sides = (src, "send", dst, sent), (dst, "recv", src, received)
    return [
        Event(rank, kind, peer, 0, 8, start, end, "train.py:9", start, group, *rest)
        for rank, kind, peer, (start, end) in sides
    ]


def test_on_a_measured_clock_a_wait_that_returned_at_once_is_not_on_the_path():
    """Rank 1 posts a receive and a send, and waits for the receive first.

    The send had ended long before.
    """
    events = (
        message(0, 0, 1, (4.0, 5.0), (0.0, 5.0))
        + message(0, 1, 2, (0.0, 5.01), (0.5, 1.0))
        + message(1, 1, 0, (5.5, 6.0), (5.0, 6.0))
    )
    path = covered(Trace([*events, span(0, "forward", 0.0, 4.0)], 3, "gloo"))
    assert [(s.kind, s.rank, s.peer) for s in path.segments] == [
        ("compute", 0, None),
        ("message", 0, 1),
        ("between calls", 1, None),
        ("message", 1, 0),
    ]


def test_a_message_behind_compute_is_not_on_the_path():
    """It was posted before the span and arrived while the rank computed."""
    events = [
        *message(0, 0, 1, (0.0, 3.0), (0.0, 3.0)),
        span(1, "backward", 1.0, 6.0),
        span(1, "forward", 0.0, 1.0),
    ]
    path = covered(Trace(events, 2, "sim"))
    assert [s.label for s in path.segments] == ["rank 1: forward", "rank 1: backward"]
    waited = [*message(0, 0, 1, (0.0, 3.0), (0.0, 3.0)), span(1, "step", 0.0, 6.0)]
    kinds = [(s.kind, s.end) for s in covered(Trace(waited, 2, "sim")).segments]
    assert kinds == [("message", 3.0), ("compute", 6.0)]


def test_an_empty_record():
    assert str(critical_path(Trace([], 2, "gloo"))) == "nothing"


def test_real_ranks():
    trace = p101.launch(
        lambda: p101.all_reduce(torch.ones(1000), algorithm="ring"), world_size=3, trace=True
    ).trace
    path = covered(trace)
    assert path.messages >= 1 and path.seconds() == pytest.approx(trace.makespan)
