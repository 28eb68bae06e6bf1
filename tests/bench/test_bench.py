"""The benchmarks' spawned ranks answer the ranks of a launch, and each comparison measures all
its sides.
"""

import math
import multiprocessing
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench import attention_speed, pictures
from parallel101.laboratory.bench.benchmark_report import median_and_interval
from parallel101.laboratory.bench.collective_speed import COMPARISONS, time_rounds, time_torchs
from parallel101.laboratory.bench.sides import TABLES, alone, batch_of_rank, whole_model
from parallel101.laboratory.bench.spawned import ask, spawned_ranks


def serve(what: str, *arguments: Any, calls: int) -> float:
    """What the spawned ranks do: time one of torch's collectives; fail on rank 1; or return a
    number to which every rank contributes.
    """
    if what in COMPARISONS:
        return time_torchs(what, *arguments, calls=calls)
    if what == "fail":
        if dist.get_rank() == 1:
            raise ArithmeticError("one of these days")
        dist.barrier()
    # the sum over ranks of (rank + 1) · calls · len(what)
    x = torch.tensor((dist.get_rank() + 1.0) * calls * len(what))
    dist.all_reduce(x)
    return x.item()


def answers(port: int, calls: int) -> list[float]:
    return [ask(port, word, calls=calls) for word in ("a", "word")]


def sums_then_rounds_then_an_error() -> None:
    with spawned_ranks(serve, 2, "gloo") as port:
        for calls in (1, 5):  # two spawned ranks answer three launched ones
            launched = p101.launch(answers, port, calls, world_size=3)
            assert launched.results == [[3 * calls, 4 * 3 * calls]] * 3
        for name in ("scatter", "all_reduce"):
            rounds = p101.launch(time_rounds, name, 1 << 10, 2, port, world_size=2).results[0]
            assert len(rounds) == 2
            assert all(len(turn) == 3 and min(turn) > 0 for turn in rounds)
        p101.launch(lambda: ask(port, "fail", calls=1), world_size=2)


def test_spawned_ranks_answer_time_every_side_and_raise_their_errors() -> None:
    with pytest.raises(p101.RankFailed, match="ArithmeticError: one of these days"):
        sums_then_rounds_then_an_error()
    assert not multiprocessing.active_children(), "no process is left"


WIDTH, STEPS = 16, 3


def losses_of_all_sides() -> dict[str, list[float | None]]:
    """Of each side of each table, on small models.

    In a pipeline of torch's only the rank of the last stage knows the loss.
    """
    found = {}
    for table, (_, sides, _, cut) in TABLES.items():
        for name, side in sides.items():
            step, batch = side(whole_model(WIDTH)), batch_of_rank(cut, WIDTH)
            losses = [step(*batch) for _ in range(STEPS)]
            found[f"{table}: {name}"] = [None if loss is None else float(loss) for loss in losses]
    return found


def losses_of_one_process() -> list[float]:
    step, batch = alone(whole_model(WIDTH)), batch_of_rank(False, WIDTH)
    return [float(step(*batch)) for _ in range(STEPS)]


def test_all_sides_of_a_training_table_train_the_same_thing() -> None:
    # first, so that the fork server learns what to import
    expected = p101.launch(losses_of_one_process, world_size=1).results[0]
    ranks = p101.launch(losses_of_all_sides, world_size=2).results
    assert expected[0] > expected[-1]
    for name in ranks[0]:
        if "no communication" not in name:
            known = [of_rank[name] for of_rank in ranks if of_rank[name][0] is not None]
            # the ranks' equal shares of the batch, or the same loss
            mean = [sum(of_step) / len(known) for of_step in zip(*known)]
            assert mean == pytest.approx(expected, rel=1e-6), name


def largest_differences() -> dict[str, float]:
    """Of each way's result and gradients from those of one process, or NaN if it doesn't run."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 16, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = {}
    for name, side in attention_speed.SIDES.items():
        y = attention_speed.torchs(*whole, causal=side.causal)
        expected = [y.detach(), *torch.autograd.grad(y.square().sum(), whole)]
        mine = [attention_speed.part_of(x.detach(), side.part).requires_grad_() for x in whole]
        try:
            with side.around(16):
                part = side.attend(*mine, causal=side.causal)
                parts = [part.detach(), *torch.autograd.grad(part.square().sum(), mine)]
        except (NotImplementedError, RuntimeError):
            found[name] = math.nan
        else:
            found[name] = max(
                float((x - attention_speed.part_of(of_all, side.part)).abs().max())
                for x, of_all in zip(parts, expected, strict=True)
            )
    return found


def test_all_ways_of_the_attention_table_compute_the_same_thing() -> None:
    for found in p101.launch(largest_differences, world_size=2).results:
        # torch's context parallel has no rule for a causal mask on a CPU, and may get one
        assert {name for name in found if found[name] != found[name]} <= {
            "torch's context parallel, causal"
        }
        assert all(not error > 1e-12 for error in found.values()), found


def test_the_animation_of_14_steps_is_measured_beside_matplotlibs_and_keeps_its_size() -> None:
    run = p101.watch(lambda x: p101.all_reduce(x, algorithm="ring"), world_size=8, backend="sim")
    time, size = pictures.animation_rows(run, 1)
    assert time[0].startswith("animation of 14 steps on 8 ranks") and all(
        float(row[6].split()[0].replace(",", "")) > 0 for row in (time, size)
    )
    assert size[3:5] == ("250 kB", "yes"), size
    states = pictures.contributions(run)
    assert len(states) == 15 and (states[0] == 1).all() and (states[-1] == 8).all()


def test_a_limit_is_kept_by_at_most_so_much_or_at_least_so_many_frames() -> None:
    kept = [
        pictures.row("", unit, [value], limit)[4]
        for unit, value, limit in [
            ("s", 2, 2),
            ("s", 2.1, 2),
            ("frames/s", 59.9, 60),
            ("frames/s", 58, 60),
        ]
    ]
    assert kept == ["yes", "**no**", "yes", "**no**"]
    assert [pictures.number(value) for value in (0.5251, 37.12, 999.4, 1190.4)] == [
        "0.525",
        "37.1",
        "999",
        "1,190",
    ]
    assert pictures.row("", "s", [1, 2, 4], 2, "a peer", [1, 4, 2])[2:] == (
        "1 … 4",
        "2 s",
        "yes",
        "a peer",
        "2 s",
        "**1**",
    )


def test_the_interval_of_a_median_holds_the_true_one_in_95_of_100_cases() -> None:
    draws, held = random.Random(0), 0
    for _ in range(1000):
        _, interval = median_and_interval([draws.expovariate(1.0) for _ in range(60)])
        low, high = map(float, interval.split(" … "))
        held += low <= math.log(2) <= high
    assert 930 < held < 970
