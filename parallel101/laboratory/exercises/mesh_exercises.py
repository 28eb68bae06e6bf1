"""Shared code of exercises on a mesh: bytes by axis, sums over ranks, and usual mistakes.

    rank = (dp · cp ranks + cp) · tp ranks + tp            the last axis runs fastest

Each rank returns the gradients of its first backward before any message ("local"). So a sum over
wrong ranks shows in its coefficients: found = Σ cᵣ · local of rank r. Calls from the exercise's own
program send activations, and don't count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from parallel101.laboratory.exercises.training_exercises import (
    NEVER_REDUCED,
    added_to_the_last,
    alike,
    all_reduce_bytes,
    equals_one_process,
    measured,
    scale,
)
from parallel101.laboratory.grade.compared_values import close, difference, weights
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    all_show,
    at_most,
    communicated,
    ended,
    on_ranks,
)
from parallel101.laboratory.record.events import Event

AXES = ("dp", "cp", "tp")
CUT = {"first": 1, "second": 0}  # the parameters that are cut along tp, each along this dimension
PARTIAL = ("norm.weight", "norm.bias")  # whose gradients are partial along tp
SMALL = 128  # bytes a step: norms and counts


def coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Return the position of a rank along each axis."""
    found = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


# ---- what was sent, and along which axes ----


def kind_of(sizes: dict[str, int], ranks: Collection[int]) -> str:
    """Return whether these ranks differ along "data" (dp, cp) only, "tensor" (tp) only, or "both".

    "" for a single rank.
    """
    at = [coordinates(sizes, rank) for rank in ranks]
    axes = {axis for axis in AXES if len({place[axis] for place in at}) > 1}
    if "tp" not in axes:
        return "data" if axes else ""
    return "tensor" if axes == {"tp"} else "both"


def sent(trial: Trial, kind: str) -> int:
    """Return the bytes that the busiest rank sent along axes of this kind.

    Messages of activations, which the exercise's program sends, don't count.
    """
    facts = trial.case.facts

    def counts(event: Event) -> bool:
        ranks: Collection[int] = event.group.ranks or range(trial.world_size)
        if event.kind in ("send", "recv") and event.peer is not None:
            ranks = (event.rank, event.peer)
        own = event.where.rpartition(":")[0] != facts["program"]
        return event.kind != "span" and own and kind_of(facts["sizes"], ranks) == kind

    return max(communicated(trial, counts))


def most_along(case: Case, kind: str) -> int:
    """Return the bytes along axes of this kind that are enough for all steps."""
    facts, sizes = case.facts, case.facts["sizes"]
    if kind == "data":
        # a learner's own ring adds the remainders of its chunks
        each = 100 + sum(all_reduce_bytes(facts["bytes"], sizes[axis]) for axis in ("dp", "cp"))
    else:
        n = sizes["tp"] if kind == "tensor" else case.world_size
        each = all_reduce_bytes(facts["replicated"], n)
    return facts["steps"] * (each + SMALL)


def bytes_along(kind: str, which: str, says: str) -> Check:
    check = at_most(
        "bytes",
        says,
        lambda trial: sent(trial, kind),
        lambda case: most_along(case, kind),
        f"a rank sent {{found}} bytes of gradients {which}; {{most}} are enough",
    )
    return with_its_share(check)


# ---- checks ----


def gradients_equal() -> Check:
    one_process = equals_one_process()
    check = replace(
        one_process,
        says="without clipping, every step equals one process",
        wrong=lambda trial: None if trial.case.facts["clips"] else one_process.wrong(trial),
    )
    return with_its_share(check)


def wrong_norm(trial: Trial) -> str | None:
    """Return what is wrong with the norms, or with the gradients that they clip; else None.

    Five digits count: torch's clipping adds 1e-6.
    """
    for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected)):
        if (what := difference(found["norms"], expected["norms"])) is not None:
            return f"rank {rank}'s norms, one for each step: {what}"
        steps = list(zip(found["gradients"], expected["gradients"]))
        pairs = [(mine[name], right) for mine, theirs in steps for name, right in theirs.items()]
        whole = len(steps) == len(found["gradients"]) == len(expected["gradients"])
        right = whole and all(close(*pair, 1e-5) for pair in pairs)
        if trial.case.facts["clips"] and not right:
            return f"rank {rank}'s gradients were clipped by another factor, or not at all"
    return None


