"""Exercise 5: ring all-gather. Every rank returns all x, in the order of the ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import every, more_than, several_ranks
from parallel101.laboratory.grade.compared_values import origins
from parallel101.laboratory.grade.exercise import Case, Draw, Exercise, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    ask_sent,
    ask_steps,
    bytes_sent,
    communicated,
    failed,
    on_ranks,
    right,
    ring_neighbours,
    steps,
    unwritten_was_sent,
    value,
)


def all_gather_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    return Case([(x,) for x in xs], [torch.cat(list(xs))] * len(xs), note, facts={"xs": xs})


def all_gather_cases(draw: Draw) -> list[Case]:
    cases = [all_gather_case(draw.tensors(n, 60, 2)) for n in (1, 2, 3, 4)]
    cases.append(all_gather_case(draw.tensors(3, 1, dtype=torch.int64), "1 whole number each"))
    cases.append(
        all_gather_case(
            [x.t() for x in draw.tensors(4, 3, 51, dtype=torch.float64)], "transposed, float64"
        )
    )
    return [*cases, all_gather_case(draw.tensors(5, 61, 2))]


def all_but_own(case: Case) -> list[int]:
    return [(case.world_size - 1) * case.facts["xs"][0].nbytes] * case.world_size


@mistake(
    "gather then broadcast",
    "All data goes through one rank, which sends far more than the others: its link is busy "
    "while theirs are idle.",
)
@every(several_ranks)
def through_one_rank(trial: Trial) -> bool:
    """Check whether some rank sends more than its part, while another sends x at most once.

    The results are right.
    """
    sent, nbytes = communicated(trial), trial.case.facts["xs"][0].nbytes
    return right(trial) and max(sent) > all_but_own(trial.case)[0] and min(sent) <= nbytes


@mistake(
    "slot by step in place of origin",
    "What arrives is put into the slot of the step in which it arrived. In one step each rank "
    "gets another rank's x, so the ranks' results differ: the slot must be that of the rank "
    "from which the data came.",
)
@every(lambda trials: more_than(2)(failed(trials)))
def by_step(trial: Trial) -> bool:
    """Check whether every rank puts what arrives in step s into slot s or s + 1.

    The rank's own x may be anywhere.
    """
    return any(_arrivals(trial, way, shift) for way in (1, -1) for shift in (0, 1))


def _arrivals(trial: Trial, way: int, shift: int) -> bool:
    n = trial.world_size
    for rank, result in enumerate(trial.results):
        found = origins(result, trial.case.facts["xs"])
        if found is None:
            return False
        in_place = [
            slot
            for slot, source in enumerate(found)
            if source == (rank - way * (slot + 1 - shift)) % n
        ]
        if len(in_place) < n - 2 or any(
            found[slot] not in (rank, None) for slot in range(n) if slot not in in_place
        ):
            return False
    return True


@mistake(
    "joined in the wrong order",
    "Every rank has all the data, but joins it in another order than that of the ranks.",
)
@every(lambda trials: [(trial, result) for trial in failed(trials) for result in trial.results])
def another_order(trial: Trial, result: Any) -> bool:
    """Check whether every rank has every x once, but not in rank order."""
    order = origins(result, trial.case.facts["xs"]) or []
    return sorted(map(str, order)) == sorted(map(str, range(trial.world_size)))


@mistake(
    "sends its own x every time",
    "A rank sends its own x in each step, so its neighbour gets the same data again and "
    "again: nothing is passed on.",
)
@every(lambda trials: on_ranks(more_than(2)(failed(trials))))
def own_every_time(trial: Trial, rank: int) -> bool:
    """Check whether every rank has received only one neighbour's x, which was sent again."""
    n, found = trial.world_size, origins(trial.results[rank], trial.case.facts["xs"]) or []
    neighbour = any({*found} == {rank, (rank + way) % n} for way in (1, -1))
    return neighbour and sends_the_same(trial)


def sends_the_same(trial: Trial) -> bool:
    """Check whether every rank sends one neighbour the same values in all messages."""
    sent: dict[int, list] = {}
    for message in trial.trace.messages():
        sent.setdefault(message.src, []).append((message.dst, message.payload))
    return all(all(same == messages[0] for same in messages) for messages in sent.values())


@mistake(
    "one buffer in all slots",
    "All slots are one and the same tensor, so each receive overwrites what came before: "
    "every slot but the own one ends with what came last.",
)
@every(lambda trials: on_ranks(more_than(2)(failed(trials))))
def one_buffer(trial: Trial, rank: int) -> bool:
    """Check whether all slots but the rank's own are equal, though different values arrived."""
    others = {*(origins(trial.results[rank], trial.case.facts["xs"]) or [])} - {rank}
    return len(others) == 1 and None not in others and not sends_the_same(trial)


@mistake(
    "not a ring",
    "Ranks send to ranks that are not their neighbours. In a ring each rank uses two links "
    "only, and passes on what has come last.",
)
@every(more_than(3))
def past_the_neighbours(trial: Trial) -> bool:
    """Check whether results are right, but in larger rings some rank sends past its neighbours."""
    return right(trial) and ring_neighbours("").wrong(trial) is not None


GATHER_QUESTION = lambda: all_gather_case([torch.ones(250)] * 4)  # noqa: E731
RING_ALL_GATHER = Exercise(
    number="5",
    function="ring_all_gather",
    title="Ring all-gather",
    points=10,
    weights={"value": 0.2, "bytes": 0.2, "peers": 0.5, "steps": 0.1},
    cases=all_gather_cases,
    checks=(
        value("every rank returns all x, in the order of the ranks", keeps="x"),
        bytes_sent(all_but_own, "every rank sends (n − 1)/n of the result"),
        ring_neighbours("each rank talks to its two neighbours only"),
        steps(
            lambda case: case.world_size - 1,
            "n − 1 steps",
            slack=lambda case: 2 * (case.world_size - 1),
        ),
    ),
    least_received=all_but_own,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        through_one_rank,
        past_the_neighbours,
        one_buffer,
        own_every_time,
        by_step,
        another_order,
        *ITS_INPUT,
    ),
    hints=(
        "In step 0 you send your own x. What do you send in step 1? Whose x arrives in step 0, and "
        "whose in step 1?",
        "In step s, rank r sends the block of rank r − s and receives that of rank r − s − 1, "
        "all mod n. Keep a list of n blocks.",
        "Each block that arrives needs a tensor of its own. In each step, start the "
        "send and don't wait for it before you have received. Every rank gets the "
        "blocks in another order: where does each belong in the result?",
    ),
    questions=(
        ask_sent(
            "4 ranks, 250 float32 numbers each: how many bytes does each rank send?",
            GATHER_QUESTION,
        ),
        ask_steps("How many steps does it take?", GATHER_QUESTION),
    ),
    watch=lambda: all_gather_case([origin_tensor(rank, 4, 2) for rank in range(4)]),
)


EXERCISES = [RING_ALL_GATHER]
