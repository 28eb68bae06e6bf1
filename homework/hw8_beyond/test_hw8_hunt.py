"""Exercises 24b to 24d, a bug hunt: tools that find the rank, the line and the cause of a fault.

The programs run in `exercises/bug_hunt.py`, on the virtual clock, with faults drawn from
the seed of the cases. The learner's function sees only their records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallel101.laboratory.exercises.bug_hunt import CAUSES, Hunt, hunt
from parallel101.laboratory.grade.exercise import (
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import ended
from parallel101.laboratory.record.errors import DeadlockError

PLACES = ("rank", "line", "cause")
SHOWN = {"hang": "Wednesday", "slow": "January", "wrong": "Thursday"}  # seeds in the notebook


def case_of(found: Hunt) -> Case:
    """One run of the learner's function, on the record of a run with a fault."""
    facts: dict[str, Any] = {"n": found.world_size, **found.facts}
    records = found.records()
    if isinstance(found.error, DeadlockError):
        facts["stuck"] = {
            rank: [row["line"] for row in own if row["end"] is None]
            for rank, own in enumerate(records)
        }
        facts["last"] = {own[-1]["line"] for own in records}
    if found.kind == "slow":
        facts["waits"] = [waits(own) for own in records]
    if found.kind == "wrong":
        facts["differ"] = [
            rows[0]["line"] for rows in zip(*records) if any(r != rows[0] for r in rows)
        ]
    return Case(
        [(records,)],
        [list(found.answer)],
        note=f"the record of {found.world_size} ranks",
        facts=facts,
        computes=True,
    )


def waits(own: Sequence[dict[str, Any]]) -> float:
    """How long a rank was in calls that wait for others."""
    return sum(row["end"] - row["posted"] for row in own if row["call"] in ("recv", "all_reduce"))


def cases_of(kind: str, each: int) -> Callable[[Draw], list[Case]]:
    """So many runs of each cause. One of them has its fault on rank 0."""

    def cases(draw: Draw) -> list[Case]:
        first = draw.integer(0, 2)
        found = []
        for cause in CAUSES[kind]:
            for _ in range(each):
                number = len(found)
                rank = 0 if number == first else draw.integer(1, 5)
                found.append(hunt(kind, str(draw.integer(0, 10**9)), cause, rank))
        return [case_of(one) for one in found]

    return cases


# ---- checks ----


class Answer(NamedTuple):
    """What was said of one run, beside what is right."""

    said: list[Any]  # rank, line, cause
    right: list[Any]
    facts: dict[str, Any]


def answers(trials: Sequence[Trial]) -> list[Answer]:
    return [
        Answer(list(trial.results[0]), trial.case.expected[0], trial.case.facts)
        for trial in ended(trials)
        if isinstance(trial.results[0], list | tuple) and len(trial.results[0]) == 3
    ]


def names(place: int) -> Check:
    """The function names this part of the answer: of wrong ones, nothing is told but the case."""

    def wrong(trial: Trial) -> str | None:
        said = trial.results[0]
        if not isinstance(said, list | tuple) or len(said) != 3:
            return f"the function returned {said!r}; expected (rank, line, cause)"
        return (
            None
            if said[place] == trial.case.expected[0][place]
            else f"{PLACES[place]} {said[place]!r} is not where the fault is"
            if place < 2
            else f"{said[place]!r} is not the cause"
        )

    return Check("value", f"the {PLACES[place]}", wrong)


CHECKS = tuple(map(names, range(3)))


# ---- misconceptions ----


def wrong_in(place: int, shows: Callable[[Answer], bool]) -> Callable[[Sequence[Trial]], bool]:
    """Whether every answer with a wrong rank, line or cause shows this, and there are several."""

    def seen(trials: Sequence[Trial]) -> bool:
        found = [answer for answer in answers(trials) if answer.said[place] != answer.right[place]]
        return len(found) > 1 and all(map(shows, found))

    return seen


def is_victim(answer: Answer) -> bool:
    """The named rank hangs because of another one."""
    return bool(answer.facts["stuck"].get(answer.said[0]))


def waits_longer(answer: Answer) -> bool:
    """The named rank waited longer than the culprit."""
    waited, rank = answer.facts["waits"], answer.said[0]
    return rank in range(len(waited)) and waited[rank] > waited[answer.right[0]]


def line_of_wait(answer: Answer) -> bool:
    """The named line is where some rank was at the end."""
    stuck = [line for lines in answer.facts["stuck"].values() for line in lines]
    at_the_end = {*stuck, *answer.facts["last"]}
    return answer.said[0] == answer.right[0] and answer.said[1] in at_the_end


def line_of_call(answer: Answer) -> bool:
    """Where a rank waits for others, in place of where one of them computes or sends."""
    lines = answer.facts["lines"]
    calls = {lines[name] for name in ("send", "recv", "first_recv", "bucket", "loss")}
    return answer.said[0] == answer.right[0] and answer.said[1] in calls


@mistake(
    "same answer for every run",
    "The function names the same rank and line whatever the record says. The grader draws "
    "other faults, so only a tool that reads the record finds them.",
)
def same_answer(trials: Sequence[Trial]) -> bool:
    found = answers(trials)
    said = {(answer.said[0], answer.said[1]) for answer in found}
    return len(found) > 3 and len(said) == 1


@mistake(
    "one cause for every run",
    "The function names the same cause for every run. That ranks wait, or differ, is the "
    "symptom. Ask what the culprit did that the other ranks did not.",
)
def one_cause(trials: Sequence[Trial]) -> bool:
    found = answers(trials)
    return (
        len(found) > 3
        and len({answer.said[2] for answer in found}) == 1
        and all(answer.said[0] == answer.right[0] for answer in found)
    )


