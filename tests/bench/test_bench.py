"""The sides of each comparison compute the same thing, and take turns."""

import itertools
import math
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import cli
from parallel101.laboratory.bench import attention_speed, pictures
from parallel101.laboratory.bench.collective_speed import BUS, time_torchs
from parallel101.laboratory.bench.comparison import Benchmark, BenchmarkReport, ratio, take_turns
from parallel101.laboratory.bench.timed_training import (
    SIDES,
    alone,
    batch_of_rank,
    whole_model,
)

WIDTH, STEPS = 16, 3


def losses_of_all_sides() -> dict[str, list[float | None]]:
    """Of each side of each table, on small models.

    In a pipeline of torch's only the rank of the last stage knows the loss.
    """
    found = {}
    for table, sides in SIDES.items():
        for name, step_of in sides.items():
            step, batch = step_of(whole_model(WIDTH)), batch_of_rank(table == "data", WIDTH)
            losses = [step(*batch) for _ in range(STEPS)]
            found[f"{table}: {name}"] = [None if loss is None else float(loss) for loss in losses]
    return found


def losses_of_one_process() -> list[float]:
    step, batch = alone(whole_model(WIDTH)), batch_of_rank(False, WIDTH)
    return [float(step(*batch)) for _ in range(STEPS)]


def test_all_sides_of_a_training_table_train_the_same_thing() -> None:
    expected = losses_of_one_process()
    ranks = p101.launch(losses_of_all_sides, world_size=2, backend="sim").results
    assert expected[0] > expected[-1]
    for name in ranks[0]:
        if "no communication" not in name:
            known = [of_rank[name] for of_rank in ranks if of_rank[name][0] is not None]
            # the ranks' equal shares of the batch, or the same loss
            mean = [sum(of_step) / len(known) for of_step in zip(*known)]
            assert mean == pytest.approx(expected, rel=1e-6), name


def largest_differences() -> dict[str, float]:
    """Of each way's result and gradients from those of one process."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 16, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = {}
    for name, side in attention_speed.SIDES.items():
        # torch's context parallel has no rule for a causal mask on a CPU
        for causal in (False,) if "context parallel" in name else (False, True):
            y = attention_speed.torchs(*whole, causal=causal)
            expected = [y.detach(), *torch.autograd.grad(y.square().sum(), whole)]
            mine = [attention_speed.part_of(x.detach(), side.part).requires_grad_() for x in whole]
            with side.around(16):
                part = side.attend(*mine, causal=causal)
                parts = [part.detach(), *torch.autograd.grad(part.square().sum(), mine)]
            found[f"{name}, {causal}"] = max(
                float((x - attention_speed.part_of(of_all, side.part)).abs().max())
                for x, of_all in zip(parts, expected, strict=True)
            )
    return found


def test_all_ways_of_the_attention_table_compute_the_same_thing() -> None:
    for found in p101.launch(largest_differences, world_size=2).results:
        assert all(not error > 1e-12 for error in found.values()), found


def test_the_animation_of_14_steps_keeps_its_size() -> None:
    run = p101.watch(lambda x: p101.all_reduce(x, algorithm="ring"), world_size=8, backend="sim")
    _, size = pictures.animation_rows(run, 1)
    assert size[2:4] == ("250 kB", "yes"), size
    assert pictures.row("", "s", [2, 2.1, 2.2], 2)[3] == "**no**"
    assert pictures.row("", "s", [1, 2, 4], 2, "a peer", 1, 4, 2)[1:] == (
        *("2 s", "2 s", "yes", "a peer", "2 s", "**1**"),
    )


def counted(name: str):
    return None if name == "nowhere" else dist.barrier


def test_a_comparison_measures_every_side_in_every_round_and_divides_by_its_peers() -> None:
    sides = {name: partial(counted, name) for name in ("a", "b", "nowhere")}
    extra = ("M", lambda name: 2e6 if name == "a" else 5e6)
    report = BenchmarkReport()
    compared = Benchmark("On {}", sides, {"/ b": "b"}, (2, 4), extra, note="That is all.")
    compared(report, backend="sim", quick=True)
    assert "\n## On 2 sim ranks\n" in report.lines and report.lines[-1] == "That is all.\n"
    head, _, *rows = [line.split(" | ") for line in report.lines if line.startswith("|")]
    assert [head[-2:], *(row[-1] for row in rows)] == [["95 %", "M |"], "2.0 |", "5.0 |"]
    assert rows[1][2] == "**1.000**" and float(rows[0][1]) > 0
    turns = take_turns({name: partial(next, itertools.count()) for name in "abc"}, 4)
    assert [list(turn) for turn in turns] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert [turn["b"] for turn in turns] == [0, 1, 2, 3]
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 1.0}, {"a": 2.0, "b": 2.0}]
    assert ratio(rounds, "a", "b") == ("**1.000**", "0.500 … 3.000")


def torchs_collectives() -> None:
    for operation in BUS:
        time_torchs(operation, 1200, calls=1)


def test_torchs_side_of_each_collective_has_the_whole_array() -> None:
    events = p101.launch(torchs_collectives, world_size=3, backend="sim").trace.events
    of_root = [(event.kind, event.nbytes) for event in events if event.rank == 0]
    of_root = sorted(of for of in of_root if of[0] != "barrier")
    assert of_root == sorted((name, 1200) for name in BUS)


def test_the_interval_of_a_median_holds_the_true_one_in_95_of_100_cases() -> None:
    draws, held = random.Random(0), 0
    for _ in range(1000):
        rounds = [{"a": draws.expovariate(1.0), "b": 1.0} for _ in range(60)]
        _, interval = ratio(rounds, "a", "b")
        low, high = map(float, interval.split(" … "))
        held += low <= math.log(2) <= high
    assert 930 < held < 970


WRONG = {
    ". is a folder": ["--write", ".", "launch"],
    "'lunch' is not a section; the sections are: launch, ": ["launch", "lunch"],
    "invalid choice: 'mpi'": ["--backend", "mpi"],
    "published needs a table": ["published"],
    "No such file": ["published", "missing.csv"],
    "leave out --quick": ["published", "runs.csv", "--quick"],
    "--picture belongs to published": ["launch", "--picture", "picture.svg"],
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_errors_before_anything_is_measured(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *WRONG[words]])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "") and words in printed.err
