"""The checks, questions and misconceptions that many exercises share.

value() · bytes_sent(…) · at_most(…) · steps(…)                       checks
ask_sent(…) · ask_steps(…)                                            questions
MESSAGES · CHANGES_ITS_INPUT · only_root_zero · …                     misconceptions
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from parallel101.laboratory.grade.compared_values import difference, same
from parallel101.laboratory.grade.exercise import (
    P2P,
    Case,
    Check,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.record.errors import DeadlockError, MisuseError
from parallel101.laboratory.record.events import Event
from parallel101.laboratory.record.program_lines import shown


def value(
    says: str = "every rank returns the right values", keeps: str = "", parts: Sequence[str] = ()
) -> Check:
    """Return a check that every rank's result is the expected one.

    Args:
        keeps: the names of the function's first arguments, a letter each: tensors that it must not
            change, such as "xg". The result must not share the memory of the first one.
        parts: names for the parts of a result that the exercise's program puts together, e.g. ("the
            loss", "the gradients").
    """

    def wrong(trial: Trial) -> str | None:
        pairs = zip(trial.results, trial.case.expected, strict=True)
        for rank, (found, expected) in enumerate(pairs):
            several = not isinstance(found, str) and not isinstance(expected, str)
            for part, mine, theirs in zip(parts, found, expected) if parts and several else ():
                if (what := difference(mine, theirs)) is not None:
                    return f"on rank {rank}, {part}: {what}"
            if (what := difference(found, expected)) is not None:
                return f"rank {rank} returned {what}"
        for rank, (changed, shared) in enumerate(zip(trial.changed, trial.shared)):
            for place in changed:
                if place < len(keeps):
                    return f"rank {rank} changed its {keeps[place]}, which must stay as it is"
            if keeps and 0 in shared:
                return f"rank {rank}'s result has the memory of {keeps[0]}; expected a new tensor"
        return None

    return Check("value", says, wrong)


SMALL = 64  # bytes that a rank may send besides, such as a shape


def at_most(
    kind: str,
    says: str,
    measured: Callable[[Trial], Any],
    enough: Callable[[Case], Any],
    text: str = "rank {rank} sent {found} bytes; {most} are enough",
    slack: Callable[[Case], float] = lambda case: 0,
    only: Callable[[Trial], bool] = lambda trial: True,
    why: str = "",
) -> Check:
    """Return a check that a number is at most what is enough, and `slack` more.

    Args:
        measured: the number, or one for each rank, by rank.
        enough: in the same way.
        text: what is wrong, with {rank}, {found} and {most}.
        only: the runs for which `slack` is.
        why: the reason why more is allowed, for the verdict; "": the verdict doesn't mention it.
    """

    def over(trial: Trial, more: float) -> str | None:
        found, most = measured(trial), enough(trial.case)
        for rank, one in enumerate(found if isinstance(found, list) else [found]):
            limit = most[rank] if isinstance(most, list | tuple) else most
            if not one <= limit + more:  # NaN too
                return text.format(rank=rank, found=one, most=limit)
        return None

    def allowed(trial: Trial) -> str | None:
        what = over(trial, 0) if why else None
        return what and f"{what.replace('; ', ', where ')}: allowed, since {why}"

    def wrong(trial: Trial) -> str | None:
        return over(trial, slack(trial.case) if only(trial) else 0)

    return Check(kind, says, wrong, allowed)


def bytes_sent(
    expected: Callable[[Case], Sequence[int]], says: str, slack: Callable[[Case], int] | None = None
) -> Check:
    """Return a check that every rank sends at most these bytes, by rank, and `slack` more.

    Without `slack`, a small message, such as a shape, costs nothing, and the verdict says so.
    """
    why = "" if slack else "small messages, such as a shape, cost nothing here"
    more = slack or (lambda case: SMALL)
    return at_most("bytes", says, communicated, expected, slack=more, why=why)


def steps(
    expected: Callable[[Case], float],
    says: str,
    slack: Callable[[Case], float] = lambda case: 0,
    only: Callable[[Trial], bool] = lambda trial: True,
) -> Check:
    """Return a check of the number of steps that a run takes: messages that follow one another.

    On the network of these runs each message takes one second. A few small messages, such as
    shapes, don't count. `slack` is for other right solutions: blocking sends in a safe order take
    up to three steps where isend and irecv take one. It is not for a rank that sends or receives
    more messages than there are steps, nor for runs that are not as `only` says. The verdict then
    says how many steps they were, and why they are allowed.
    """

    return at_most(
        "steps",
        says,
        lambda trial: round(trial.trace.makespan - small_messages(trial), 6),
        expected,
        "took {found:g} steps; {most:g} would be enough",
        slack,
        lambda trial: _most_messages(trial) <= math.ceil(expected(trial.case)) and only(trial),
        "blocking sends in a safe order take longer than isend and irecv",
    )


def _most_messages(trial: Trial) -> int:
    """Return the number of messages of the rank that sends, or receives, the most of them."""
    large = ((e.rank, e.kind) for e in trial.trace.events if e.kind in P2P and e.nbytes > 16)
    return max(Counter(large).values(), default=0)


def ring_neighbours(says: str) -> Check:
    """Return a check that every rank sends to its two neighbours on the ring, and to no other."""

    def wrong(trial: Trial) -> str | None:
        n = trial.world_size
        for event in trial.trace.events:
            left, right = (event.rank - 1) % n, (event.rank + 1) % n
            if event.kind == "send" and event.peer not in (left, right, None):
                return (
                    f"rank {event.rank} sent to rank {event.peer}; its neighbours are ranks "
                    f"{left} and {right}"
                )
        return None

    return Check("peers", says, wrong)


def small_messages(trial: Trial, most_bytes: int = 64) -> int:
    """Return the number of small messages that the busiest rank sends or receives.

    The smallest messages count, up to `most_bytes` together.
    """
    sizes: list[list[int]] = [[] for _ in range(trial.world_size)]
    for event in trial.trace.events:
        if event.kind in P2P and event.nbytes <= 16:
            sizes[event.rank].append(event.nbytes)
    return max(sum(total <= most_bytes for total in accumulate(sorted(own))) for own in sizes)


def communicated(
    trial: Trial, counts: Callable[[Event], bool] = lambda event: True, direction: int = 0
) -> list[int]:
    """Return the bytes that each rank sent, by rank; with `direction` 1, those that it received.

    Torch's own collectives count as a ring moves them, gather and scatter as one root does. Only
    events that `counts` are looked at.
    """
    total = [0] * trial.world_size
    for event in filter(counts, trial.trace.events):
        if event.kind == ("send", "recv")[direction]:
            total[event.rank] += event.nbytes
        else:
            n = len(event.group.ranks) or trial.world_size
            total[event.rank] += _of_collective(event, n)[direction]
    return total


def received(trial: Trial, counts: Callable[[Event], bool] = lambda event: True) -> list[int]:
    """Return the bytes that each rank received, by rank, as `communicated` counts them."""
    return communicated(trial, counts, 1)


RING_ONCE = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
RING_FACTOR = {"all_reduce": 2, **dict.fromkeys(RING_ONCE, 1)}


def _of_collective(event: Event, n: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives in one of torch's own collectives; else 0."""
    others = round(event.nbytes * (n - 1) / n)
    if event.kind in ("gather", "scatter"):
        gathered = (0, others) if event.rank == event.peer else (event.nbytes, 0)
        return gathered if event.kind == "gather" else gathered[::-1]
    moved = round(event.nbytes * RING_FACTOR.get(event.kind, 0) * (n - 1) / n)
    return moved, moved


