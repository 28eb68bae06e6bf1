"""Exercises 7 and 8a: all-reduce, in a ring and by recursive doubling."""

import math
from collections.abc import Iterator, Sequence

import torch

from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import (
    divided_too_often,
    every,
    everything_to_everyone,
    right_but,
    several_ranks,
    sum_for_mean,
    whole_round_ring,
    wrong_sums,
)
from parallel101.laboratory.grade.compared_values import close, factor, same
from parallel101.laboratory.grade.exercise import (
    Case,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    ask_sent,
    ask_steps,
    bytes_sent,
    communicated,
    failed,
    right,
    steps,
    unwritten_was_sent,
    value,
)


@mistake(
    "breaks at n = 3",
    "The code is right if n is a power of two, and only then. For other n, a partner is "
    "missing, or some ranks are left out or counted twice.",
)
def only_powers_of_two(trials: Sequence[Trial]) -> bool:
    """Check whether results are right if n is a power of two, and wrong for 3 and some other n."""
    wrong = failed(trials)
    four = [trial for trial in trials if trial.world_size == 4]
    return bool(four) and {3} < {trial.world_size for trial in wrong} <= {3, 5, 6, 7}


@mistake(
    "one extra rank only",
    "The code is right for n = 3 and n = 5, where one rank is above the power of two, and "
    "wrong for n = 7, where three are: some are left out, or have no partner.",
)
def one_extra_rank(trials: Sequence[Trial]) -> bool:
    """Check whether results are wrong for n = 7 only, but right for n = 3 and n = 5."""
    return {trial.world_size for trial in failed(trials)} == {7}


def all_reduce_case(xs: Sequence[torch.Tensor], op: str | None = "sum", note: str = "") -> Case:
    """Return an all-reduce of xs; `op` is None for a function without an argument op."""
    n, total = len(xs), torch.stack(list(xs)).sum(0)
    result = total / n if op == "mean" else total
    notes = [part for part in (op, note) if part]
    return Case(
        [(x, op) if op else (x,) for x in xs],
        [result] * n,
        ", ".join(notes),
        facts={"xs": xs, "op": op or "sum"},
    )


def all_reduce_cases(draw: Draw) -> list[Case]:
    cases = [
        all_reduce_case(draw.tensors(n, 24 * n, 2), op)
        for n, op in ((1, "mean"), (2, "sum"), (2, "mean"), (3, "sum"), (4, "mean"))
    ]
    cases.append(
        all_reduce_case(draw.tensors(4, 123), "sum", "123 elements, which 4 doesn't divide")
    )
    cases.append(
        all_reduce_case(
            [x.t() for x in draw.tensors(3, 2, 51, dtype=torch.float64)],
            "mean",
            "transposed, float64",
        )
    )
    cases.append(
        all_reduce_case(
            draw.tensors(5, 3, dtype=torch.int64), "sum", "3 whole numbers, fewer than ranks"
        )
    )
    cases.append(all_reduce_case(draw.tensors(4, 2, 40), "sum", "2 rows, fewer than ranks"))
    cases.append(all_reduce_case(draw.tensors(3, 0, 4), "mean", "no rows"))
    return [
        *cases,
        all_reduce_case(draw.tensors(5, 40, 3), "mean"),
        all_reduce_case(draw.tensors(5, 123), "sum", "123 elements"),
    ]


def ring_bytes(case: Case) -> list[int]:
    x, n = case.facts["xs"][0], case.world_size
    return [2 * (n - 1) * math.ceil(x.numel() / n) * x.element_size()] * n


def x_each(case: Case) -> list[int]:
    return [case.facts["xs"][0].nbytes if case.world_size > 1 else 0] * case.world_size