def norms_equal() -> Check:
    """Return a check of the norm, which weighs ten times as much as the gradients."""
    says = "the norm, and every step with clipping, equal one process"
    return Check("value", says, wrong_norm, weight=10.0)


ITS_SHARE = at_most(
    "memory",
    "each rank computes 1/(dp · cp) of the tokens",
    lambda trial: [sum(x.numel() for x in seen) for seen in measured(trial, "seen")],
    lambda case: case.facts["steps"] * case.facts["tokens"] // shares(case.facts["sizes"]),
    "rank {rank} computed {found} tokens; its share is {most}",
)


def with_its_share(check: Check) -> Check:
    """Return the check, which fails too if a rank computes the tokens of others."""
    return replace(check, wrong=lambda trial: check.wrong(trial) or ITS_SHARE.wrong(trial))


def shares(sizes: dict[str, int]) -> int:
    """Return the number of pieces of the batch."""
    return sizes["dp"] * sizes["cp"]


# ---- what a rank's first step shows ----


def first_step(trial: Trial, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a rank's first optimizer step."""
    return trial.results[rank]["gradients"][0]


def right_step(trial: Trial, rank: int, step: int = 0) -> dict[str, Tensor]:
    """Return the right gradients of a rank's step."""
    return trial.case.expected[rank]["gradients"][step]


def free(trials: Sequence[Trial], least_tp: int = 1) -> list[Trial]:
    """Return the trials without clipping that ended, on several ranks and `least_tp` along tp."""
    return [
        trial
        for trial in ended(trials, 2)
        if not trial.case.facts["clips"] and trial.case.facts["sizes"]["tp"] >= least_tp
    ]


def sharing(trial: Trial, rank: int, axes: Collection[str]) -> set[int]:
    """Return the ranks that differ from this one along these axes only."""
    sizes = trial.case.facts["sizes"]
    fixed = set(AXES) - set(axes)

    def at(rank: int) -> list[int]:
        return [coordinates(sizes, rank)[axis] for axis in sorted(fixed)]

    return {other for other in range(trial.world_size) if at(other) == at(rank)}


@lru_cache(maxsize=256)
def summed_ranks(trial: Trial, rank: int, name: str) -> set[int] | None:
    """Return the ranks whose gradients add up to this rank's; None if it is no sum of them."""
    locals_ = [local.get(name) for local in measured(trial, "local")]
    if any(not isinstance(x, Tensor) or x.shape != locals_[0].shape for x in locals_):
        return None
    parts = weights(first_step(trial, rank).get(name), locals_)
    return None if parts is None else {r for r, part in enumerate(parts) if abs(part) > 1e-4}


def sums_over(trials: Sequence[Trial], name: str, axes: Collection[str], least_tp: int = 1) -> bool:
    """Return whether each rank's gradient of `name` is a sum over these axes, on every mesh."""
    return all_show(
        on_ranks(free(trials, least_tp)),
        lambda trial, rank: summed_ranks(trial, rank, name) == sharing(trial, rank, axes),
    )


def is_times(trial: Trial, rank: int, k: float, names: Collection[str] | None = None) -> bool:
    """Return whether a rank's first gradients of these names are k times the right ones."""
    expected = right_step(trial, rank)
    found = scale(first_step(trial, rank), {name: expected[name] for name in names or expected})
    return found is not None and math.isclose(found, k, rel_tol=1e-6)


def scaled(by: Callable[[dict[str, int]], float]) -> Callable[[Sequence[Trial]], bool]:
    """Return a test of whether all gradients are `by` times the right ones, wherever it isn't 1."""
    return lambda trials: all_show(
        on_ranks(t for t in free(trials) if by(t.case.facts["sizes"]) != 1),
        lambda trial, rank: is_times(trial, rank, by(trial.case.facts["sizes"])),
    )


def norm_is(trials: Iterable[Trial], squares: Callable[[Trial, int], Iterable[float]]) -> bool:
    """Return whether on every rank, one of these squares explains the first step's norm."""

    def explained(trial: Trial, rank: int) -> bool:
        norms = measured(trial, "norms")[rank]
        first = norms[0] if isinstance(norms, list) and norms else math.nan
        return any(math.isclose(first**2, x, rel_tol=1e-8) for x in squares(trial, rank))

    return all_show(on_ranks(trials), explained)


# ---- misconceptions ----


def over_the_world(trials: Sequence[Trial]) -> bool:
    """Return whether gradients of parts were sent across axes: to all ranks, if all took part."""
    found = free(trials, 2)
    return all(sent(t, "both") > most_along(t.case, "both") for t in found) and all_show(
        on_ranks(found),
        lambda trial, rank: (
            summed_ranks(trial, rank, "first") in (set(range(trial.world_size)), None)
            or alike(first_step(trial, rank), right_step(trial, rank))
        ),
    )


def wrong_groups(trials: Sequence[Trial]) -> bool:
    """Return whether ranks summed gradients of several ranks that are not those along dp and cp."""

    def confused(trial: Trial, rank: int) -> bool:
        summed = summed_ranks(trial, rank, "first") or set()
        right = sharing(trial, rank, ("dp", "cp"))
        return 1 < len(summed) < trial.world_size and not summed <= right

    return all_show(
        free(trials, 2), lambda trial: any(confused(*each) for each in on_ranks([trial]))
    )


def cut_is_right(trial: Trial, rank: int) -> bool:
    expected = right_step(trial, rank)
    return alike(first_step(trial, rank), {name: expected[name] for name in CUT})


def partial_averaged(trial: Trial, rank: int) -> bool:
    tp = trial.case.facts["sizes"]["tp"]
    return cut_is_right(trial, rank) and is_times(trial, rank, 1 / tp, PARTIAL)


def tokens(trial: Trial) -> list[list[float]]:
    """Return a number of each token that went through the model, by rank."""
    return [[float(x) for part in seen for x in part.flatten()] for seen in measured(trial, "seen")]


def share_along_tp(trial: Trial) -> bool:
    """Return whether ranks along tp computed with other samples, or another part of the time."""
    seen = tokens(trial)
    first = [min(sharing(trial, rank, ("tp",))) for rank in range(trial.world_size)]
    return any(seen[rank] != seen[other] for rank, other in enumerate(first))


def whole_batch(trial: Trial) -> bool:
    """Return whether somewhere, ranks that differ along dp or cp computed the same tokens."""
    seen = [set(mine) for mine in tokens(trial)]
    return any(
        seen[rank] & seen[other]
        for rank in range(trial.world_size)
        for other in set(range(rank)) - sharing(trial, rank, ("tp",))
    )


def not_cleared(trial: Trial, rank: int) -> bool:
    """Return whether the first step is right, and the second has the gradients of both."""
    first, second = (right_step(trial, rank, step) for step in (0, 1))
    found = trial.results[rank]["gradients"][1]
    more = {name: found[name] - second[name] for name in CUT}
    return alike(first_step(trial, rank), first) and (
        scale(more, {name: first[name] for name in CUT}) is not None
    )


def never_clipped(trial: Trial, rank: int) -> bool:
    """Return whether the norm is right, but the optimizer got unclipped gradients."""
    right = trial.case.expected[rank]["norms"][0]
    return is_times(trial, rank, trial.case.facts["times"]) and (
        norm_is([trial], lambda *_: [right**2])
    )


def squares_of(trial: Trial, ranks: Iterable[int], names: Collection[str]) -> float:
    """Return the squares of these ranks' gradients which no message has touched."""
    local = measured(trial, "local")
    return sum(float(local[rank][name].square().sum()) for rank in ranks for name in names)


def untouched(trial: Trial, rank: int) -> Sequence[float]:
    """Return the squared norms of gradients before they are summed."""
    every = set(trial.case.facts["squares"])
    own, peers = [rank], sharing(trial, rank, ("tp",))
    return (
        squares_of(trial, own, every),
        squares_of(trial, peers, every),
        squares_of(trial, peers, CUT) + squares_of(trial, own, every - set(CUT)),
    )


def with_replicas(trial: Trial, _: int) -> Iterable[float]:
    """Return the squared norms that count the parts, or the rest, several times."""
    sizes, squares = trial.case.facts["sizes"], trial.case.facts["squares"]
    times = {1, *sizes.values(), shares(sizes), trial.world_size}
    parts, partial, bias = (sum(squares[n] for n in of) for of in (CUT, PARTIAL, ["bias"]))
    return (
        a * parts + b * partial + c * bias
        for a, b, c in itertools.product(times, repeat=3)
        if max(a, b, c) > 1
    )


def of_own_part(trial: Trial, rank: int) -> Sequence[float]:
    """Return the square of what the rank's own optimizer saw, before clipping."""
    return [sum(float(g.square().sum()) for g in first_step(trial, rank).values())]


MISCONCEPTIONS = (  # in the order in which they are tried
    *MESSAGES,
    Misconception(
        "share cut along tp too",
        "Ranks along tp computed different samples, or different times. They hold parts of the "
        "same matrices: only together can they compute a sample, so all of them need the same.",
        lambda trials: all_show(
            (t for t in ended(trials, 2) if t.case.facts["sizes"]["tp"] > 1), share_along_tp
        ),
    ),
    Misconception(
        "whole batch on every rank",
        "The ranks along dp or cp compute the same tokens again. The values may be right, but "
        "more ranks don't make a step any faster.",
        lambda trials: any(map(whole_batch, ended(trials, 2))),
    ),
    Misconception(
        "reduces over the world",
        "Gradients are added up over all ranks of the world. Ranks along tp hold different parts "
        "of the matrices: their gradients don't belong together.",
        over_the_world,
    ),
    Misconception(
        "parts summed over tp",
        "The gradients of parameters that are cut are added up along tp. Each rank has a "
        "different part of the matrix, so this adds gradients of different weights.",
        lambda trials: sums_over(trials, "first", AXES, 2),
    ),
    Misconception(
        "groups of the wrong ranks",
        "Gradients are added up over ranks that don't share a part of the model: rows and columns "
        "of the mesh are confused. The last axis runs fastest.",
        wrong_groups,
    ),
    replace(NEVER_REDUCED, seen=lambda trials: sums_over(trials, "first", ())),
    Misconception(
        "cp left out",
        "Gradients are averaged along dp only. Ranks along cp computed other parts of the same "
        "sequences with the same weights, so their gradients count as well.",
        lambda trials: sums_over(
            [t for t in trials if t.case.facts["sizes"]["cp"] > 1], "first", ("dp",)
        ),
    ),
    Misconception(
        "divides by the world size",
        "The sum of the gradients is divided by the number of all ranks. Ranks along tp share one "
        "piece of the batch, so there are only dp · cp pieces to average.",
        scaled(lambda sizes: 1 / sizes["tp"]),
    ),
    Misconception(
        "sum for mean",
        "Gradients are added up and not averaged. Each belongs to the mean loss of one piece of "
        "the batch, so the sum is dp · cp times too large.",
        scaled(shares),
    ),
    Misconception(
        "partial gradients not summed",
        "The layer norm's gradients are not added up along tp. Each rank along tp used these "
        "weights for its own part of the time, so its copies now drift apart.",
        lambda trials: (
            sums_over(trials, "norm.weight", ("dp", "cp"), 2)
            and all_show(on_ranks(free(trials, 2)), cut_is_right)
        ),
    ),
    Misconception(
        "partial gradients averaged",
        "The layer norm's gradients are averaged along tp. They are parts of one sum, not "
        "gradients of several mean losses.",
        lambda trials: all_show(on_ranks(free(trials, 2)), partial_averaged),
    ),
    replace(
        added_to_the_last,
        seen=lambda trials: all_show(on_ranks(free(trials)), not_cleared),
    ),
    Misconception(
        "gradients never clipped",
        "The norm is right, but no gradient is multiplied by max_norm / norm before the "
        "optimizer's step.",
        lambda trials: all_show(
            on_ranks(t for t in ended(trials) if t.case.facts["clips"]), never_clipped
        ),
    ),
    Misconception(
        "norm before the sum",
        "Each rank takes the norm of its own gradients, before they are added up. The norm of a "
        "sum isn't that of its parts, so the ranks clip by factors that have no meaning.",
        lambda trials: norm_is(
            (t for t in free(trials) if t.world_size > t.case.facts["sizes"]["tp"]), untouched
        ),
    ),
    Misconception(
        "norm counts replicas twice",
        "Some numbers count several times in the norm, because several ranks hold them. A larger "
        "norm clips too much. Each number of the model must count once.",
        lambda trials: norm_is(filter(wrong_norm, ended(trials, 2)), with_replicas),
    ),
    Misconception(
        "norm of one rank's part",
        "The norm is that of the gradients on this rank. With parts of the matrices on other "
        "ranks, every rank then clips by another factor.",
        lambda trials: norm_is(free(trials, 2), of_own_part),
    ),
)