def tolerated(check: Check, trials: Sequence[Trial]) -> str:
    """Return what differs from `check` and is allowed all the same; "" if nothing is."""
    told = ((what, trial) for trial in reversed(trials) if (what := check.allowed(trial)))
    return next((f"{trial.case.label}: {what}" for what, trial in told), "")


def too_few_bytes(exercise: Exercise, trial: Trial) -> str | None:
    """Return what shows that right values came without the bytes that they take.

    Such values did not come from the other ranks' messages.
    """
    pairs = zip(received(trial), exercise.least_received(trial.case), strict=True)
    for rank, (got, least) in enumerate(pairs):
        if got < least:
            return (
                f"rank {rank} received {got} bytes in messages; the result takes at least "
                f"{least}. Only data that comes in messages counts"
            )
    return None


def never_waited(trial: Trial) -> str | None:
    """Return a sentence about a call that was never waited for.

    Without the wait, right values are luck: a message may still be in flight when the function
    returns.
    """
    for call in trial.unwaited:
        kind = {"send": "isend", "recv": "irecv"}.get(call.kind, call.kind)
        return f"rank {call.rank} never waits for the {kind} at {shown(call.where)}"
    return None


# ---- questions that many exercises ask ----


def ask_sent(
    ask: str,
    case: Callable[[], Case],
    measured: Callable[[Trial], int] = lambda trial: max(communicated(trial)),
) -> Question:
    """Return a question about the bytes that a rank sends: by default, the busiest one."""
    return Question("sent", ask, case, measured, "bytes")


