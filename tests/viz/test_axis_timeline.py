"""Which axis communicates when: bytes and messages are those of the record, each in the panel
of its axis and at its time.
"""

from __future__ import annotations

import functools
from html import unescape

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.analysis.traffic import axis_traffic
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.axis_timeline import LEFT, RIGHT, TICK, axes_scene
from tests.record.test_rank_files import window
from tests.viz.drawn import titled

BYTES = {"tp": 64, "dp": 4096}  # of a message
doubling = functools.partial(p101.all_reduce, algorithm="recursive_doubling")
NETWORK = p101.Network(latency=0.25, bandwidth=float("inf"))


def two_steps(own):
    """Twice, on a 2 × 2 mesh: a forward with two all-reduces over tp; a message along pp; an
    all-reduce over dp; a barrier of all ranks.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pipe = dist.new_group([0, 1], group_desc="mesh_pp")
    for _ in range(2):
        with p101.span("step"):
            with p101.span("forward", microbatch=0):
                for _ in range(2):
                    p101.compute(1.0)
                    doubling(torch.ones(BYTES["tp"] // 4), group=mesh["tp"])
            if dist.get_rank() == 0:
                dist.send(torch.ones(2), 1, pipe)
            elif dist.get_rank() == 1:
                dist.recv(torch.empty(2), 0, pipe)
            gradient = torch.ones(BYTES["dp"] // 4)
            if own:
                doubling(gradient, group=mesh["dp"])
            else:
                dist.all_reduce(gradient, group=mesh["dp"].get_group())
            p101.barrier()


@functools.cache
def record(own=True) -> Trace:
    return p101.launch(two_steps, own, world_size=4, backend="sim", network=NETWORK).trace


def counted(trace, within=None) -> dict:
    """By axis and rank: bytes and messages sent."""
    _, traffic = axis_traffic(trace, within)
    return {of.axis: [(of.sent(rank), of.count(rank)) for rank in range(4)] for of in traffic}


@pytest.mark.parametrize("own", [True, False], ids=["our collectives", "torch's"])
def test_bytes_and_messages_are_counted_in_their_axis(own):
    trace, found = record(own), counted(record(own), "step")
    assert list(found) == ["dp", "pp", "tp", None], "the usual order, and last what has no axis"
    assert found["tp"] == [(2 * BYTES["tp"], 2)] * 4
    assert found["dp"] == [(BYTES["dp"], 1)] * 4
    assert found["pp"] == [(8, 1), (0, 0), (0, 0), (0, 0)]
    # the axes together are the record, and the last of two equal steps is half of it
    for times, within in ((1, None), (2, "step")) if own else ():
        sums = [[*map(sum, zip(*of_rank))] for of_rank in zip(*counted(trace, within).values())]
        assert [times * nbytes for nbytes, _ in sums] == trace.bytes_sent
        assert [times * count for _, count in sums] == trace.messages_sent
    # the numbers of a record of the last events are of the whole run
    for limit in (4, 12):
        part = window(trace, limit)
        assert 0 < len(part.events) < len(trace.events)
        assert counted(part) == counted(trace)
        assert "sent in the whole run" in axes_scene(part).svg()
        # of one step, they are what the record has of it
        assert "whole run" not in axes_scene(trace).svg() + axes_scene(part, "step").svg()


def test_messages_are_drawn_at_their_time_in_the_panel_of_their_axis():
    window, traffic = axis_traffic(record(), "step")
    scene = axes_scene(record(), "step")
    scale = (RIGHT - LEFT) / (window.end - window.begin)
    starts = {
        (f"{of.axis}, rank {rank}", word): sorted(m.start for m in of.messages if side(m) == rank)
        for of in traffic
        for rank in range(4)
        for word, side in (("sent", lambda m: m.src), ("received", lambda m: m.dst))
        if of.axis
    }
    assert starts["pp, rank 1", "received"] and not starts["pp, rank 1", "sent"]
    for (name, word), times in starts.items():
        drawn = [float(bar.get("x")) for bar in titled(scene, f"{name}: {len(times)} {word}")]
        assert drawn == pytest.approx([LEFT + (t - window.begin) * scale for t in times], abs=0.1)


def test_a_single_message_is_a_tick_that_can_be_seen():
    message = record().messages()[0]
    later = message.recv._replace(start=1000.0, posted=1000.0, end=1000.0)
    scene = axes_scene(Trace([message.send, message.recv, later], 4, "sim"))
    assert [bar.get("width") for bar in titled(scene, ": 1 ")] == [f"{TICK:g}"] * 2


def test_words_for_readers_who_do_not_see_it():
    said = axes_scene(record(), "step").description
    assert "pp: bytes and messages sent by rank: 8 B in 1, 0 B in 0, 0 B in 0, 0 B in 0." in said
    torchs, own = (unescape(axes_scene(record(of)).svg()) for of in (False, True))
    assert "A collective of torch's own counts as one message." in torchs
    assert "torch's own" not in own