def slow_once(answer: Answer) -> bool:
    return answer.said[0] == answer.facts["once"]


@mistake(
    "rank 0 taken for right",
    "The function finds the culprit unless it is rank 0: it compares with one rank. Rank 0 "
    "can be wrong as well, so ask the majority.",
)
def rank_zero_right(trials: Sequence[Trial]) -> bool:
    """The answer is another rank whenever the fault is on rank 0, and only then."""
    found = answers(trials)
    return any(answer.right[0] == 0 for answer in found) and all(
        (answer.said[0] == answer.right[0]) == (answer.right[0] != 0) for answer in found
    )


def may_differ(answer: Answer) -> bool:
    return answer.said[1] == answer.facts["lines"]["local"]


def later_difference(answer: Answer) -> bool:
    return answer.said[0] == answer.right[0] and answer.said[1] in answer.facts["differ"]


def questions(kind: str) -> tuple[Question, ...]:
    """What the learner says of the program that the notebook shows."""

    def answer(place: int) -> Callable[[Trial], Any]:
        return lambda trial: trial.case.expected[0][place]

    ask = {
        "rank": "Which rank is the culprit?",
        "line": "Which line?",
        "cause": f"Which cause: {', '.join(CAUSES[kind])}?",
    }
    return tuple(
        Question(name, ask[name], lambda: case_of(hunt(kind, SHOWN[kind])), answer(place))
        for place, name in enumerate(PLACES)
    )


def hunting(number: str, kind: str, title: str, each: int, **others: Any) -> Exercise:
    return Exercise(
        number=number,
        function=f"find_{kind}",
        title=title,
        points=2,
        cases=cases_of(kind, each),
        checks=CHECKS,
        least_received=lambda case: [0],
        questions=questions(kind),
        **others,
    )


EXERCISES = [
    hunting(
        "24b",
        "hang",
        "Bug hunt: it hangs",
        2,
        misconceptions=(
            same_answer,
            Misconception(
                "victim named",
                "The function names a rank that waits. It does what it should: the message or "
                "the rank that it waits for never comes. Follow the wait to the rank that did "
                "something else before.",
                wrong_in(0, is_victim),
            ),
            Misconception(
                "line of the wait",
                "The rank is right, but the line is where somebody waits now. The fault came "
                "before: where the culprit's calls first differ from those of the others.",
                wrong_in(1, line_of_wait),
            ),
            one_cause,
        ),
        hints=(
            "All ranks run the same program. What do their records have in common, and where does "
            "one of them first leave the others?",
            "Compare the k-th calls of all ranks that have one: their lines and groups, and for a "
            "message the distance to the peer, (peer − rank) % n. A rank that has no k-th call is "
            "stuck if its last call has no end. Otherwise it has returned.",
            "For each k, the odd one out is the culprit. Same line, but another distance: wrong "
            "peer. Same line, but another group: different order. Another line, or returned "
            "already: missing call, and the line is that of the others.",
        ),
    ),
    hunting(
        "24c",
        "slow",
        "Bug hunt: it is slow",
        2,
        misconceptions=(
            same_answer,
            Misconception(
                "slow once",
                "The function names a rank that was slow in one step only, such as one that "
                "read a file. The culprit is slow in every step.",
                wrong_in(0, slow_once),
            ),
            Misconception(
                "victim named",
                "The function names a rank that waits long. In a synchronous step everybody "
                "waits for the slowest rank, which itself waits the least.",
                wrong_in(0, waits_longer),
            ),
            Misconception(
                "waiting taken for work",
                "The rank is right, but the line is a call in which ranks wait for others. Its "
                "time says when the last of them came, not what it cost.",
                wrong_in(1, line_of_call),
            ),
            one_cause,
        ),
        hints=(
            "Which times in the record does a rank decide on its own, and which depend on others? "
            "Only the first kind can tell who is slow.",
            "A span's time is the rank's own, and so are the bytes that it sends, and the order in "
            "which it calls. Compare each with the median of the ranks.",
            "For each line, add up (end − posted) of the spans, and nbytes of the sends. More than "
            "1.5 times the median: slow compute, or large message. If neither: the rank whose "
            "first recv comes before its first send has a late send.",
        ),
    ),
    hunting(
        "24d",
        "wrong",
        "Bug hunt: it is wrong",
        2,
        misconceptions=(
            same_answer,
            Misconception(
                "compares what may differ",
                "The function names the line of the local gradient. It belongs to a rank's own "
                "data, so it differs from rank to rank in a right program too.",
                wrong_in(1, may_differ),
            ),
            rank_zero_right,
            Misconception(
                "later difference",
                "The rank is right, but the line is a later one. Once a value is wrong, "
                "everything computed from it differs too: only the first difference counts.",
                wrong_in(1, later_difference),
            ),
            one_cause,
        ),
        hints=(
            "Which of the written values must be equal on all replicas, and which need not be? Who "
            "is the first to leave the majority?",
            "Go through the k-th values of all ranks. If most agree and one doesn't, it is the "
            "culprit, and this is its line. If all differ, it is the local gradient.",
            "Weights that are those of the step before: skipped update. For a gradient, compare "
            "the culprit's value with others: 1/n of the majority's is divided twice; its own "
            "local gradient, one entry earlier in its record, is not summed; its own gradient of "
            "the step before, three entries earlier, is stale.",
        ),
    ),
]
