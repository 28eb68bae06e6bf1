"""Lesson 07: the pipelines by hand give the gradients of one process, the mistakes do not, and
the numbers in the text and in the answers are those of schedules.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer_text, definitions, source

LESSON = definitions("07_pipeline", "WIDTH", "LAYERS", "SAMPLES", "FREE", "DO", "SPLIT")
EXERCISES = source("07_pipeline", "exercises")
BY_NAME = {"gpipe": "DO", "1f1b": "DO", "zb-h1": "SPLIT", "zb-h2": "SPLIT"}
BATCH = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def equal(gradients):
    """Whether they are those of plain torch, the whole batch at once."""
    model, (x, y) = MLP([8] * 5, dtype=torch.float64), BATCH
    F.mse_loss(model(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    ours = torch.cat([g.flatten() for of_rank in gradients for g in of_rank])
    return torch.allclose(ours, expected, rtol=1e-10, atol=1e-13)


def by_hand(name, n=4, actions=None, rules="gloo", **options):
    """Run the lesson's loop. Returns whether its gradients are right, and the seconds it took."""
    schedule = p101.schedule(name, stages=n, microbatches=8)
    call = LESSON["by_hand"], BATCH.unbind(), schedule, LESSON[BY_NAME[name]] | (actions or {})
    where = {"world_size": n, "backend": "sim", "rules": rules, "network": LESSON["FREE"]}
    run = p101.launch(*call, **where, **options)
    return equal([gradients for gradients, _ in run.results]), run.trace.makespan


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_gpipe_by_hand_equals_one_process_and_takes_what_the_closed_form_says(n, m):
    call = LESSON["gpipe"], BATCH.unbind(), m
    run = p101.launch(*call, world_size=n, backend="sim", network=LESSON["FREE"])
    assert equal(run.results) and run.trace.makespan == (m + n - 1) * 3 * 8 / m


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_one_loop_runs_every_schedule_as_planned(name, n):
    planned = p101.schedule(name, stages=n, microbatches=8).time().makespan
    assert by_hand(name, n) == (True, pytest.approx(planned))


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_group_for_each_direction_keeps_nccls_rules(name):
    schedule, do = p101.schedule(name, stages=4, microbatches=8), LESSON[BY_NAME[name]]

    def two_groups(batch):
        return LESSON["by_hand"](batch, schedule, do, groups=(dist.new_group(), dist.new_group()))

    run = p101.launch(two_groups, BATCH.unbind(), world_size=4, backend="sim", rules="nccl")
    assert equal([gradients for gradients, _ in run.results])
    if name != "gpipe":
        with pytest.raises(p101.DeadlockError, match="waits in the queue behind its send"):
            by_hand(name, rules="nccl")


def test_the_mistakes_give_other_gradients_and_blocking_sends_hang_in_1f1b_only():
    assert not by_hand("1f1b", loss=LESSON["undivided"])[0]
    assert not by_hand("1f1b", actions={"B": LESSON["zero_first"]})[0]
    assert by_hand("gpipe", send=dist.send)[0]
    with pytest.raises(p101.DeadlockError):
        by_hand("1f1b", send=dist.send)


def test_the_readers_order_is_1f1b_and_the_beginning_is_gpipe():
    for code, name, held in (
        (source("07_pipeline", "order-mine"), "gpipe", [4, 4]),
        (answer_text("07_pipeline", "order-answer"), "1f1b", [2, 1]),
    ):
        names: dict = {}
        exec(code, names)
        schedule = p101.Schedule([of_rank.split() for of_rank in names["MY_ORDER"]])
        assert schedule == p101.schedule(name, stages=2, microbatches=4)
        assert schedule.time().makespan == 15 and schedule.time().peak_activations == held


def timed(name, P, m, chunks=1, **costs):
    schedule = p101.schedule(name, stages=P, microbatches=m, chunks=chunks)
    return schedule.time(1 / chunks, 1 / chunks, 1 / chunks, **costs)


def test_the_bubbles_of_llama_3_and_of_exercise_1():
    assert timed("1f1b", 16, 16).bubble_rate == pytest.approx(15 / 31)
    assert timed("interleaved", 16, 16, 8).bubble_rate == pytest.approx(0.10, abs=0.005)
    assert timed("1f1b", 16, 135).bubble_rate <= 0.1 + 1e-9 < timed("1f1b", 16, 134).bubble_rate
    enough, too_few = (timed("interleaved", 16, m, 4).bubble_rate for m in (48, 32))
    assert enough < 0.1 < too_few


def test_exercise_2_the_slowest_stage_sets_the_pace():
    time = p101.schedule("1f1b", stages=4, microbatches=8).time(*[[1, 1, 1, 2]] * 3)
    slots = [slot for slot in time.slots if slot.rank == 3]
    assert time.makespan == 57 and "57 s instead of 33 s" in EXERCISES
    assert sum(slot.end - slot.start for slot in slots) == slots[-1].end - slots[0].start == 48


def test_exercise_3_slow_messages():
    def both(*layout):
        return [timed(*layout, communication=seconds).makespan for seconds in (0.0, 0.3)]

    assert both("1f1b", 4, 8) == pytest.approx([33, 37.8])
    assert both("interleaved", 4, 8, 2) == pytest.approx([28.5, 32.7])
    assert "37.8 s instead of 33, and interleaved 32.7 s instead of 28.5" in EXERCISES
    before, after = both("zb-h2", 4, 8)
    assert after - before < 37.8 - 33
