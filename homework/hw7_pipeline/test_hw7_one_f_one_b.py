"""Exercise 19: 1F1B. After the warm-up, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel101.laboratory.exercises.pipeline_exercises import (
    DETACHED,
    HELD,
    LAST_ONLY,
    NO_AVERAGE,
    SLOTS,
    holds_at_most,
    in_flight,
    messages_of,
    one_at_a_time,
    run_step,
    slots,
    step_cases,
    two_halves,
)
from parallel101.laboratory.grade.exercise import (
    Case,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    all_show,
    bytes_sent,
    ended,
    on_ranks,
    right,
    value,
)


def peaks_beyond(trials: Sequence[Trial], held: Callable[[Case, int], int]) -> bool:
    """Check whether each rank held exactly `held` microbatches in each right run with many.

    On some ranks, that is more than P − rank.
    """
    return all_show(
        (t for t in trials if right(t) and t.case.facts["m"] > t.world_size > 1),
        lambda t: in_flight(t) == [held(t.case, rank) for rank in range(t.world_size)],
    )


RENAMED = Misconception(
    "GPipe with a new name",
    "Every rank does all its forwards before its first backward. That is GPipe: it holds the "
    "activations of all M microbatches.",
    lambda trials: peaks_beyond(trials, lambda case, rank: case.facts["m"]),
)


@mistake(
    "warm-up off by one",
    "The warm-up has one forward too many or one too few. One too many holds another "
    "microbatch; one too few lets the next ranks wait.",
)
def _warm_up_off(trials: Sequence[Trial]) -> bool:
    """Check whether every rank's warm-up has one forward too many, or one too few."""
    many = [t for t in ended(trials, 2) if t.case.facts["m"] > t.world_size]

    def is_off(more: int) -> bool:
        return all_show(
            on_ranks(many),
            lambda trial, rank: (
                _warm_up(trial, rank)
                == min(trial.case.facts["m"], max(1, trial.world_size - rank + more))
            ),
        )

    return is_off(1) or is_off(-1)


def _warm_up(trial: Trial, rank: int) -> int:
    spans = [e for e in trial.trace.spans() if e.rank == rank and e.name in ("forward", "backward")]
    first = next((k for k, event in enumerate(spans) if event.name == "backward"), len(spans))
    return first


EXERCISES = [
    Exercise(
        number="19",
        function="one_f_one_b_step",
        title="1F1B",
        points=10,
        cases=step_cases,
        program=run_step,
        checks=(
            value(
                "the loss and every gradient equal one process", parts=("the loss", "the gradients")
            ),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(two_halves, "2(M + P − 1) slots"),
            holds_at_most(
                lambda case, rank: min(case.facts["m"], case.facts["p"] - rank),
                "at most P − rank microbatches in flight",
                in_slots=two_halves,
            ),
        ),
        weights={"value": 0.2, "bytes": 0.1, "steps": 0.2, "memory": 0.5},
        least_received=messages_of,
        misconceptions=(
            *MESSAGES,
            NO_AVERAGE,
            LAST_ONLY,
            DETACHED,
            one_at_a_time,
            RENAMED,
            _warm_up_off,
        ),
        questions=(HELD, SLOTS),
        hints=(
            "Draw the last rank first: it can do the backward of a microbatch right after its "
            "forward. When can the rank before it?",
            "Rank r can do P − r forwards before the first gradient comes back to it. Each "
            "backward then frees the activations of one microbatch.",
            "After the warm-up, each backward makes room for one more forward. When are "
            "there no forwards left? And how long is the warm-up if there are fewer "
            "microbatches than stages?",
        ),
        picture="pipeline",
    )
]
