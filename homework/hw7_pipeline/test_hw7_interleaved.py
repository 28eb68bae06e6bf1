"""Exercise 20a: interleaved 1F1B, the order of work of a rank with several stages."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101 import compute, span
from parallel101.laboratory.exercises.pipeline_exercises import (
    ROWS,
    WIDTH,
    example,
    holds_at_most,
    in_flight,
    make_case,
    mean_square,
    one_at_a_time,
    slots,
    stage_of,
)
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import all_show, failed, on_ranks, value
from parallel101.laboratory.record.units import listed


def run_order(
    order: Callable[..., list[str]],
    seed: int,
    inputs: Any,
    targets: Any,
    microbatches: int,
    chunks: int,
) -> list[Any] | None:
    """Run the order of work that the learner's function gives for this rank.

    Returns the order, the loss and the gradients by stage.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    actions, orders, wrong = all_orders(order, rank, n, microbatches, chunks)
    with span("order", warm_ups=[warm_up(of_rank) for of_rank in orders]):
        pass
    if wrong:  # one rank says so, and always the same one
        if rank == min(wrong):
            raise wrong[rank]
        return None
    stuck = where_stuck(orders, n * chunks - 1)
    last = n * chunks - 1
    stages = {number: stage_of(seed, number) for number in range(rank, n * chunks, n)}
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sends, losses = [], []

    def receive(stage: int, tag: int) -> Tensor:
        tensor = torch.empty(ROWS, WIDTH, dtype=torch.float64)
        dist.recv(tensor, stage % n, tag=tag) if stage % n != rank else tensor.copy_(local.pop(tag))
        return tensor

    def send(tensor: Tensor, stage: int, tag: int) -> None:
        if stage % n != rank:
            sends.append((dist.isend(tensor, stage % n, tag=tag), tensor))
        else:
            local[tag] = tensor

    local: dict[int, Tensor] = {}
    for number, kind, i in orders[rank]:
        if stuck.get(rank) == (number, kind, i) and rank == min(stuck):
            raise ValueError(f"{WAITING}: {waiting(stuck, last)}")
        if kind == "F":
            x = (
                inputs[i]
                if number == 0
                else receive(number - 1, 1000 * (number - 1) + i).requires_grad_()
            )
            with span("forward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y = stages[number](x)
            if number == last:
                y = mean_square(y, targets[i]) / microbatches
                losses.append(y.detach())
            else:
                send(y.detach(), number + 1, 1000 * number + i)
            held[number, i] = x, y
        else:
            dy = None if number == last else receive(number + 1, 100_000 + 1000 * (number + 1) + i)
            x, y = held.pop((number, i))
            with span("backward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y.backward(dy)
            if number:
                send(x.grad, number - 1, 100_000 + 1000 * number + i)
    for message, _ in sends:
        message.wait()
    return [
        actions,
        sum(losses) if losses else None,
        [[p.grad for p in stage.parameters()] for stage in stages.values()],
    ]


Action = tuple[int, str, int]  # stage, "F" or "B", microbatch
OTHER_STAGE, ORDER_OF_CHUNKS = "stage s is on rank s mod", "passes the chunks of a rank from"
TOO_EARLY, WAITING = "comes after its forward", "the ranks wait for each other"


def text_of(action: Action) -> str:
    """Return an action as text: "4F1" for (4, "F", 1)."""
    return f"{action[0]}{action[1]}{action[2]}"


def parsed(text: str) -> Action:
    """Return the action of a text: (4, "F", 1) for "4F1"."""
    for kind in "FB":
        stage, found, i = str(text).partition(kind)
        if found and stage.isdigit() and i.isdigit():
            return int(stage), kind, int(i)
    raise ValueError(f"{text!r} is not an action: expected, for example, '4F1' or '4B1'")


def listed_actions(given: Any, rank: int) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"rank {rank}'s order is {given!r}; expected a list such as ['4F1', …]")
    return given


def check_order(work: list[Action], rank: int, n: int, microbatches: int, chunks: int) -> None:
    """Raise ValueError if this rank's order can't be right, whatever the others do."""
    for action in work:
        if action[0] % n != rank or action[0] >= n * chunks:
            raise ValueError(
                f"rank {rank} is told {text_of(action)}, but it has the stages "
                f"{listed(range(rank, n * chunks, n))} ({OTHER_STAGE} {n})"
            )
    due = [
        (stage, kind, i)
        for kind in "FB"
        for i in range(microbatches)
        for stage in range(rank, n * chunks, n)
    ]
    if Counter(work) != Counter(due):
        extra, lacking = Counter(work) - Counter(due), Counter(due) - Counter(work)
        what = (
            f"has {text_of(next(iter(extra)))} too often"
            if extra
            else f"lacks {text_of(next(iter(lacking)))}"
        )
        raise ValueError(
            f"rank {rank}'s order of {len(work)} actions {what}; expected {microbatches * chunks} "
            f"forwards and {microbatches * chunks} backwards, each once"
        )
    place = {action: k for k, action in enumerate(work)}
    for stage, kind, i in work:
        way, before = "first to the last", (stage - n, kind, i)
        if kind == "B":
            way, before = "last to the first", (stage + n, kind, i)
        if place.get(before, -1) > place[stage, kind, i]:
            what = "forward" if kind == "F" else "backward"
            raise ValueError(
                f"rank {rank} is told {stage}{kind}{i} before {text_of(before)}: the {what} of a "
                f"microbatch {ORDER_OF_CHUNKS} the {way}"
            )
        if kind == "B" and place[stage, "F", i] > place[stage, "B", i]:
            raise ValueError(
                f"rank {rank} is told {stage}B{i} before {stage}F{i}: the backward of a microbatch "
                f"{TOO_EARLY}"
            )


def needs(action: Action, last: int) -> list[Action]:
    """Return the actions that must be done before this one."""
    stage, kind, i = action
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    return [(stage, "F", i), *([(stage + 1, "B", i)] if stage < last else [])]


def all_orders(
    order: Callable[..., list[str]], rank: int, n: int, microbatches: int, chunks: int
) -> tuple[Any, list[list[Action]], dict[int, Exception]]:
    """Return this rank's result, the orders of all ranks, and the errors in them.

    Output printed while computing another rank's order is not shown: that rank calls it too.
    """
    mine = order(rank, n, microbatches, chunks)
    orders, wrong = [], {}
    for other in range(n):
        work: list[Action] = []
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                given = mine if other == rank else order(other, n, microbatches, chunks)
            work = [parsed(text) for text in listed_actions(given, other)]
            check_order(work, other, n, microbatches, chunks)
        except Exception as error:
            wrong[other] = error
        orders.append(work)
    return mine, orders, wrong


def warm_up(work: list[Action]) -> int:
    """Return the number of forwards before the first backward."""
    return next((k for k, (_, kind, _) in enumerate(work) if kind == "B"), len(work))


def where_stuck(orders: Sequence[list[Action]], last: int) -> dict[int, Action]:
    """Return, by rank, the action at which it would wait forever; empty if the orders fit."""
    left, done, before = [list(work) for work in orders], set[Action](), -1
    while len(done) > before:
        before = len(done)
        for work in left:
            while work and done.issuperset(needs(work[0], last)):
                done.add(work.pop(0))
    return {rank: work[0] for rank, work in enumerate(left) if work}


def waiting(stuck: dict[int, Action], last: int) -> str:
    """Return the waits as text: "rank 0 at 0B0 for 1B0, rank 1 at 1B0 for 2B0"."""
    return ", ".join(
        f"rank {rank} at {text_of(action)} for {text_of(needs(action, last)[-1])}"
        for rank, action in stuck.items()
    )


def order_cases(draw: Draw) -> list[Case]:
    return [
        make_case(draw, p, m, chunks)
        for p, m, chunks in ((1, 2, 2), (2, 4, 1), (2, 2, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2))
    ]


def messages_between_chunks(case: Case) -> list[int]:
    p, chunks, each = (
        case.facts["p"],
        case.facts["chunks"],
        case.facts["m"] * case.facts["activation"],
    )
    if p == 1:
        return [0]
    return [
        each * sum((s < p * chunks - 1) + (s > 0) for s in range(rank, p * chunks, p))
        for rank in range(p)
    ]


def interleaved_slots(case: Case) -> float:
    p, m, v = case.facts["p"], case.facts["m"], case.facts["chunks"]
    return 2 * m + 2 * (p - 1) / v


def interleaved_peak(case: Case, rank: int) -> int:
    m, v = case.facts["m"], case.facts["chunks"]
    return min(m * v, longest(case, rank))


def longest(case: Case, rank: int) -> int:
    """Return the number of forwards in a warm-up, if there are that many."""
    p, v = case.facts["p"], case.facts["chunks"]
    return (v - 1) * p + 2 * (p - rank - 1) + 1 if v > 1 else p - rank


def errors_say(*words: str) -> Callable[[Sequence[Trial]], bool]:
    """Return a check whether there are errors, each with at least one of these words."""
    return every(lambda trials: [str(t.error) for t in trials if t.error is not None])(
        lambda text: any(word in text for word in words)
    )


CHUNK_MAP = Misconception(
    "wrong chunk map",
    "A rank's order has stages of other ranks, such as the neighbours of its first. Stage s is on "
    "rank s mod P: the stages of a rank are P apart.",
    errors_say(OTHER_STAGE),
)
WRONG_WAY = Misconception(
    "chunks in the wrong order",
    "A microbatch goes forward through a rank's chunks from the first to the last, and backward "
    "from the last to the first. In your order it does so in another way.",
    errors_say(ORDER_OF_CHUNKS),
)
ALL_FORWARDS = Misconception(
    "GPipe with a new name",
    "Every rank does all its forwards before its first backward. The bubble is as short, but "
    "the activations of all microbatches are held.",
    lambda trials: (
        not failed(trials)
        and all(max(in_flight(t)) == t.case.facts["m"] * t.case.facts["chunks"] for t in trials)
    ),
)


def warm_ups(trial: Trial) -> list[int]:
    """Return, by rank, the number of forwards before the first backward in the given order."""
    return next(((e.args or {})["warm_ups"] for e in trial.trace.spans("order")), [])


def begins_with(trials: Sequence[Trial], expected: Callable[[Case, int], int]) -> bool:
    """Check whether all ranks begin with the expected number of forwards in each of these runs."""
    return all_show(
        on_ranks(trials), lambda trial, rank: warm_ups(trial)[rank] == expected(trial.case, rank)
    )


@mistake(
    "warm-up of one chunk",
    "The warm-up is that of plain 1F1B. With several chunks a backward is then due before the "
    "forward through the later chunks: the ranks wait.",
)
def _warm_up_of_one_chunk(trials: Sequence[Trial]) -> bool:
    """Check whether ranks with several chunks begin as with one, so that the orders don't fit."""
    wrong = [t for t in trials if t.error is not None]
    return (
        errors_say(TOO_EARLY, WAITING)(trials)
        and all(t.case.facts["chunks"] > 1 for t in wrong)
        and begins_with(
            [t for t in wrong if t.world_size > 1],
            lambda case, rank: min(case.facts["m"] * case.facts["chunks"], case.facts["p"] - rank),
        )
    )


@mistake(
    "warm-up off by one",
    "The warm-up has one forward too many or one too few. One too many holds another "
    "activation; one too few lets the ranks wait.",
)
def _warm_up_off(trials: Sequence[Trial]) -> bool:
    """Check whether every warm-up has one forward too many, or one too few."""
    many = [t for t in trials if t.world_size > 1]
    return any(
        begins_with(
            many,
            lambda case, rank, more=more: min(
                case.facts["m"] * case.facts["chunks"], max(1, longest(case, rank) + more)
            ),
        )
        for more in (1, -1)
    )


EXERCISES = [
    Exercise(
        number="20a",
        function="interleaved_schedule",
        title="Interleaved 1F1B",
        points=5,
        cases=order_cases,
        program=run_order,
        checks=(
            value(
                "the order runs, and the loss and every gradient equal one process",
                parts=("the order", "the loss", "the gradients"),
            ),
            slots(interleaved_slots, "2M + 2(P − 1)/v slots"),
            holds_at_most(
                interleaved_peak, "few activations in flight", in_slots=interleaved_slots
            ),
        ),
        weights={"value": 0.2, "steps": 0.4, "memory": 0.4},
        least_received=messages_between_chunks,
        misconceptions=(
            CHUNK_MAP,
            WRONG_WAY,
            _warm_up_of_one_chunk,
            one_at_a_time,
            ALL_FORWARDS,
            _warm_up_off,
        ),
        questions=(
            Question(
                "slots",
                "P = 4 ranks, M = 8 microbatches, v = 2 chunks: how many slots does the step take?",
                example(make_case, 4, 8, 2),
                lambda trial: trial.trace.makespan,
                "slots",
            ),
        ),
        hints=(
            "Number the forwards of a rank k = 0, 1, 2, … and find, for each k, which chunk and "
            "which microbatch it is.",
            "k // (P·v) counts groups of P microbatches; the rest, divided by P, is the chunk. For "
            "backwards, count the chunks from the last.",
            "The docstring says how many activations a rank may hold: so many forwards, "
            "at most v·M, are its warm-up. After that, backward and forward take turns. "
            "Which stage is chunk c of rank r?",
        ),
        picture="pipeline",
    )
]