def ask_steps(ask: str, case: Callable[[], Case]) -> Question:
    """Return a question about the steps that a run takes."""
    return Question("steps", ask, case, lambda trial: int(trial.trace.makespan), "steps")


# ---- misconceptions that many exercises share ----


def all_show(items: Iterable[Any], shows: Callable[..., bool]) -> bool:
    """Return whether there are items, and all of them show this. Tuples are several arguments."""
    items = list(items)
    return bool(items) and all(
        shows(*item) if isinstance(item, tuple) else shows(item) for item in items
    )


def on_ranks(trials: Iterable[Trial]) -> list[tuple[Trial, int]]:
    """Return each of these trials with each of its ranks."""
    return [(trial, rank) for trial in trials for rank in range(trial.world_size)]


def failed(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose values are wrong, or that did not end."""
    return [trial for trial in trials if not right(trial)]


def ended(trials: Sequence[Trial], least: int = 1) -> list[Trial]:
    """Return the trials on `least` ranks or more that ended without an error."""
    return [trial for trial in trials if trial.world_size >= least and trial.error is None]


def wrong_trials(trials: Sequence[Trial], least: int = 1) -> list[Trial]:
    """Return the trials on `least` ranks or more that ended with wrong values."""
    return [trial for trial in ended(trials, least) if not right(trial)]


def right(trial: Trial) -> bool:
    """Return whether every rank returned the expected values."""
    return trial.error is None and same(trial.results, trial.case.expected)


def everyone_waits_in(kind: str) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether each deadlock is a cycle of ranks that all wait in this call."""

    def waits(error: DeadlockError) -> bool:
        return bool(error.cycle) and {what for what, *_ in error.waiting.values()} == {kind}

    return lambda trials: all_show(
        [trial.error for trial in trials if isinstance(trial.error, DeadlockError)], waits
    )


def never_waits_for(*kinds: str) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether somebody never waited for a call of each of these kinds."""
    return lambda trials: {*kinds} <= {call.kind for trial in trials for call in trial.unwaited}


SENDS_FIRST = Misconception(
    "everyone sends first",
    "Every rank sends first and waits until its message is received, but no rank has posted a "
    "receive: all of them wait forever.",
    everyone_waits_in("send"),
)
MESSAGES = (  # wherever a call may return a work
    SENDS_FIRST,
    Misconception(
        "everyone receives first",
        "Every rank receives first and waits, but no rank has sent anything yet: all of them wait "
        "forever.",
        everyone_waits_in("recv"),
    ),
    Misconception(
        "works thrown away",
        "isend and irecv only start a message. Nobody waits for the works that they return, so the "
        "data may never arrive.",
        never_waits_for("recv", "send"),
    ),
    Misconception(
        "receive's wait forgotten",
        "A receive is used before anybody has waited for it: until wait() returns, its tensor does "
        "not hold the data.",
        never_waits_for("recv"),
    ),
    Misconception(
        "send's wait forgotten",
        "Nobody waits for a send. Until its wait() returns, the message may still be read from the "
        "tensor, so the tensor must not change.",
        never_waits_for("send"),
    ),
    Misconception(
        "changed while it is sent",
        "A tensor is written to between isend, or a collective with async_op=True, and its wait(). "
        "It may still be read, or be written later: what arrives may be old or new values.",
        lambda trials: any(getattr(t.error, "kind", "") == "ChangedWhileSent" for t in trials),
    ),
    Misconception(
        "collective's wait forgotten",
        "A collective with async_op=True only starts. Nobody waits for the work that it returns, "
        "so its result may never arrive.",
        lambda trials: any(call.kind not in P2P for trial in trials for call in trial.unwaited),
    ),
)
CHANGES_ITS_INPUT = Misconception(
    "clobbers its input",
    "The function writes into the tensor that it is given. The caller still needs it, for example "
    "as its own gradient.",
    lambda trials: any(0 in places for trial in trials for places in trial.changed),
)
SHARES_MEMORY = Misconception(
    "result shares memory with its input",
    "A rank returns its x itself, or a view of it, where a new tensor is due. A caller that "
    "changes the result in place would then change x too, but only on some ranks.",
    lambda trials: not failed(trials) and any(0 in s for trial in trials for s in trial.shared),
)
ITS_INPUT = (CHANGES_ITS_INPUT, SHARES_MEMORY)  # where x stays and the result is new


@mistake(
    "root hard-coded to 0",
    "The code is right if the root is rank 0, and only then: somewhere it takes rank 0 for "
    "the root.",
)
def only_root_zero(trials: Sequence[Trial]) -> bool:
    """Return whether runs are right wherever the root is 0, and wrong wherever it is not."""
    several = [trial for trial in trials if trial.world_size > 1]
    zero = [trial for trial in several if trial.case.facts["root"] == 0]
    other = [trial for trial in several if trial.case.facts["root"] != 0]
    return bool(zero and other) and not failed(zero) and len(failed(other)) == len(other)


@mistake(
    "other ranks return something",
    "The root's result is right. The other ranks must return None, and they return something else.",
)
def only_where_none_is_due(trials: Sequence[Trial]) -> bool:
    """Return whether every wrong result is something in place of None."""
    wrong = failed(trials)
    return len(ended(wrong)) == len(wrong) > 0 and all(
        expected is None or same(found, expected)
        for trial in wrong
        for found, expected in zip(trial.results, trial.case.expected)
    )


@mistake(
    "collective not called on every rank",
    "A collective is called on some ranks only, such as inside `if rank == 0`. Every rank "
    "must call it, also one that only receives, and in the same order as the others.",
)
def not_every_rank(trials: Sequence[Trial]) -> bool:
    """Return whether ranks wait in a collective that others don't call."""
    return any(rank_missing(trial.error) for trial in trials)


def rank_missing(error: BaseException | None) -> bool:
    """Return whether not all ranks have called the collective that ended the run."""
    if isinstance(error, DeadlockError):
        kinds = {kind for kind, _, _ in error.waiting.values()} - P2P
        return bool(kinds) and (bool(error.returned) or len(kinds) > 1)
    return isinstance(error, MisuseError) and "call different operations" in str(error)


@mistake(
    "sends what was never written",
    "A tensor of torch.empty is sent before anything was put into it. The block that a rank "
    "sends must be one that it has: look at the index, which may be off by one.",
)
def unwritten_was_sent(trials: Sequence[Trial]) -> bool:
    """Return whether values are wrong, and a message has what torch.empty gives on these ranks."""
    return any(
        not isinstance(value, bool) and (value != value or value in NEVER_WRITTEN)
        for trial in failed(trials)
        for message in trial.trace.messages()
        for value in (message.payload or ())[:64]
    )


# what fill_new_tensors puts into whole numbers; floating-point numbers become NaN
NEVER_WRITTEN = {torch.iinfo(dtype).max for dtype in (torch.int64, torch.int32)}
