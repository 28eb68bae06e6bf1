"""Grade exercises 9a to 9c of homework 3, and the practice exercises 9g to 9k.

`pytest homework/hw3_adjoints` runs all of homework 3; the other exercises have their own files. A
case has random x and g. F and F* are written out below, in one process, for the tensors of all
ranks at once: each F* is another F.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel101.laboratory.exercises.adjoint_exercises import CHANGED_IN_PLACE, total
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.compared_values import difference, factor, same
from parallel101.laboratory.grade.exercise import (
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import MESSAGES, failed, right

Tensors = list[Any]  # one tensor for each rank, None where a rank has none

# ---- the collectives: from the tensors of all ranks, and the root, to the tensors of all ranks
# ----


def broadcast(x: Tensors, root: int) -> Tensors:
    return [x[root] for _ in x]


def reduce(x: Tensors, root: int) -> Tensors:
    return [sum(x) if rank == root else None for rank in range(len(x))]


def scatter(x: Tensors, root: int) -> Tensors:
    return list(x[root].chunk(len(x)))


def gather(x: Tensors, root: int) -> Tensors:
    return [torch.cat(x) if rank == root else None for rank in range(len(x))]


def all_gather(x: Tensors, root: int) -> Tensors:
    return [torch.cat(x) for _ in x]


def reduce_scatter(x: Tensors, root: int) -> Tensors:
    return list(sum(x).chunk(len(x)))


def all_reduce(x: Tensors, root: int) -> Tensors:
    return [sum(x) for _ in x]


def all_to_all(x: Tensors, root: int) -> Tensors:
    return [torch.cat([other.chunk(len(x))[rank] for other in x]) for rank in range(len(x))]


def reduce_or_zeros(g: Tensors, root: int) -> Tensors:
    """Return the adjoint of broadcast: zeros for the other ranks' x, which were not used."""
    return [sum(g) if rank == root else torch.zeros_like(g[rank]) for rank in range(len(g))]


ADJOINT = {
    broadcast: reduce_or_zeros,
    reduce: broadcast,
    scatter: gather,
    gather: scatter,
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
    all_reduce: all_reduce,
    all_to_all: all_to_all,
}
ROOTED = (broadcast, reduce, scatter, gather)
# the bytes that suffice in total, given n and the bytes of the largest tensor
ENOUGH: dict[Callable, Callable[[int, int], float]] = {
    broadcast: lambda n, S: (n - 1) * S,
    reduce: lambda n, S: (n - 1) * S,
    scatter: lambda n, S: (n - 1) / n * S,
    gather: lambda n, S: (n - 1) / n * S,
    all_gather: lambda n, S: (n - 1) * S,
    reduce_scatter: lambda n, S: (n - 1) * S,
    all_reduce: lambda n, S: 2 * n * S,
    all_to_all: lambda n, S: (n - 1) * S,
}
SAYS = {
    broadcast: "(n − 1)·S bytes in total",
    reduce: "(n − 1)·S bytes in total",
    scatter: "(n − 1)/n·S bytes in total",
    gather: "(n − 1)/n·S bytes in total",
    all_gather: "(n − 1)·S bytes in total",
    reduce_scatter: "(n − 1)·S bytes in total",
    all_reduce: "2·n·S bytes in total",
    all_to_all: "(n − 1)·S bytes in total",
}


# ---- the cases ----


def case_of(F: Callable, draw: Draw, n: int, root: int, k: int) -> Case:
    """Return a case of F on n ranks with blocks of k rows."""
    block, whole = (k, 8), (n * k, 8)
    xs: Tensors = draw.tensors(
        n, *(block if F in (gather, all_gather) else whole), dtype=torch.float64
    )
    if F is scatter:
        xs = [x if rank == root else None for rank, x in enumerate(xs)]
    ys = F(xs, root)
    gs = [None if y is None else draw.tensor(*y.shape, dtype=torch.float64) for y in ys]
    gradients = ADJOINT[F](gs, root)
    largest = max(t.nbytes for t in (*xs, *gs) if t is not None)
    return Case(
        [(x, g, root) if F in ROOTED else (x, g) for x, g in zip(xs, gs)],
        gradients,
        note=f"root {root}" if F in ROOTED else f"blocks of {block[0]} rows",
        facts={"F": F, "root": root, "x": xs, "y": ys, "g": gs, "S": largest},
    )


