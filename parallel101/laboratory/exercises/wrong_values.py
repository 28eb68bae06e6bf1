"""Values that usual mistakes give: a case computes them, so that a mistake can be named.

    facts={"own": [form, …]}    a form has, by rank, the results that the mistake gives
    gives("own")                whether every wrong run has the results of one of the forms
    gives("own", 0, 2)          the same of parts 0 and 2 of each result

A case without the fact says nothing about the mistake. Of a wrong sum, the rules name which ranks
are counted how often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from parallel101.laboratory.grade.compared_values import factor, same, weights
from parallel101.laboratory.grade.exercise import Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    all_show,
    communicated,
    ended,
    failed,
    on_ranks,
    right,
    wrong_trials,
)

Seen = Callable[[Sequence[Trial]], bool]


def more_than(n: int) -> Callable[[Sequence[Trial]], list[Trial]]:
    """Return a choice of the trials on more than n ranks, for `every`."""
    return lambda trials: [trial for trial in trials if trial.world_size > n]


def every(
    chosen: Callable[[Sequence[Trial]], Iterable[Any]],
) -> Callable[[Callable[..., bool]], Seen]:
    """Return a decorator that makes a test of trials: some are chosen, and all of these show this.

    `chosen` may also give tuples, such as trials with their ranks.
    """
    return lambda shows: lambda trials: all_show(chosen(trials), shows)


def right_but(
    least: int, where: Callable[[Trial], Any] = lambda trial: True
) -> Callable[[Callable[[Trial], bool]], Seen]:
    """Return a decorator that makes a test of trials: all are right, but the large ones show this.

    The large ones are those on `least` ranks or more for which `where` holds.
    """
    return lambda shows: (
        lambda trials: (
            not failed(trials)
            and all_show((t for t in trials if t.world_size >= least and where(t)), shows)
        )
    )


def every_wrong(seen: Callable[[Trial], bool]) -> Seen:
    """Return a test of whether every wrong run shows this, and one of them has several ranks."""

    def seen_everywhere(trials: Sequence[Trial]) -> bool:
        wrong = wrong_trials(trials)
        return any(trial.world_size > 1 for trial in wrong) and all(map(seen, wrong))

    return seen_everywhere


def gives(fact: str, *parts: int) -> Seen:
    """Return a test of whether every wrong run has the values that a mistake gives.

    case.facts[fact] is a list of forms of the mistake. A form has, by rank, the result that it
    gives, or only the part of it, or a tuple of the `parts`. ANYTHING stands for any value.
    """

    def chosen(result: Any) -> Any:
        found = [result[part] for part in parts] if parts else result
        return found[0] if len(parts) == 1 else found

    def shows(trial: Trial) -> bool:
        found = [chosen(result) for result in trial.results]
        return any(same(found, form) for form in trial.case.facts[fact])

    return lambda trials: every_wrong(shows)([t for t in trials if fact in t.case.facts])


def gradients_times(part: int, k: Callable[[int], float]) -> Seen:
    """Return a test of whether the first gradient in part `part` is k(n) times the right one.

    This must hold in every wrong run, on every rank.
    """

    def shown(trial: Trial, rank: int) -> bool:
        mine, right = trial.results[rank][part], trial.case.expected[rank][part]
        if isinstance(right, list | tuple):
            mine, right = mine[0], right[0]
        found = factor(mine, right)
        return found is not None and abs(found - k(trial.world_size)) < 1e-6

    return every_wrong(lambda trial: all_show(on_ranks([trial]), shown))


@every(wrong_trials)
def only_large_overflow(trial: Trial) -> bool:
    """Return whether only large numbers go wrong, with results that are infinite or NaN."""
    results = [r if isinstance(r, list | tuple) else [r] for r in trial.results]
    parts = [part for result in results for part in result if isinstance(part, Tensor)]
    return trial.case.facts["large"] and not all(part.isfinite().all() for part in parts)


# ---- sums ----


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


# of each result, with what it should be the sum of
Summands = Callable[[Trial], Iterator[tuple[Tensor, list[Tensor]]]]


def factors(trials: Sequence[Trial], pieces: Summands) -> list[tuple[int, list[float]]]:
    """Return n and the weights of each piece that is a weighted sum of the n ranks' pieces."""
    return [
        (trial.world_size, cs)
        for trial in ended(trials, 2)
        for piece, parts in pieces(trial)
        if (cs := weights(piece, parts)) is not None
    ]


def wrong_sums(pieces: Summands) -> list[Misconception]:
    """Return what shows in the weights of some wrong sum: ranks counted twice, or left out."""

    def seen(shows: Callable[[set[float]], bool]) -> Seen:
        def seen_once(trials: Sequence[Trial]) -> bool:
            sums = [t for t in failed(trials) if t.case.facts.get("op", "sum") == "sum"]
            return any(shows({round(c, 3) for c in cs}) for _, cs in factors(sums, pieces))

        return seen_once

    return [
        Misconception(
            "counted twice",
            "The data of some ranks is added more than once: what arrives already contains it, or "
            "a finished sum is added in place of copied.",
            seen(lambda cs: all(c == int(c) for c in cs) and max(cs) >= 2),
        ),
        Misconception(
            "ranks left out",
            "The sum lacks the data of some ranks: it is overwritten, or never added.",
            seen(lambda cs: cs == {0.0, 1.0}),
        ),
    ]


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
