"""The benchmarks' spawned ranks answer the ranks of a launch, and each comparison measures all its sides."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.bench.collectives import time_rounds, time_torchs
from parallel101.bench.spawned import ask, spawned_ranks


def weighted_sum(word: str, *, calls: int) -> float:
    """Return a number to which every spawned rank contributes: the sum over ranks of (rank + 1) · calls · len(word)."""
    x = torch.tensor((dist.get_rank() + 1.0) * calls * len(word))
    dist.all_reduce(x)
    return x.item()


def fails_on_rank_1(*, calls: int) -> float:
    if dist.get_rank() == 1:
        raise ArithmeticError("one of these days")
    dist.barrier()
    return 0.0


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_launched_rank_gets_the_result_of_the_spawned_ranks(ranks: int) -> None:
    with spawned_ranks(weighted_sum, ranks, "gloo") as port:
        for calls in (1, 5):
            answers = p101.launch(lambda: [ask(port, word, calls=calls) for word in ("a", "word")], world_size=2).results  # noqa: B023
            one_letter = ranks * (ranks + 1) / 2 * calls
            assert answers == [[one_letter, 4 * one_letter]] * 2
    assert not multiprocessing.active_children()


def test_an_error_on_a_spawned_rank_is_raised_at_once_and_no_process_is_left() -> None:
    with (
        pytest.raises(p101.RankFailed, match="ArithmeticError: one of these days"),
        spawned_ranks(fails_on_rank_1, 2, "gloo") as port,
    ):
        p101.launch(lambda: ask(port, calls=1), world_size=2)
    assert not multiprocessing.active_children()


def test_every_side_of_a_comparison_is_timed_in_every_round() -> None:
    with spawned_ranks(time_torchs, 2, "gloo") as port:
        for name in ("scatter", "all_reduce"):
            rounds = p101.launch(time_rounds, name, 1 << 10, 2, port, world_size=2).results[0]
            assert len(rounds) == 2
            assert all(len(turn) == 3 and min(turn) > 0 for turn in rounds)
