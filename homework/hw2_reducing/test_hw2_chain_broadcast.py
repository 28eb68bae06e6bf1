"""Exercise 8c: a broadcast along a chain, in segments."""

from collections.abc import Sequence

import torch

from parallel101 import Network
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.compared_values import close, same
from parallel101.laboratory.grade.exercise import (
    Case,
    Check,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    SMALL,
    ask_sent,
    bytes_sent,
    communicated,
    failed,
    only_root_zero,
    right,
    unwritten_was_sent,
    value,
)

MORE = 2.0  # steps that a right solution may take beyond the fewest


def chain_case(xs: Sequence[torch.Tensor], root: int, m: int, note: str = "") -> Case:
    """Return a broadcast in which a segment takes one second, half of it latency.

    A run takes as many seconds as it has steps of one segment.
    """
    n, x = len(xs), xs[root]
    segment = -(-x.numel() // m) * x.element_size()
    return Case(
        [(mine, root, m) for mine in xs],
        [x] * n,
        f"root {root}, {m} segment{'s' * (m > 1)}{note and ', '}{note}",
        facts={"root": root, "x": x, "m": m},
        network=Network(latency=0.5, bandwidth=2.0 * segment),
    )


def chain_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(60, 80)
    cases = [
        chain_case(draw.tensors(n, 4 * rows, 2), root, m)
        for n, root, m in ((1, 0, 3), (2, 0, 4), (2, 1, 1), (3, 0, 8), (4, 0, 1))
    ]
    cases.append(chain_case(draw.tensors(4, 1, 8 * rows), 0, 8, "one row"))
    cases.append(
        chain_case(draw.tensors(4, 7, dtype=torch.int64), draw.integer(1, 3), 7, "7 whole numbers")
    )
    cases.append(
        chain_case(
            [x.t() for x in draw.tensors(3, 3, rows + 1, dtype=torch.float64)],
            draw.integer(1, 2),
            8,
            "transposed, float64",
        )
    )
    cases.append(chain_case(draw.tensors(5, 123), 0, 7, "123 elements, which 7 doesn't divide"))
    return [*cases, chain_case(draw.tensors(5, 4 * rows, 2), draw.integer(1, 4), 16)]


def fewest(case: Case) -> int:
    """Return the fewest steps, n − 2 + m; a single rank needs none."""
    return case.world_size - 2 + case.facts["m"] if case.world_size > 1 else 0


def too_slow(trial: Trial) -> str | None:
    """Check the time, of a chain: of a ring, each rank passes on what it already has."""
    if closed(trial):
        return "every rank sends; the last one of a chain has nobody to send to"
    most, took = fewest(trial.case), trial.trace.makespan
    if took <= most + MORE:
        return None
    return f"took as long as {took:g} steps of one segment; {most} are enough"


def few_more(trial: Trial) -> str | None:
    most, took = fewest(trial.case), trial.trace.makespan
    if took <= most + 0.5:
        return None
    return f"{took:g} steps, where {most} are enough: up to {MORE:g} more are allowed"


def x_each(case: Case) -> list[int]:
    return [case.facts["x"].nbytes if case.world_size > 1 else 0] * case.world_size


def closed(trial: Trial) -> bool:
    """Return whether no rank is the end of the chain, which may go up or down the ranks."""
    return trial.world_size > 1 and min(communicated(trial)) > SMALL


def x_except_on_root(case: Case) -> list[int]:
    return [
        0 if rank == case.facts["root"] else case.facts["x"].nbytes
        for rank in range(case.world_size)
    ]


# ---- misconceptions ----


def long_chains(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that show how a chain is used: some ranks pass on several segments."""
    return [
        trial
        for trial in trials
        if trial.world_size > 3 and trial.case.facts["m"] > 2 and trial.case.facts["x"].nbytes > 99
    ]


@mistake(
    "whole tensor in one message",
    "Every rank sends x in one message. So only one link works at a time, and the chain takes "
    "n − 1 times as long as one message of S bytes.",
)
@every(long_chains)
def in_one_message(trial: Trial) -> bool:
    """Check whether results are right, but every rank sends x in one message."""
    late = trial.trace.makespan >= trial.world_size - 1  # a message of m segments takes longer
    return right(trial) and max(trial.trace.messages_sent) == 1 and late


@mistake(
    "passes on after the last segment",
    "A rank passes nothing on before it has all segments. So again only one link works at a time.",
)
@every(long_chains)
def all_before_any(trial: Trial) -> bool:
    """Check whether every rank receives all segments before it sends its first one.

    The results are right.
    """
    received: dict[int, float] = {}
    for event in trial.trace.events:
        if event.kind == "recv":
            received[event.rank] = max(event.end, received.get(event.rank, 0.0))
    passed_on = [e for e in trial.trace.events if e.kind == "send" and e.rank in received]
    late = all(event.start >= received[event.rank] for event in passed_on)
    return right(trial) and bool(passed_on) and late


@mistake(
    "sends and receives by turns",
    "A rank waits until a segment is sent, and receives the next one after that. So each of "
    "its links is idle half of the time.",
)
@every(long_chains)
def by_turns(trial: Trial) -> bool:
    """Check whether each segment that is passed on takes two steps.

    The results are right, and the ranks send no more bytes than needed.
    """
    few = max(communicated(trial)) <= trial.case.facts["x"].nbytes + 64
    turns = trial.world_size - 1 + 2 * (trial.case.facts["m"] - 1)
    return right(trial) and few and trial.trace.makespan >= turns - 0.6


@mistake(
    "flat in place of a chain",
    "The root sends every segment to every rank itself, so it sends n − 1 times x.",
)
@every(long_chains)
def from_the_root(trial: Trial) -> bool:
    """Check whether results are right, but all messages come from the root."""
    sent = communicated(trial)
    return right(trial) and sum(sent) == sent[trial.case.facts["root"]]


@mistake(
    "chain closed to a ring",
    "The last rank sends x on to the root, which has it already. These messages move nothing that "
    "anybody needs.",
)
@every(long_chains)
def closed_chain(trial: Trial) -> bool:
    """Check whether results are right, but every rank sends x."""
    return right(trial) and closed(trial)


@mistake(
    "segments in the wrong place",
    "All segments arrive, but some end up in another place than they had on the root.",
)
def segments_mixed_up(trials: Sequence[Trial]) -> bool:
    """Check whether some result has the expected segments in a different order."""
    for trial in failed(trials):
        x, m = trial.case.facts["x"].flatten(), trial.case.facts["m"]
        if trial.error is not None or x.numel() % m:
            continue
        parts = x.reshape(m, -1)
        for found in trial.results:
            if not isinstance(found, torch.Tensor) or found.numel() != x.numel():
                continue
            mine = found.flatten().reshape(m, -1)
            if same(mine, parts):
                continue
            if all(any(same(piece, part) for part in parts) for piece in mine):
                return True
    return False


@mistake(
    "remainder dropped",
    "The code cuts m equal segments. If m doesn't divide the number of elements, the last few "
    "never arrive.",
)
@every(failed)
def remainder_dropped(trial: Trial) -> bool:
    """Check whether only the remainder after m equal segments is wrong or missing."""
    x, m = trial.case.facts["x"].flatten(), trial.case.facts["m"]
    whole = x.numel() // m * m
    return whole < x.numel() and all(
        found.numel() in (whole, x.numel()) and close(found.flatten()[:whole], x[:whole])
        for found in trial.results
    )


QUESTION = lambda: chain_case([torch.ones(1000)] * 4, 0, 10)  # noqa: E731
CHAIN_BROADCAST = Exercise(
    number="8c",
    function="chain_broadcast",
    title="Broadcast along a pipelined chain",
    points=10,
    weights={"value": 0.3, "bytes": 0.2, "steps": 0.5},
    cases=chain_cases,
    checks=(
        value("every rank returns the root's x", keeps="x"),
        bytes_sent(x_each, "no rank sends x more than once"),
        Check(
            "steps", "n − 2 + m steps of S/m bytes; the last rank sends nothing", too_slow, few_more
        ),
    ),
    least_received=x_except_on_root,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        only_root_zero,
        segments_mixed_up,
        remainder_dropped,
        from_the_root,
        closed_chain,
        in_one_message,
        all_before_any,
        by_turns,
        *ITS_INPUT,
    ),
    hints=(
        "First write it for m = 1, with the position in the chain, (rank − root) mod n. Who "
        "receives nothing, and who sends nothing?",
        "Then put both messages into a loop over the segments of one result tensor, which are "
        "views: what arrives in them is in the result. Which of the two messages must have ended "
        "before the other begins, and which may still be under way in the next round of the loop?",
        "A segment must have arrived before it is sent on, but the next one can be received before "
        "that send has ended. So the loop waits for its receive and keeps the work of its "
        "isend in a list. The waits for that list come after the loop.",
    ),
    questions=(
        Question(
            "steps",
            "4 ranks, 1000 float32 numbers in 10 segments: how many steps does it take?",
            QUESTION,
            lambda trial: round(trial.trace.makespan),
            "steps",
        ),
        ask_sent("How many bytes does the busiest rank send?", QUESTION),
    ),
    watch=lambda: chain_case([origin_tensor(rank, 4, 8) for rank in range(4)], 1, 4),
)


EXERCISES = [CHAIN_BROADCAST]