def cases_of(F: Callable) -> Callable[[Draw], list[Case]]:
    return lambda draw: [
        case_of(F, draw, n, root, draw.integer(1, 3))
        for n, root in ((1, 0), (2, 1), (3, 0), (3, 2), (4, 1))
    ]


def least_received(case: Case) -> list[int]:
    """Return the bytes of the others' g that each rank needs.

    Torch's own broadcast and reduce count (n − 1)/n of their payload for every rank.
    """
    F, n, root, S = case.facts["F"], case.world_size, case.facts["root"], case.facts["S"]
    at_root, elsewhere = {
        broadcast: (S * (n - 1) // n, 0),
        reduce: (0, S * (n - 1) // n),
        scatter: (S * (n - 1) // n, 0),
        gather: (0, S // n),
        all_reduce: (S, S),
        all_gather: (S // n, S // n),
    }.get(F, (S * (n - 1) // n,) * 2)
    return [0 if n == 1 else at_root if rank == root else elsewhere for rank in range(n)]


# ---- the checks ----


def inner(a: Tensors, b: Tensors) -> float:
    """Return ⟨a, b⟩ over all ranks."""
    return sum(
        float((mine * theirs).sum())
        for mine, theirs in zip(a, b, strict=True)
        if mine is not None and theirs is not None
    )


def not_adjoint(trial: Trial) -> str | None:
    for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected, strict=True)):
        if (what := difference(found, expected)) is not None:
            return f"rank {rank} returned {what}{_products(trial, trial.case.facts)}"
    for rank, places in enumerate(trial.changed):
        if places:
            return f"rank {rank} changed its {'xg'[places[0]]}, which must stay as it is"
    return None


def _products(trial: Trial, facts: dict[str, Any]) -> str:
    """Return the two inner products in words, or nothing if the shapes don't allow them."""
    found = trial.results
    alike = all(
        (x is None) == (gradient is None)
        and (x is None or (isinstance(gradient, torch.Tensor) and gradient.shape == x.shape))
        for x, gradient in zip(facts["x"], found)
    )
    return (
        (
            f". ⟨Fx, g⟩ = {inner(facts['y'], facts['g']):.4g}, but ⟨x, F*g⟩ = "
            f"{inner(facts['x'], found):.4g}"
        )
        if alike
        else ""
    )


def enough(case: Case) -> float:
    return ENOUGH[case.facts["F"]](case.world_size, case.facts["S"])


def too_many_bytes(trial: Trial) -> str | None:
    sent, most = total(trial), enough(trial.case)
    return (
        f"the ranks sent {sent} bytes; {most:g} are enough"
        if sent > most + 64 * trial.world_size
        else None
    )


# ---- the misconceptions ----


def gradients(trials: Sequence[Trial]) -> list[tuple[Trial, int, Any, Any]]:
    """Return each wrong gradient of a run that ended: trial, rank, found and expected values."""
    return [
        (trial, rank, found, expected)
        for trial in trials
        if trial.error is None
        for rank, (found, expected) in enumerate(
            zip(trial.results, trial.case.expected, strict=True)
        )
        if not same(found, expected)
    ]


def is_sum(trial: Trial, found: Any) -> bool:
    """Check whether this is the all-reduced g, once or stacked several times.

    A rank without a g adds zeros.
    """
    if trial.world_size == 1 or not isinstance(found, torch.Tensor) or found.dim() != 2:
        return False
    everything = torch.stack([g for g in trial.case.facts["g"] if g is not None]).sum(0)
    return same(found, everything.repeat(max(1, len(found) // len(everything)), 1))


def costs_an_all_reduce(trials: Sequence[Trial]) -> bool:
    """Check whether the values are right, but cost an all-reduce where half the bytes would do."""
    large = [
        trial
        for trial in trials
        if trial.world_size > 2 and trial.case.facts["F"] is not all_reduce
    ]
    costs = [total(trial) / (2 * (trial.world_size - 1) * trial.case.facts["S"]) for trial in large]
    return bool(large) and not failed(trials) and all(0.99 <= cost <= 2 for cost in costs)


def own(trial: Trial, rank: int) -> Any:
    """Return the gradient that a rank gets from its own g alone."""
    facts = trial.case.facts
    gs = [
        None if g is None else g if other == rank else torch.zeros_like(g)
        for other, g in enumerate(facts["g"])
    ]
    if facts["F"] in (reduce, gather) and rank != facts["root"]:
        return torch.zeros_like(facts["x"][rank])
    return ADJOINT[facts["F"]](gs, facts["root"])[rank]


@every(gradients)
def own_only(trial: Trial, rank: int, found: Any, _: Any) -> bool:
    """Check whether every wrong gradient comes from the rank's own g, perhaps times a number."""
    alone = own(trial, rank), trial.case.facts["g"][rank]
    return isinstance(found, torch.Tensor) and any(
        same(found, mine) or factor(found, mine) is not None for mine in alone
    )


def off_by(k: Callable[[int], float]) -> Callable[[Sequence[Trial]], bool]:
    """Return a check whether every wrong gradient is the right one times k(n)."""

    def is_times(trial: Trial, _: int, found: Any, expected: Any) -> bool:
        times = factor(found, expected)
        return times is not None and abs(times - k(trial.world_size)) < 1e-6

    return every(gradients)(is_times)


@mistake(
    "gradient where x was not used",
    "The ranks other than the root return a gradient, but a broadcast does not use their x: a "
    "change of it changes no y.",
)
@every(gradients)
def not_where_unused(trial: Trial, rank: int, found: Any, expected: Any) -> bool:
    other = trial.case.facts["F"] is broadcast and rank != trial.case.facts["root"]
    return other and isinstance(found, torch.Tensor) and found.shape == expected.shape


@mistake(
    "None in place of a gradient",
    "Some ranks return None. Every rank that has an x returns its gradient. Where x is not "
    "used, that is a tensor of zeros.",
)
@every(gradients)
def none_returned(trial: Trial, rank: int, found: Any, expected: Any) -> bool:
    """Check whether every wrong gradient is None, on some ranks of a run but not on all."""
    return found is None and any(result is not None for result in trial.results)


ALL_REDUCE_EVERYWHERE = Misconception(
    "all-reduce as the adjoint of everything",
    "The gradients of all ranks are summed on every rank, with an all-reduce. Only the adjoint "
    "of an all-reduce is an all-reduce.",
    lambda trials: (
        any(is_sum(trial, found) for trial, _, found, _ in gradients(trials))
        or costs_an_all_reduce(trials)
    ),
)
ALL_REDUCE_THEN_SLICE = Misconception(
    "all-reduce then slice",
    "The gradients are summed whole on every rank, and then each rank keeps one block. The values "
    "are right, but each rank receives n − 1 blocks that it throws away: twice the bytes.",
    costs_an_all_reduce,
)
SLICE_WITHOUT_SUM = Misconception(
    "slice of the gradient without the sum",
    "Each rank keeps its block of its own g. But x went to all ranks, and each of them has its "
    "own loss: their parts are missing.",
    own_only,
)
OWN_ONLY = Misconception(
    "gradient without the other ranks",
    "Each rank uses its own g alone. The x of one rank goes into the y of other ranks, so "
    "their g belong to its gradient.",
    own_only,
)
N_TIMES = Misconception(
    "gradient n times too large",
    "The gradient is n times the right one: it is summed over the ranks where every rank has the "
    "same already, or multiplied by n. ⟨x, F*g⟩ is n times ⟨Fx, g⟩.",
    off_by(lambda n: n),
)
MEAN_FOR_SUM = Misconception(
    "mean for sum",
    "The gradient is divided by n. The loss is the sum of the ranks' losses, so gradients are "
    "added, and nothing is averaged.",
    off_by(lambda n: 1 / n),
)
ROOT_ZERO = Misconception(
    "root hard-coded to 0",
    "The code treats rank 0 as the root. It is right where the root is 0, and wrong elsewhere.",
    lambda trials: (
        bool(failed(trials))
        and all(trial.case.facts["root"] != 0 for trial in failed(trials))
        and any(
            right(trial) and trial.case.facts["root"] == 0
            for trial in trials
            if trial.world_size > 1
        )
    ),
)
# ---- the exercises ----

WEIGHTS = {"value": 0.5, "bytes": 0.5}


def exercise(
    number: str, F: Callable, hints: tuple[str, ...], *own_misconceptions: Misconception
) -> Exercise:
    name = F.__name__
    return Exercise(
        number=number,
        function=f"{name}_backward",
        title=f"The backward of {name}",
        points=5 if F in (broadcast, gather, all_to_all) else 0,
        weights=WEIGHTS if F in (broadcast, gather, all_to_all) else {},
        cases=cases_of(F),
        checks=(
            Check(
                "value",
                "⟨Fx, g⟩ = ⟨x, F*g⟩: every rank returns the gradient of its x, and changes "
                "neither x nor g",
                not_adjoint,
            ),
            Check("bytes", SAYS[F], too_many_bytes),
        ),
        least_received=least_received,
        misconceptions=(
            *MESSAGES,
            CHANGED_IN_PLACE,
            none_returned,
            *(ROOT_ZERO,) * (F in ROOTED),
            *own_misconceptions,
            N_TIMES,
            MEAN_FOR_SUM,
            OWN_ONLY,
            ALL_REDUCE_EVERYWHERE,
        ),
        hints=hints,
        questions=(
            Question(
                "total",
                f"4 ranks run the backward of {name}. The largest tensor has S = 256 bytes. "
                "How many bytes do the ranks send in total?",
                lambda: case_of(F, Draw("question"), n=4, root=1, k=1),
                total,
                "bytes",
            ),
        ),
        allowed=P2P | COLLECTIVES,
        picture="lanes",
    )


EXERCISES = [
    exercise(
        "9a",
        broadcast,
        (
            "Write y₀ = x, y₁ = x, y₂ = x for the root's x. What does a small change of x do to "
            "each y, and so to each loss?",
            "The root's x is used n times. Its gradient is the sum of the gradients of its "
            "uses. The x of the others is used nowhere.",
            "Every rank's g is added up on one rank. Which collective does that? It writes into "
            "its argument, so give it a copy of g. And what do the other ranks return?",
        ),
        ALL_REDUCE_EVERYWHERE,
        not_where_unused,
    ),
    exercise(
        "9g",
        reduce,
        (
            "y = x₀ + x₁ + x₂. By how much does y change if x₁ changes by ε?",
            "The derivative of y by each x is 1. So the gradient of each x is the g that the "
            "root has.",
            "Only the root has g, and every rank needs it. Which collective does that? "
            "Don't let it write into the g that you were given.",
        ),
    ),
    exercise(
        "9h",
        scatter,
        (
            "Which y does block r of the root's x go into?",
            "Block r of x is used once, by rank r. So block r of the gradient is rank r's g.",
            "Each rank has one block of the gradient, and the root needs them all, in the order of "
            "the ranks. Which collective does that? What is left for the other ranks to return?",
        ),
    ),
    exercise(
        "9b",
        gather,
        (
            "Where in the root's y is this rank's x?",
            "x of rank r is block r of y. So its gradient is block r of the root's g.",
            "The root has all blocks of the gradient, and each rank needs its own. Which "
            "collective hands them out?",
        ),
    ),
    exercise(
        "9i",
        all_gather,
        (
            "Rank 1's x is a block of every rank's y. How many losses depend on it?",
            "All n. The gradient of rank r's x is the sum over the ranks of block r of their g.",
            "Rank r needs block r of the sum of all g, and nothing else of that sum. "
            "Which collective computes a sum and leaves one block of it on each rank?",
        ),
        SLICE_WITHOUT_SUM,
        ALL_REDUCE_THEN_SLICE,
    ),
    exercise(
        "9j",
        reduce_scatter,
        (
            "Block j of this rank's x goes into one y. Whose?",
            "Block j is a term of the sum that rank j gets. The derivative is 1, so its "
            "gradient is rank j's g.",
            ("Every rank needs the g of all ranks, in their order. Which collective does that?"),
        ),
    ),
    exercise(
        "9k",
        all_reduce,
        (
            "Rank 1's x is a term of every rank's y. How many losses depend on it?",
            "All n, each with derivative 1. So the gradient of x is the sum of the g of all ranks.",
            "Every rank needs the sum of all g. You know the collective well. It writes "
            "into its argument, so give it a copy of g.",
        ),
    ),
    exercise(
        "9c",
        all_to_all,
        (
            "Block j of rank i's x becomes block i of rank j's y. Where is its gradient?",
            "In block i of rank j's g. So it has to go back from rank j to rank i.",
            "Write down from where to where each block goes, first in forward and then in "
            "backward. What do the two lists have in common?",
        ),
    ),
]