def flat_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield each chunk of each rank's result, with the ranks' chunks that should add up to it."""
    n, xs = trial.world_size, trial.case.facts["xs"]
    for result in trial.results:
        if isinstance(result, torch.Tensor) and result.shape == xs[0].shape:
            parts = zip(*(torch.tensor_split(x.flatten(), n) for x in xs), strict=True)
            yield from zip(torch.tensor_split(result.flatten(), n), map(list, parts), strict=True)


@mistake(
    "chunks of rows",
    "The code cuts x by rows. With fewer rows than ranks some ranks have no chunk, and others "
    "send far more than their part. The chunks must be made of elements.",
)
def chunks_of_rows(trials: Sequence[Trial]) -> bool:
    """Check whether results are right, but cost too much only with fewer rows than ranks."""
    check = bytes_sent(ring_bytes, "")
    many = [trial for trial in trials if trial.error is None and check.wrong(trial) is not None]
    return (
        not failed(trials)
        and bool(many)
        and all(
            trial.case.facts["xs"][0].dim() > 1
            and trial.case.facts["xs"][0].shape[0] < trial.world_size
            for trial in many
        )
    )


@mistake(
    "reduce then broadcast",
    "The total number of bytes is right, but they are uneven: one rank sends much more than "
    "the others, which wait for it.",
)
@every(lambda trials: several_ranks(trials, least=3))
def reduce_broadcast(trial: Trial) -> bool:
    """Check whether some rank sends more than its part, while another sends x at most once.

    The results are right.
    """
    sent, nbytes = communicated(trial), trial.case.facts["xs"][0].nbytes
    hot = max(sent) > ring_bytes(trial.case)[0] + 64
    return right(trial) and hot and min(sent) <= nbytes + 64


def not_divided(trial: Trial) -> bool:
    return trial.case.facts["xs"][0].numel() % trial.world_size != 0


@mistake(
    "remainder dropped",
    "The code cuts n equal chunks. If n doesn't divide the number of elements, the last few "
    "are never added up.",
)
def remainder_dropped(trials: Sequence[Trial]) -> bool:
    """Check whether only the remainder after n equal chunks is wrong or missing."""
    wrong = failed(trials)
    whole = [
        trial
        for trial in wrong
        if trial.error is None and trial.case.expected[0].numel() > trial.world_size
    ]
    for trial in whole:
        for found, expected in zip(trial.results, trial.case.expected, strict=True):
            count = expected.numel() // trial.world_size * trial.world_size
            if not isinstance(found, torch.Tensor) or found.numel() not in (
                count,
                expected.numel(),
            ):
                return False
            if not close(found.flatten()[:count], expected.flatten()[:count]):
                return False
    return bool(whole) and all(map(not_divided, wrong))


@mistake(
    "scaled",
    "The sum is divided by the same number for every n. That is right for one number of ranks "
    "only.",
)
def one_n_only(trials: Sequence[Trial]) -> bool:
    """Check whether every mean is the sum divided by the same number, for any n."""
    means = [trial for trial in trials if trial.case.facts["op"] == "mean" and trial.world_size > 1]
    if len({trial.world_size for trial in means}) < 2 or failed(
        [t for t in trials if t.case.facts["op"] == "sum"]
    ):
        return False
    divisors = set()
    for trial in means:
        found = {
            1.0 if same(f, e) else factor(f, e)
            for f, e in zip(trial.results, trial.case.expected, strict=True)
        }
        divisors |= {None if k is None else round(trial.world_size / k, 2) for k in found}
    return len(divisors) == 1 and None not in divisors


@every(lambda trials: [t for t in failed(trials) if t.case.facts["xs"][0].is_floating_point()])
def scaled(trial: Trial) -> bool:
    """Check whether every wrong floating-point result is the expected one times a number.

    (Whole numbers are truncated or can't be divided at all.)
    """
    pairs = zip(trial.results, trial.case.expected, strict=True)
    return trial.error is None and all(factor(*pair) is not None for pair in pairs)


ALL_REDUCE_QUESTION = lambda: all_reduce_case([torch.ones(1000)] * 4)  # noqa: E731
RING_ALL_REDUCE = Exercise(
    number="7",
    function="ring_all_reduce",
    title="Ring all-reduce",
    points=20,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=all_reduce_cases,
    checks=(
        value("every rank returns the sum, or the mean", keeps="x"),
        bytes_sent(ring_bytes, "no rank sends more than 2·(n − 1)/n of x"),
        steps(
            lambda case: 2 * (case.world_size - 1),
            "2·(n − 1) steps",
            slack=lambda case: 4 * (case.world_size - 1),
        ),
    ),
    least_received=x_each,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        sum_for_mean,
        Misconception(
            "scaled",
            "The mean is divided by n more than once, so it is too small: by every rank, or "
            "before and after the all-gather.",
            divided_too_often(flat_pieces),
        ),
        one_n_only,
        Misconception(
            "scaled",
            ("Every element is wrong by the same factor: something is divided that should not be."),
            scaled,
        ),
        remainder_dropped,
        Misconception(
            "works only if n divides the size",
            "The code is right if n divides the number of elements, and only then: it takes "
            "all chunks to be equally large.",
            lambda trials: bool(failed(trials)) and all(map(not_divided, failed(trials))),
        ),
        chunks_of_rows,
        whole_round_ring,
        everything_to_everyone,
        reduce_broadcast,
        *wrong_sums(flat_pieces),
        *ITS_INPUT,
    ),
    hints=(
        "You have both halves already: what does rank r have after the reduce-scatter, and what "
        "does the all-gather need?",
        "The chunks differ in size by one: cut the elements with torch.tensor_split(x.flatten(), "
        "n), and let both loops send and receive these chunks. Divide once, between the halves.",
        "You have written both loops, as ring_reduce_scatter and ring_all_gather. The second needs "
        "a change, because the chunks may differ in size: let it receive into views of the result, "
        "which torch.tensor_split gives. Which chunk of the result do you know already?",
    ),
    questions=(
        ask_sent(
            "4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
            ALL_REDUCE_QUESTION,
        ),
        ask_steps("How many steps does it take?", ALL_REDUCE_QUESTION),
    ),
    watch=lambda: all_reduce_case([origin_tensor(rank, 4, 8) for rank in range(4)]),
)


def doubling_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(60, 80)
    cases = [all_reduce_case(draw.tensors(n, rows, 2), None) for n in (1, 2, 3, 4)]
    cases.append(
        all_reduce_case(
            [x.t() for x in draw.tensors(4, 2, rows, dtype=torch.float64)],
            None,
            "transposed, float64",
        )
    )
    cases.append(all_reduce_case(draw.tensors(3, 2, dtype=torch.int64), None, "2 whole numbers"))
    return [*cases, *(all_reduce_case(draw.tensors(n, rows, 2), None) for n in (5, 7))]


def log2_down(n: int) -> int:
    return n.bit_length() - 1


def power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def doubling_bytes(case: Case) -> list[int]:
    n = case.world_size
    return [(log2_down(n) + (not power_of_two(n))) * case.facts["xs"][0].nbytes] * n


@mistake(
    "ring in place of doubling",
    "The bytes are those of a ring, and so are the steps: 2·(n − 1). A sum of few bytes then "
    "takes n times as long as it must.",
)
@every(lambda trials: several_ranks(trials, least=4))
def ring_in_place(trial: Trial) -> bool:
    """Check whether results are right with no more bytes than a ring, but in more steps."""
    few = max(communicated(trial)) <= ring_bytes(trial.case)[0] + 64
    return right(trial) and few and trial.trace.makespan >= 2 * (trial.world_size - 1) - 0.5


def all_exchange(trial: Trial) -> bool:
    """Check whether all ranks below the power of two send in every step of the doubling."""
    steps_of_doubling = log2_down(trial.world_size)
    sent = trial.trace.messages_sent[: 1 << steps_of_doubling]
    return min(sent) >= steps_of_doubling


@mistake(
    "reduce then broadcast",
    "The sum goes along a tree to one rank, and back along a tree: twice the steps, and half "
    "of the ranks are idle in each. In doubling, all ranks exchange.",
)
@right_but(1, lambda trial: trial.world_size == 4 and several_ranks([trial]))
def two_trees(trial: Trial) -> bool:
    """Check whether results are right in twice the steps, and some ranks send x only once."""
    return trial.trace.makespan >= 4 - 0.5 and min(trial.trace.messages_sent) == 1


DOUBLING_QUESTION = lambda: all_reduce_case([torch.ones(1000)] * 8, None)  # noqa: E731
DOUBLING_ALL_REDUCE = Exercise(
    number="8a",
    function="doubling_all_reduce",
    title="All-reduce by recursive doubling",
    points=10,
    weights={"value": 0.3, "bytes": 0.2, "steps": 0.5},
    cases=doubling_cases,
    checks=(
        value("every rank returns the sum", keeps="x"),
        bytes_sent(
            doubling_bytes,
            "no rank sends more than log₂ n times x (once more if n isn't a power of two)",
        ),
        steps(
            lambda case: log2_down(case.world_size) + (0 if power_of_two(case.world_size) else 2),
            "log₂ n steps (⌊log₂ n⌋ + 2 if n isn't a power of two)",
            slack=lambda case: log2_down(case.world_size),
            only=all_exchange,
        ),
    ),
    least_received=x_each,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        only_powers_of_two,
        one_extra_rank,
        ring_in_place,
        whole_round_ring,
        everything_to_everyone,
        two_trees,
        *wrong_sums(flat_pieces),
        *ITS_INPUT,
    ),
    hints=(
        "Take n = 4 first. Your partner at distance 1, 2, 4 is the rank whose number differs from "
        "yours in that bit: rank ^ distance.",
        "Both partners send their sum and add what they receive, which needs a second tensor. For "
        "n = 3, rank 2 gives its x to rank 0 and waits; ranks 0 and 1 do the rest; rank 0 sends "
        "the result back.",
        "The largest power of two in n is 1 << (n.bit_length() - 1). A rank at or above it has two "
        "messages only, one before the loop and one after it. With which rank are they, for any n?",
    ),
    questions=(
        ask_steps("8 ranks: how many steps does it take?", DOUBLING_QUESTION),
        ask_sent(
            "8 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
            DOUBLING_QUESTION,
        ),
    ),
    watch=lambda: all_reduce_case([origin_tensor(rank, 5, 6) for rank in range(5)], None),
)


EXERCISES = [RING_ALL_REDUCE, DOUBLING_ALL_REDUCE]
