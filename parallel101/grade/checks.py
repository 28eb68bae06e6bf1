"""The checks and misconceptions that many exercises share, and how values are compared.

value() · bytes_sent(…) · bytes_at_root(…) · steps(…)                 checks
DEADLOCK_SENDS_FIRST · WAIT_FORGOTTEN · WORKS_THROWN_AWAY · …         misconceptions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel101.analysis.steps import steps_of
from parallel101.grade.exercise import ANYTHING, Case, Check, Exercise, Misconception, Trial
from parallel101.record.errors import DeadlockError
from parallel101.record.units import ranks_text

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10}  # relative to the largest value

# ---- values ----


def same(found: Any, expected: Any) -> bool:
    """Whether a result is as expected: the same structure, shapes and dtypes; floating-point values up to the order of a sum."""
    return difference(found, expected) is None


def difference(found: Any, expected: Any) -> str | None:
    """What differs, as the end of a sentence that begins with "rank 2 returned"; None if nothing does."""
    if expected is ANYTHING:
        return None
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{_kind(found)}; expected a tensor of shape {tuple(expected.shape)}"
        if found.shape != expected.shape:
            return f"a tensor of shape {tuple(found.shape)}; expected {tuple(expected.shape)}"
        if found.dtype != expected.dtype:
            return f"a tensor of {found.dtype}; expected {expected.dtype}"
        return None if close(found, expected) else _values(found, expected)
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{_kind(found)}; expected {_kind(expected)}"
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if (what := difference(mine, theirs)) is not None:
                return f"in place {number}, {what}"
        return None
    if isinstance(expected, dict):
        if not isinstance(found, dict) or set(found) != set(expected):
            return f"{_kind(found)}; expected a dict with the keys {sorted(map(str, expected))}"
        for key, theirs in expected.items():
            if (what := difference(found[key], theirs)) is not None:
                return f"at {key!r}, {what}"
        return None
    if isinstance(expected, float) and isinstance(found, int | float):
        return None if abs(found - expected) <= 1e-5 * max(1.0, abs(expected)) else f"{found}; expected {expected}"
    return None if type(found) is type(expected) and found == expected else f"{found!r}; expected {expected!r}"


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors of one shape hold the same numbers, up to a tolerance relative to the largest expected one."""
    if found.shape != expected.shape:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(found, expected)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    limit = (TOLERANCE.get(expected.dtype, 1e-5) if tolerance is None else tolerance) * max(largest, 1e-30)
    return bool(((found.double() - expected.double()).abs() <= limit).all())  # NaN is never close


def factor(found: Any, expected: Any) -> float | None:
    """k if `found` is k times `expected`, element by element, and k is not 1. None if there is no such factor."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor) or found.shape != expected.shape:
        return None
    mine, theirs = found.double().flatten(), expected.double().flatten()
    norm = float(theirs @ theirs)
    if not norm or not bool(torch.isfinite(mine).all()):
        return None
    k = float(mine @ theirs) / norm
    return k if abs(k - 1) > 1e-6 and close(mine, k * theirs, 1e-4) else None


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80]


def _values(found: torch.Tensor, expected: torch.Tensor) -> str:
    k = factor(found, expected)
    if k is not None:
        return f"{k:.4g} times the right values"
    if found.dtype.is_floating_point and bool(found.isnan().any()):
        return f"values that were never written ({int(found.isnan().sum())} of {found.numel()} are NaN)"
    limit = TOLERANCE.get(expected.dtype, 0.0) * max(expected.double().abs().max().item(), 1e-30)
    wrong = ((found.double() - expected.double()).abs() > limit).flatten().nonzero().flatten().tolist()
    first = wrong[0]
    return (
        f"{len(wrong)} wrong of {expected.numel()} values; the first is element {first}: {found.flatten()[first].item():.6g}, "
        f"expected {expected.flatten()[first].item():.6g}"
    )


# ---- checks ----


def value(says: str = "every rank returns the right values") -> Check:
    """Every rank's result is the expected one."""

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected, strict=True)):
            if (what := difference(found, expected)) is not None:
                return f"rank {rank} returned {what}"
        return None

    return Check("value", says, wrong)


def bytes_sent(expected: Callable[[Case], Sequence[int]], says: str, slack: Callable[[Case], int] = lambda case: 64) -> Check:
    """Every rank sends at most these bytes, by rank, and `slack` more: a small message, such as a shape, costs nothing."""

    def wrong(trial: Trial) -> str | None:
        most = expected(trial.case)
        for rank, sent in enumerate(communicated(trial)):
            if sent > most[rank] + slack(trial.case):
                return f"rank {rank} sent {sent} bytes; {most[rank]} are enough"
        return None

    return Check("bytes", says, wrong)


