"""Misconceptions of exercises that add what the ranks have.

They name which ranks are counted how often in a wrong sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from parallel101.laboratory.grade.compared_values import factor, weights
from parallel101.laboratory.grade.exercise import Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    all_show,
    communicated,
    ended,
    failed,
    right,
)


def several_ranks(trials: Sequence[Trial], least: int = 2) -> list[Trial]:
    """Return the trials on `least` ranks or more whose tensors are large enough to count bytes."""
    return [
        trial
        for trial in trials
        if trial.world_size >= least and trial.case.facts["xs"][0].nbytes >= 100 * trial.world_size
    ]


def everything_sent(peers: Callable[[int], int]) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether runs are right, but every rank sends n − 1 times the size of x.

    Each rank sends to `peers(n)` others.
    """

    def sends_all(trial: Trial) -> bool:
        n, nbytes = trial.world_size, trial.case.facts["xs"][0].nbytes
        sends = {(e.rank, e.peer) for e in trial.trace.events if e.kind == "send"}
        to = Counter(rank for rank, _ in sends)
        enough = min(communicated(trial)) >= (n - 1) * nbytes
        return right(trial) and enough and {to[rank] for rank in range(n)} == {peers(n)}

    return lambda trials: all_show(several_ranks(trials, least=3), sends_all)


whole_round_ring = Misconception(
    "whole tensor round the ring",
    "Every rank's whole x goes round the ring, and each rank adds up by itself: it sends (n − "
    "1)·S bytes. As partial sums and in chunks it is less than 2·S.",
    everything_sent(lambda n: 1),
)
everything_to_everyone = Misconception(
    "everything to everyone",
    "Every rank sends its whole x to every other rank, which adds up by itself: n − 1 "
    "messages of S bytes a rank.",
    everything_sent(lambda n: n - 1),
)


def facts(xs: Sequence[torch.Tensor], **more: object) -> dict:
    return {"xs": list(xs), **more}


# of each result, with what it should be the sum of
Summands = Callable[[Trial], Iterator[tuple[torch.Tensor, list[torch.Tensor]]]]


def factors(trials: Sequence[Trial], pieces: Summands) -> list[tuple[int, list[float]]]:
    """Return n and the weights of each piece that is a weighted sum of the n ranks' pieces."""
    return [
        (trial.world_size, cs)
        for trial in ended(trials, 2)
        for piece, parts in pieces(trial)
        if (cs := weights(piece, parts)) is not None
    ]


def _of_a_sum(
    pieces: Summands, shows: Callable[[list[float]], bool]
) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether the weights of some wrong sum show this."""

    def seen(trials: Sequence[Trial]) -> bool:
        sums = [trial for trial in failed(trials) if trial.case.facts.get("op", "sum") == "sum"]
        return any(shows([round(c, 3) for c in cs]) for _, cs in factors(sums, pieces))

    return seen


def counted_twice(pieces: Summands) -> Misconception:
    return Misconception(
        "counted twice",
        "The data of some ranks is added more than once: what arrives already contains it, or a "
        "finished sum is added in place of copied.",
        _of_a_sum(pieces, lambda cs: all(c == int(c) for c in cs) and max(cs) >= 2),
    )


def left_out(pieces: Summands) -> Misconception:
    return Misconception(
        "ranks left out",
        "The sum lacks the data of some ranks: it is overwritten, or never added.",
        _of_a_sum(pieces, lambda cs: set(cs) == {0.0, 1.0}),
    )


def divided_too_often(pieces: Summands) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether sums are right, but means divide a rank's data by n too often.

    Each rank's data is divided by n once or more, and somewhere more than once.
    """

    def divided(n: int, cs: list[float]) -> bool:
        return all(any(abs(c - n**-k) < 2e-3 * n**-k for k in range(n + 2)) for c in cs)

    def seen(trials: Sequence[Trial]) -> bool:
        wrong = failed(trials)
        found = factors(wrong, pieces)
        means = all(t.case.facts["op"] == "mean" and t.error is None for t in wrong)
        return means and all_show(found, divided) and any(min(cs) < 0.9 / n for n, cs in found)

    return seen


@mistake(
    "sum for mean", "Where the mean is asked for, the sum is returned: it is n times too large."
)
def sum_for_mean(trials: Sequence[Trial]) -> bool:
    """Return whether runs are wrong only because they return the sum in place of the mean."""
    return all_show(
        failed(trials),
        lambda trial: trial.case.facts["op"] == "mean" and same_up_to(trial, trial.world_size),
    )


def same_up_to(trial: Trial, k: float) -> bool:
    """Return whether every result is k times the expected one."""
    return all(
        (found := factor(result, expected)) is not None and abs(found - k) < 1e-3 * abs(k)
        for result, expected in zip(trial.results, trial.case.expected, strict=True)
        if expected is not None
    )
