"""Schedules are data: complete and in order, as fast and as large as their papers say, and
torch's can be read, checked and timed.
"""

from __future__ import annotations

import itertools
import re

import pytest
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.stage import _PipelineStageBase

import parallel101 as p101

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
# (ranks, microbatches)
SHAPES = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 5), (4, 8), (4, 12), (5, 9), (8, 16)]


def built(name, p, m, chunks=2):
    if name == "interleaved":
        return p101.schedule(name, stages=p, microbatches=p * -(-m // p), chunks=chunks)
    return p101.schedule(name, stages=p, microbatches=m)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_run_under_all_rules(name):
    for (p, m), rules in itertools.product([*SHAPES, (4, 1), (5, 3)], ("gloo", "nccl")):
        schedule = built(name, p, m)
        schedule.check(rules)
        assert len(schedule.actions) == p
        assert p101.Schedule.from_csv(schedule.to_csv()) == schedule


# W ≤ min(F, B) and 2W ≤ F + B: the domain of the closed forms
FORWARD, INPUT, WEIGHT = 10.0, 12.0, 5.0
IDLE = {
    "gpipe": lambda p: (p - 1) * (FORWARD + INPUT + WEIGHT),
    "1f1b": lambda p: (p - 1) * (FORWARD + INPUT + WEIGHT),
    "interleaved": lambda p: (p - 1) * (FORWARD + INPUT + WEIGHT),
    "zb-h1": lambda p: (p - 1) * (FORWARD + INPUT - WEIGHT),
    "zb-h2": lambda p: (p - 1) * (FORWARD + INPUT - 2 * WEIGHT),
}


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_is_the_closed_form(name):
    """Zero Bubble, Table 2, with free communication; interleaved: a chunk's share of the time,
    and of the bubble.
    """
    for p, m in ((p, m) for p, m in SHAPES if m >= 2 * p - 1):
        chunks = 3 if name == "interleaved" and p > 1 else 1
        schedule = built(name, p, m, chunks)
        work = schedule.microbatches * (FORWARD + INPUT + WEIGHT)
        time = schedule.time(FORWARD / chunks, INPUT / chunks, WEIGHT / chunks)
        slots = [[slot for slot in time.slots if slot.rank == r] for r in range(p)]
        cost = max(max(s.end for s in of) - min(s.start for s in of) for of in slots)
        assert cost == pytest.approx(work + IDLE[name](p) / chunks)
        assert time.bubble_rate == pytest.approx(1 - work / cost)


def test_activations_held():
    p, m = 4, 12
    held = {name: built(name, p, m).time().peak_activations for name in NAMES}
    assert held == {
        "gpipe": [m] * p,
        "1f1b": [p - rank for rank in range(p)],
        "interleaved": [11, 9, 7, 5],
        "zb-h1": [p] * p,
        "zb-h2": [2 * p - 1] * p,
    }


# Zero Bubble's models: ranks, microbatches; milliseconds of F, B, W, communication; bubble rates of
# 1F1B, ZB-H1, ZB-H2
PUBLISHED = {
    "1.5 B, 24": (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    "1.5 B, 64": (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    "6.2 B, 24": (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    "6.2 B, 64": (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    "14.6 B, 48": (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    "28.3 B, 96": (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
}


@pytest.mark.parametrize("row", list(PUBLISHED))
def test_published_bubble_rates(row):
    """arXiv 2401.10241, the table of bubble rates, from the times measured for each model and
    number of microbatches.
    """
    p, m, (f, b, w, communication), rates = PUBLISHED[row]
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates):
        time = p101.schedule(name, stages=p, microbatches=m).time(
            f, b, w, communication=communication
        )
        assert time.bubble_rate == pytest.approx(rate, abs=1e-4), name


def test_costs_may_differ_between_stages():
    schedule = p101.schedule("gpipe", stages=2, microbatches=3)
    assert schedule.time([1.0, 3.0], 0.0, 0.0).makespan == 1 + 3 * 3
    assert schedule.time([1.0, 3.0], 0.0, 0.0, communication=5.0).makespan == 1 + 5 + 3 * 3 + 5
    for costs in ([1.0], [1.0, 2.0, 3.0], -1.0, [1.0, -1.0], float("inf")):
        with pytest.raises(p101.ScheduleError, match=r"forward=.*: expected seconds, 0 or more"):
            schedule.time(costs)
    with pytest.raises(p101.ScheduleError, match=r"communication=\[1, 2\]: expected one number"):
        schedule.time(communication=[1, 2])


class Mock(_PipelineStageBase):
    """What torch's schedules ask of a stage to make their lists."""

    def __init__(self, stages, ranks, index):
        self.submod, self.group, self.group_rank, self.has_backward = None, None, 0, True
        self.num_stages, self.group_size, self.stage_index = stages, ranks, index


Mock.__abstractmethods__ = frozenset()
TORCHS = {  # its stages on rank 0, microbatches
    "Interleaved1F1B": ([0, 4], 8),
    "LoopedBFS": ([0, 4], 8),
    "InterleavedZeroBubble": ([0, 4], 8),
    "ZBVZeroBubble": ([0, 7], 8),
    "DualPipeV": ([0, 7], 10),
}


def csv_of(name):
    """torch's lists of compute, and with its sends and receives."""
    stages, microbatches = TORCHS[name]
    schedule = getattr(torchs, f"Schedule{name}")(
        [Mock(8, 4, index) for index in stages], microbatches, loss_fn=lambda y, t: 0
    )
    order = {rank: list(schedule.pipeline_order[rank]) for rank in range(4)}
    lines = ([str(action or "") for action in order[rank]] for rank in range(4))
    idle = "\n".join(map(",".join, lines))
    placement = p101.Schedule.from_csv(idle).placement
    dense = {rank: [action for action in actions if action] for rank, actions in order.items()}
    full = torchs._add_send_recv(dense, stage_to_rank=placement.__getitem__, num_stages=8)
    return idle, "\n".join(",".join(map(str, full[rank])) for rank in range(4))


@pytest.mark.parametrize("name", list(TORCHS))
def test_torchs_schedules_are_read_checked_and_timed(name):
    compute, with_messages = (p101.Schedule.from_csv(text) for text in csv_of(name))
    assert compute.microbatches == TORCHS[name][1]
    assert set(compute.placement) == set(range(8))
    for schedule in (compute, with_messages):
        schedule.check("gloo")
        schedule.check("nccl")
    assert with_messages.time().makespan == compute.time().makespan, "messages that take no time"
    slow = [schedule.time(communication=1.0).makespan for schedule in (compute, with_messages)]
    assert slow == sorted(slow)
    if name == "ZBVZeroBubble":
        assert compute.time().bubble_rate == 0, "the point of it, where F = B = W"
    if name == "DualPipeV":
        assert any("OVERLAP_F_B" in action for actions in compute.actions for action in actions)


def test_fsdps_actions_are_left_out():
    text = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,,1F0,1B0,1REDUCE_GRAD,1RESHARD\n"
    assert p101.Schedule.from_csv(text).actions == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_our_interleaved_schedule_is_torchs():
    ours, theirs = built("interleaved", 4, 8), p101.Schedule.from_csv(csv_of("Interleaved1F1B")[0])
    assert ours.time(1, 2, 3, 0.5).makespan == theirs.time(1, 2, 3, 0.5).makespan
    assert ours.time().peak_activations == theirs.time().peak_activations


CYCLE = [  # pytorch issue 172668: stages 0 and 2 on rank 0, 1 and 3 on rank 1
    "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,"
    "2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1",
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,"
    "1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1",
]


def test_a_hang_that_others_met_is_found_before_it_happens():
    schedule = p101.Schedule.from_csv("\n".join(CYCLE))
    schedule.check("gloo")
    with pytest.raises(p101.ScheduleError) as error:
        schedule.check("nccl")
    assert "wait for each other forever under NCCL's rules" in str(error.value)
    for wait in ("rank 0's 0SEND_F1 waits for 1RECV_F1 of rank 1", "1SEND_F0 waits for 2RECV_F0"):
        assert wait in str(error.value)


WRONG = {  # what is wrong with two stages' lists, and the words that name it
    "missing backward": (["0F0,0F1,0B0", "1F0,1B0,1F1,1B1"], "0B1 is missing: stage 0 has"),
    "missing forward": (["0F0,0B0,0B1", "1F0,1B0,1F1,1B1"], "0F1 is missing: 2 microbatches"),
    "missing half": (["0F0,0I0", "1F0,1B0"], "0W0 is missing"),
    "missing stage": (["0F0,0B0", "2F0,2B0"], "1F0 is missing"),
    "twice": (["0F0,0F0,0B0", "1F0,1B0"], "0F0 appears twice: on rank 0"),
    "twice, whole and half": (["0F0,0B0,0W0", "1F0,1B0"], "appears twice: 0B0 and 0W0"),
    "a stage on two ranks": (["0F0,0B0,1F0", "1B0"], "stage 1 is on rank 0, and rank 1 has 1B0"),
    "too early": (["0B0,0F0", "1F0,1B0"], "rank 0: 0B0 comes too early: it needs 0F0"),
    "weights too early": (["0F0,0W0,0I0", "1F0,1B0"], "rank 0: 0W0 comes too early: it needs 0I0"),
    "a cycle of waits": (
        ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"],
        "rank 0's 0B0 waits for 1B0 of rank 1; rank 1's 1F1 waits for 0F1 of rank 0",
    ),
    "no receive": (["0F0,0SEND_F0,0RECV_B0,0B0", "1F0,1B0,1SEND_B0"], "1F0 needs 1RECV_F0, which"),
    "no send": (["0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"], "1RECV_F0 needs 0SEND_F0"),
    "nothing": ([""], "the schedule is empty"),
    "a rank without a stage": (["0F0,0B0", ""], "rank 1 has no stage"),
    "a message in an overlap": (
        ["0F0,(0SEND_F0;0F1)OVERLAP_F_B,0B0,0B1", "1F0,1B0,1F1,1B1"],
        "can overlap, and 0SEND_F0 is a message",
    ),
    "no action": (["0F0,0X0"], r"action '0X0': expected a stage, one of F, B, I, W"),
}


@pytest.mark.parametrize(("lists", "words"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_named(lists, words):
    with pytest.raises(p101.ScheduleError, match=re.escape(words)):
        p101.Schedule([[text for text in line.split(",") if text] for line in lists]).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "dualpipe"}, "schedule='dualpipe': expected one of 'gpipe'"),
        ({"stages": 0}, "stages=0: expected a whole number, 1 or more"),
        ({"microbatches": 2.0}, "microbatches=2.0: expected a whole number"),
        ({"chunks": 2}, "chunks=2: expected 1, since '1f1b' has one stage per rank"),
        (
            {"name": "interleaved", "microbatches": 6, "chunks": 2},
            "microbatches=6: expected a multiple of stages=4: 'inter",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(options, words):
    arguments = {"name": "1f1b", "stages": 4, "microbatches": 8} | options
    with pytest.raises(p101.ScheduleError, match=re.escape(words)):
        p101.schedule(arguments.pop("name"), **arguments)


@pytest.mark.parametrize("actions", [5, None, "0F0", ["0F0", "1F0"], [["0F0"], 5], [[1]]], ids=str)
def test_what_is_no_list_of_texts_for_each_rank_is_refused(actions):
    with pytest.raises(p101.ScheduleError, match=r"expected a (list for each rank|text such as)"):
        p101.Schedule(actions)


def test_rules_are_gloos_or_nccls():
    with pytest.raises(p101.ScheduleError, match="rules='mpi': expected 'gloo' or 'nccl'"):
        p101.schedule("1f1b", stages=2, microbatches=2).check("mpi")