def steps(expected: Callable[[Case], float], says: str, slack: Callable[[Case], float] = lambda case: 0) -> Check:
    """The run takes at most this many steps: messages that follow one another, on a network where each takes one second."""

    def wrong(trial: Trial) -> str | None:
        most = expected(trial.case) + slack(trial.case)
        took = steps_taken(trial)
        return None if took <= most + 1e-9 else f"took {took:g} steps; {expected(trial.case):g} are enough"

    return Check("steps", says, wrong)


def steps_taken(trial: Trial) -> float:
    """The steps of a run: on the virtual clock its makespan; on real ranks, from the order in which messages were posted and ended."""
    if trial.world in ("relay", "sim"):
        return trial.trace.makespan
    return max(steps_of(trial.trace.messages()), default=-1) + 1


def communicated(trial: Trial) -> list[int]:
    """Bytes that each rank sent, by rank. One of torch's own collectives counts what a ring moves (broadcast and reduce: its payload)."""
    n = trial.world_size
    sent = list(trial.trace.bytes_sent)
    for event in trial.trace.events:
        size = len(event.group.ranks) or n
        if event.kind in RING_FACTOR:
            sent[event.rank] += round(event.nbytes * RING_FACTOR[event.kind] * (size - 1) / size)
    return sent


RING_FACTOR = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
    "gather": 1,
    "scatter": 1,
}


def received(trial: Trial) -> list[int]:
    """Bytes that each rank received, by rank; of torch's own collectives, what `communicated` counts."""
    sent = trial.trace.bytes_sent
    return [r + c - s for r, c, s in zip(trial.trace.bytes_received, communicated(trial), sent, strict=True)]


def everywhere(check: Check, trials: Sequence[Trial]) -> tuple[str, Trial | None]:
    """What is wrong in the first trial that lacks the property, and that trial; "" and None if all have it."""
    if not trials:
        return "no case has run", None
    for trial in trials:
        if trial.error is not None:
            return f"{trial.case.label}: the run did not end", trial
        if (what := check.wrong(trial)) is not None:
            return f"{trial.case.label}: {what}", trial
    return "", None


def too_few_bytes(exercise: Exercise, trials: Sequence[Trial]) -> tuple[str, Trial | None]:
    """Whether right values came without the bytes that they take: then they did not come from the other ranks' messages."""
    for trial in trials:
        for rank, (got, least) in enumerate(zip(received(trial), exercise.least_received(trial.case), strict=True)):
            if got < least:
                return (
                    f"{trial.case.label}: rank {rank} received {got} bytes in messages; the result takes at least {least}. "
                    "Only data that comes in messages counts",
                    trial,
                )
    return "", None


# ---- misconceptions that many exercises share ----


def failed(trials: Sequence[Trial]) -> list[Trial]:
    """The trials whose values are wrong, or that did not end."""
    return [trial for trial in trials if trial.error is not None or not right(trial)]


def right(trial: Trial) -> bool:
    """Whether every rank returned the expected values."""
    return trial.error is None and all(same(found, expected) for found, expected in zip(trial.results, trial.case.expected, strict=True))


def _sends_first(trials: Sequence[Trial]) -> bool:
    errors = [trial.error for trial in trials if isinstance(trial.error, DeadlockError)]
    return bool(errors) and all(error.cycle and {kind for kind, _, _ in error.waiting.values()} == {"send"} for error in errors)


def _receives_first(trials: Sequence[Trial]) -> bool:
    errors = [trial.error for trial in trials if isinstance(trial.error, DeadlockError)]
    return bool(errors) and all(error.cycle and {kind for kind, _, _ in error.waiting.values()} == {"recv"} for error in errors)


def unwaited(trials: Sequence[Trial], kind: str) -> list[tuple[int, str]]:
    """The rank and line of each send, or receive, that nobody waited for."""
    return sorted({(call.rank, call.where) for trial in trials for call in trial.unwaited if call.kind == kind})


SENDS_FIRST = Misconception(
    "everyone sends first",
    "Every rank sends first and waits until its message is received, but no rank has posted a receive: all of them wait for ever.",
    _sends_first,
)
RECEIVES_FIRST = Misconception(
    "everyone receives first",
    "Every rank receives first and waits, but no rank has sent anything yet: all of them wait for ever.",
    _receives_first,
)
WORKS_THROWN_AWAY = Misconception(
    "works thrown away",
    "isend and irecv only start a message. Nobody waits for the works that they return, so the data may never arrive.",
    lambda trials: bool(unwaited(trials, "recv") and unwaited(trials, "send")),
)
WAIT_FORGOTTEN = Misconception(
    "receive's wait forgotten",
    "A receive is used before anybody has waited for it: until wait() returns, its tensor does not hold the data.",
    lambda trials: bool(unwaited(trials, "recv")),
)
MESSAGES = (SENDS_FIRST, RECEIVES_FIRST, WORKS_THROWN_AWAY, WAIT_FORGOTTEN)  # wherever isend or irecv is used


def on_ranks(ranks: Sequence[int], world_size: int) -> str:
    """ "on rank 2", "on ranks 1 to 3"."""
    return f"on {ranks_text(ranks, range(world_size))}"
