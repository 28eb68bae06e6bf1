"""One rank that stands for many: the same times as with all of them, or an error in words."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.collectives import all_gather, all_reduce
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.laboratory.sim.network import Network
from parallel101.spans import recorder
from parallel101.trainers.layout import Axes

from .programs import run, trace

SIZES = {"pp": 2, "dp": 4, "tp": 2}
NODES = Network.two_level(4, bandwidth=200e9, rails=4)


def step(sizes, calls):
    """Stages that arrive at unlike times, collectives, and a message to the next stage."""
    axes = Axes(None, sizes)
    stage, x = axes.here["pp"], torch.empty(240_000, device="meta")
    p101.compute(1e-3 * (1 + stage))
    for names, algorithm in calls:
        p101.compute(1e-5)
        all_reduce(x, group=axes.along(names), algorithm=algorithm)
    line = axes.along(["pp"]).ranks
    if stage == 0:
        dist.isend(x, line[1]).wait()
    elif stage == 1:
        dist.irecv(x, line[0]).wait()
    numbers = torch.tensor([1.0, 2.0])
    assert all_gather(numbers, group=axes.along(sizes)).tolist() == [1.0, 2.0] * axes.members.size
    return recorder().now()


def both(program, sizes, network, *args):
    """The latest end of a run with all ranks, and of one with those that stand for others."""
    alike = MirroredAxes(sizes, tuple(axis for axis in sizes if axis != "pp"))
    full, few = (
        run(lambda rank: program(sizes, *args), alike.world_size, network, mirrors=mirrors).results
        for mirrors in (None, alike)
    )
    assert len(few) == sizes["pp"]
    return max(full), max(few)


@pytest.mark.parametrize("sizes", [SIZES, {"dp": 3, "pp": 4, "tp": 2}], ids=["inner", "outer"])
def test_a_switch_exactly(sizes):
    calls = [(("tp",), "direct"), (("dp",), "ring"), (("dp", "tp"), "direct")]
    full, few = both(step, sizes, Network(), calls)
    assert few == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("tp", [2, 4])
def test_nodes_with_a_rail_for_each_rank_exactly(tp):
    sizes = {"pp": 2, "dp": 8 // tp, "tp": tp}  # tp 2: some dp neighbours are in the same node
    full, few = both(step, sizes, NODES, [(("tp",), "direct"), (("dp",), "direct")])
    assert few == pytest.approx(full, rel=1e-12)


def test_ranks_that_share_a_rail_take_turns():
    shared = Network.two_level(4, bandwidth=50e9, rails=1)
    full, few = both(step, SIZES, shared, [(("dp",), "ring")])
    assert few != full
    assert few == pytest.approx(full, rel=0.1)


def test_messages_posted_at_once_are_recorded_as_with_all_ranks():
    sizes, sends, calls = {"pp": 2, "dp": 4}, [], [(("dp",), "direct")]
    for mirrors in (None, MirroredAxes(sizes, ("dp",))):
        events = trace(run(lambda rank: step(sizes, calls), 8, mirrors=mirrors)).events
        sends.append([e for e in events if (e.kind, e.rank, e.nbytes) == ("send", 0, 240_000)])
    times = [[(e.peer, e.nbytes, e.shape, e.seq) for e in of] for of in sends]
    assert times[0] == times[1] and len(times[0]) >= 6
    for field in ("posted", "start", "end"):
        full, few = ([getattr(e, field) for e in of] for of in sends)
        assert few == pytest.approx(full, rel=1e-12)


def collectives_of_torch(sizes):
    x, rank = torch.ones(3), dist.get_rank()
    dist.all_reduce(x)
    rows = torch.empty(dist.get_world_size())
    dist.all_gather_single(rows, torch.tensor([float(rank)]))
    group = dist.new_group([rank, rank + 1], use_local_synchronization=True)  # one has no thread
    dist.barrier(group)
    return x.tolist(), rows.tolist()


def test_collectives_of_torch_count_each_rank_for_all_that_it_stands_for():
    mirrors = MirroredAxes(SIZES, ("dp", "tp"))
    result = run(lambda rank: collectives_of_torch(SIZES), mirrors.world_size, mirrors=mirrors)
    assert result.results == [([16.0] * 3, [0.0] * 8 + [8.0] * 8)] * 2


def large(sizes):
    axes = Axes(None, sizes)
    axes.along(["dp"])
    return all_gather(torch.ones(1), group=axes.along(sizes), algorithm="bruck").sum().item()


def test_16384_ranks_in_a_second():
    sizes = {"pp": 4, "dp": 512, "tp": 8}
    mirrors = MirroredAxes(sizes, ("dp", "tp"))
    assert len(mirrors.present) == 4
    began = time.process_time()
    assert mirrors.router(NODES)(0, 8).bandwidth == 50e9
    assert time.process_time() - began < 1
    assert p101.launch(large, sizes, backend="sim", mirrors=mirrors).results == [16384.0] * 4


def test_present_ranks_and_those_for_which_they_stand():
    mirrors = MirroredAxes({"dp": 3, "pp": 2, "tp": 2}, ("dp", "tp"))
    assert mirrors.present == [0, 2]
    stands = [mirrors.representative(rank) for rank in range(mirrors.world_size)]
    assert stands == [0, 0, 2, 2] * 3


def tree(sizes):
    all_reduce(torch.ones(8, device="meta"), group=Axes(None, sizes).along(["dp"]))


def sums_numbers(sizes):
    all_reduce(torch.ones(8), group=Axes(None, sizes).along(["dp"]), algorithm="direct")


def differs(sizes):
    dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (differs, "the ranks use different reductions: sum and max"),
        (tree, "waits forever.*trees and doubling need all ranks"),
        (sums_numbers, "and numbers only in operations.*Use the meta"),
    ],
)
def test_what_is_not_the_same_at_all_positions_is_refused(program, words):
    mirrors = MirroredAxes(SIZES, ("dp", "tp"))
    with pytest.raises(MisuseError, match=f"(?s){words}"):
        run(lambda rank: program(SIZES), mirrors.world_size, mirrors=mirrors)


def test_arguments_are_checked_before_a_rank_starts():
    mirrors = MirroredAxes(SIZES, ("dp",))
    with pytest.raises(ValueError, match="no axis 'cp'"):
        MirroredAxes(SIZES, ("cp",))
    with pytest.raises(ValueError, match="rules='gloo' only"):
        p101.launch(print, backend="sim", rules="nccl", mirrors=mirrors)
    with pytest.raises(ValueError, match=r"world_size is 4.*has 16 ranks"):
        p101.launch(print, backend="sim", world_size=4, mirrors=mirrors)
    with pytest.raises(TypeError, match="must be a MirroredAxes"):
        p101.launch(print, backend="sim", mirrors=SIZES)
    with pytest.raises(ValueError, match="expected a switch"):
        p101.launch(print, backend="sim", network=Network.torus((2, 4, 2)), mirrors=mirrors)
    assert math.isinf(mirrors.router(Network(bandwidth=math.inf))(0, 2).bandwidth)
