"""Lesson 07: the pipelines by hand give the gradients of one process, the mistakes do not, and
the answers to the exercises are right.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.lessons.lesson import answer_text, definitions, read

LESSON = definitions(
    "07_pipeline", "WIDTH", "LAYERS", "SAMPLES", "FREE", "DO", "SPLIT", "RANK_0", "RANK_1"
)
BY_NAME = {"gpipe": "DO", "1f1b": "DO", "zb-h1": "SPLIT", "zb-h2": "SPLIT"}


def batch():
    return torch.randn(
        2, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).unbind()


def by_one():
    """Plain torch, the whole batch at once."""
    model, (x, y) = MLP([8] * 5, dtype=torch.float64), batch()
    F.mse_loss(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def equal(gradients):
    ours = torch.cat([g.flatten() for of_rank in gradients for g in of_rank])
    return torch.allclose(ours, by_one(), rtol=1e-10, atol=1e-13)


def by_hand(name, n, m, actions=None, rules="gloo", **options):
    schedule = p101.schedule(name, stages=n, microbatches=m)
    call = LESSON["by_hand"], batch(), schedule, LESSON[BY_NAME[name]] | (actions or {})
    return p101.launch(
        *call, world_size=n, backend="sim", rules=rules, network=LESSON["FREE"], **options
    ), schedule


def test_one_batch_equals_one_process():
    assert equal(p101.launch(LESSON["one_batch"], batch(), world_size=4, backend="sim").results)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_gpipe_by_hand_equals_one_process_and_takes_what_the_closed_form_says(n, m):
    run = p101.launch(
        LESSON["gpipe"], batch(), m, world_size=n, backend="sim", network=LESSON["FREE"]
    )
    assert equal(run.results) and run.trace.makespan == (m + n - 1) * 3 * 8 / m


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_one_loop_runs_every_schedule_as_planned(name, n):
    run, schedule = by_hand(name, n, 8)
    assert equal([gradients for gradients, _ in run.results])
    assert run.trace.makespan == pytest.approx(schedule.time().makespan)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_group_for_each_direction_keeps_nccls_rules(name):
    schedule, do = p101.schedule(name, stages=4, microbatches=8), LESSON[BY_NAME[name]]

    def two_groups(batch):
        return LESSON["by_hand"](batch, schedule, do, groups=(dist.new_group(), dist.new_group()))

    run = p101.launch(two_groups, batch(), world_size=4, backend="sim", rules="nccl")
    assert equal([gradients for gradients, _ in run.results])
    if name != "gpipe":
        with pytest.raises(p101.DeadlockError, match="waits in the queue behind its send"):
            by_hand(name, 4, 8, rules="nccl")


def test_the_readers_order_is_1f1b_and_the_beginning_is_gpipe():
    begun: dict = {}
    (cell,) = (cell.source for cell in read("07_pipeline").cells if cell.id == "order-mine")
    exec(cell, begun)
    mine: dict = {}
    exec(answer_text("07_pipeline", "order-answer"), mine)
    for order, name, held in (
        (begun["MY_ORDER"], "gpipe", [4, 4]),
        (mine["MY_ORDER"], "1f1b", [2, 1]),
    ):
        schedule = p101.Schedule([of_rank.split() for of_rank in order])
        assert schedule == p101.schedule(name, stages=2, microbatches=4)
        assert schedule.time().makespan == 15 and schedule.time().peak_activations == held


def test_the_bubbles_of_llama_3_and_the_two_ways_to_quote_one():
    text = "".join(cell.source for cell in read("07_pipeline").cells)
    plain = p101.schedule("1f1b", stages=16, microbatches=16).time()
    assert plain.bubble_rate == pytest.approx(15 / 31) and f"{plain.bubble_rate:.0%}" == "48%"
    eighth = p101.schedule("interleaved", stages=16, microbatches=16, chunks=8).time(*3 * [1 / 8])
    assert "from 48 % to 10 %" in text and f"{eighth.bubble_rate:.0%}" == "10%"
    for P in (4, 8, 64):  # GPipe's "negligible"
        assert 0.15 < (P - 1) / (4 * P + P - 1) < 0.2


MISTAKES = {
    "a loss that is not divided": {"loss": LESSON["undivided"]},
    "zero_grad before": {"actions": {"B": LESSON["zero_first"]}},
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_the_mistakes_give_other_gradients(mistake):
    run, _ = by_hand("1f1b", 4, 8, **MISTAKES[mistake])
    assert not equal([gradients for gradients, _ in run.results])


def test_blocking_sends_hang_in_1f1b_only():
    assert equal([gradients for gradients, _ in by_hand("gpipe", 4, 8, send=dist.send)[0].results])
    with pytest.raises(p101.DeadlockError):
        by_hand("1f1b", 4, 8, send=dist.send)


def answers():
    (cell,) = (cell.source for cell in read("07_pipeline").cells if cell.id == "exercises")
    return cell


def test_exercise_1_enough_microbatches():
    def rate(name, m, chunks=1):
        cost = 1 / chunks
        return (
            p101.schedule(name, stages=16, microbatches=m, chunks=chunks)
            .time(cost, cost, cost)
            .bubble_rate
        )

    assert rate("1f1b", 135) <= 0.1 + 1e-9 < rate("1f1b", 134)
    assert rate("interleaved", 48, 4) < 0.1 < rate("interleaved", 32, 4)
    assert "= 135$" in answers() and "so 48." in answers()


def test_exercise_2_the_slowest_stage_sets_the_pace():
    time = p101.schedule("1f1b", stages=4, microbatches=8).time(*[[1, 1, 1, 2]] * 3)
    slots = [slot for slot in time.slots if slot.rank == 3]
    assert time.makespan == 57 and f"{time.makespan:.0f} s instead of 33 s" in answers()
    assert sum(slot.end - slot.start for slot in slots) == slots[-1].end - slots[0].start == 48


def test_exercise_3_slow_messages():
    def longer(name, cost=1.0, chunks=1):
        schedule = p101.schedule(name, stages=4, microbatches=8, chunks=chunks)
        return [schedule.time(cost, cost, cost, c).makespan for c in (0.0, 0.3)]

    assert longer("1f1b") == pytest.approx([33, 37.8]) and "37.8 s instead of 33" in answers()
    assert (
        longer("interleaved", 0.5, 2) == pytest.approx([28.5, 32.7])
        and "32.7 s instead of 28.5" in answers()
    )
    before, after = longer("zb-h2")
    assert after - before < 37.8 - 33
