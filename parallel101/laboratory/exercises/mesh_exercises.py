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

import torch
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
from parallel101.laboratory.grade.compared_values import close, weights
from parallel101.laboratory.grade.exercise import Case, Check, Trial, mistake
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


def axes_of(sizes: dict[str, int], ranks: Collection[int]) -> frozenset[str]:
    """Return the axes along which these ranks differ."""
    at = [coordinates(sizes, rank) for rank in ranks]
    return frozenset(axis for axis in AXES if len({place[axis] for place in at}) > 1)


def sent(trial: Trial, kind: Callable[[frozenset[str]], bool]) -> int:
    """Return the bytes that the busiest rank sent along axes of this kind.

    Messages of activations, which the exercise's program sends, don't count.
    """
    facts = trial.case.facts

    def counts(event: Event) -> bool:
        ranks: Collection[int] = event.group.ranks or range(trial.world_size)
        if event.kind in ("send", "recv") and event.peer is not None:
            ranks = (event.rank, event.peer)
        own = event.where.rpartition(":")[0] != facts["program"]
        return event.kind != "span" and own and kind(axes_of(facts["sizes"], ranks))

    return max(communicated(trial, counts))


def is_data(axes: frozenset[str]) -> bool:
    return bool(axes) and "tp" not in axes


def is_tensor(axes: frozenset[str]) -> bool:
    return axes == {"tp"}


def crosses(axes: frozenset[str]) -> bool:
    return "tp" in axes and len(axes) > 1


def most_along(case: Case, kind: Callable[[frozenset[str]], bool]) -> int:
    """Return the bytes along axes of this kind that are enough for all steps."""
    sizes, steps = case.facts["sizes"], case.facts["steps"]
    if kind is is_data:
        # a learner's own ring adds the remainders of its chunks
        each = (
            sum(all_reduce_bytes(case.facts["bytes"], sizes[axis]) for axis in ("dp", "cp")) + 100
        )
    else:
        each = all_reduce_bytes(
            case.facts["replicated"], sizes["tp"] if kind is is_tensor else case.world_size
        )
    return steps * (each + SMALL)


def bytes_along(kind: Callable[[frozenset[str]], bool], which: str, says: str) -> Check:
    return at_most(
        "bytes",
        says,
        lambda trial: sent(trial, kind),
        lambda case: most_along(case, kind),
        f"a rank sent {{found}} bytes of gradients {which}; {{most}} are enough",
    )


# ---- checks ----


def gradients_equal() -> Check:
    inner = equals_one_process()

    def wrong(trial: Trial) -> str | None:
        return None if trial.case.facts["clips"] else inner.wrong(trial)

    return Check("value", "without clipping, every step equals one process", wrong)


def clipped_as_expected(trial: Trial, rank: int) -> bool:
    found, expected = trial.results[rank]["gradients"], trial.case.expected[rank]["gradients"]
    return len(found) == len(expected) and all(
        close(mine[name], value, 1e-5)
        for mine, theirs in zip(found, expected)
        for name, value in theirs.items()
    )


def norms_equal() -> Check:
    """Return a check that the norms are right to five digits: torch's clipping adds 1e-6.

    Where they clip, the gradients must be clipped by the right factor.
    """

    def wrong(trial: Trial) -> str | None:
        for rank, norms in enumerate(measured(trial, "norms")):
            expected = trial.case.expected[rank]["norms"]
            if not isinstance(norms, list) or len(norms) != len(expected):
                return f"rank {rank} returned no list of {len(expected)} norms"
            for step, (found, right) in enumerate(zip(norms, expected), start=1):
                if not math.isclose(found, right, rel_tol=1e-5):
                    return (
                        f"at step {step}, rank {rank}'s norm is {found:.6g}; expected {right:.6g}"
                    )
        for rank in range(trial.world_size if trial.case.facts["clips"] else 0):
            if not clipped_as_expected(trial, rank):
                return f"rank {rank}'s gradients were clipped by another factor, or not at all"
        return None

    return Check("value", "the norm, and every step with clipping, equal one process", wrong)


def computes_its_share() -> Check:
    def share(case: Case) -> int:
        parts = case.facts["sizes"]["dp"] * case.facts["sizes"]["cp"]
        return case.facts["steps"] * case.facts["tokens"] // parts

    return at_most(
        "memory",
        "each rank computes 1/(dp · cp) of the tokens",
        lambda trial: [sum(x.numel() for x in seen) for seen in measured(trial, "seen")],
        share,
        "rank {rank} computed {found} tokens; its share is {most}",
    )


# ---- misconceptions ----


def first_step(trial: Trial, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a rank's first optimizer step."""
    return trial.results[rank]["gradients"][0]


def summed_ranks(trial: Trial, rank: int, name: str) -> set[int] | None:
    """Return the ranks whose gradients add up to this rank's; None if it is no sum of them."""
    locals_ = [local.get(name) for local in measured(trial, "local")]
    found = first_step(trial, rank).get(name)
    if any(not isinstance(x, Tensor) or x.shape != locals_[0].shape for x in locals_):
        return None
    parts = weights(found, locals_)
    return None if parts is None else {r for r, part in enumerate(parts) if abs(part) > 1e-4}


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
    mine = coordinates(sizes, rank)
    return {
        other
        for other in range(trial.world_size)
        if all(
            place == mine[axis] or axis in axes for axis, place in coordinates(sizes, other).items()
        )
    }


def sums_over(trials: Sequence[Trial], name: str, axes: Collection[str], least_tp: int = 1) -> bool:
    """Return whether each rank's gradient of `name` is a sum over these axes, on every mesh."""
    return all_show(
        on_ranks(free(trials, least_tp)),
        lambda trial, rank: summed_ranks(trial, rank, name) == sharing(trial, rank, axes),
    )


def right_step(trial: Trial, rank: int, step: int = 0) -> dict[str, Tensor]:
    """Return the right gradients of a rank's step."""
    return trial.case.expected[rank]["gradients"][step]


@mistake(
    "reduces over the world",
    "Gradients are added up over all ranks of the world. Ranks along tp hold different parts "
    "of the matrices: their gradients don't belong together.",
)
def over_the_world(trials: Sequence[Trial]) -> bool:
    """Return whether gradients of parts were sent across axes: to all ranks, if all took part."""
    found = free(trials, 2)
    return all(sent(t, crosses) > most_along(t.case, crosses) for t in found) and all_show(
        on_ranks(found),
        lambda trial, rank: (
            summed_ranks(trial, rank, "first") in (set(range(trial.world_size)), None)
            or alike(first_step(trial, rank), right_step(trial, rank))
        ),
    )


@mistake(
    "parts summed over tp",
    "The gradients of parameters that are cut are added up along tp. Each rank has a "
    "different part of the matrix, so this adds gradients of different weights.",
)
def parts_over_tp(trials: Sequence[Trial]) -> bool:
    return sums_over(trials, "first", AXES, 2) and not over_the_world.seen(trials)


@mistake(
    "groups of the wrong ranks",
    "Gradients are added up over ranks that don't share a part of the model: rows and columns "
    "of the mesh are confused. The last axis runs fastest.",
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


@mistake(
    "cp left out",
    "Gradients are averaged along dp only. Ranks along cp computed other parts of the same "
    "sequences with the same weights, so their gradients count as well.",
)
def cp_left_out(trials: Sequence[Trial]) -> bool:
    found = [trial for trial in free(trials) if trial.case.facts["sizes"]["cp"] > 1]
    return sums_over(found, "first", ("dp",))


def is_times(trial: Trial, rank: int, k: float, names: Collection[str] | None = None) -> bool:
    """Return whether a rank's first gradients of these names are k times the right ones."""
    expected = right_step(trial, rank)
    found = scale(first_step(trial, rank), {name: expected[name] for name in names or expected})
    return found is not None and math.isclose(found, k, rel_tol=1e-6)


def scaled(trials: Sequence[Trial], by: Callable[[dict[str, int]], float]) -> bool:
    """Return whether all gradients are `by` times the right ones, wherever that is not 1."""
    return all_show(
        on_ranks(t for t in free(trials) if by(t.case.facts["sizes"]) != 1),
        lambda trial, rank: is_times(trial, rank, by(trial.case.facts["sizes"])),
    )


def cut_is_right(trial: Trial, rank: int) -> bool:
    expected = right_step(trial, rank)
    return alike(first_step(trial, rank), {name: expected[name] for name in CUT})


@mistake(
    "partial gradients not summed",
    "The layer norm's gradients are not added up along tp. Each rank along tp used these "
    "weights for its own part of the time, so its copies now drift apart.",
)
def partial_not_summed(trials: Sequence[Trial]) -> bool:
    return sums_over(trials, "norm.weight", ("dp", "cp"), 2) and all_show(
        on_ranks(free(trials, 2)), cut_is_right
    )


@mistake(
    "partial gradients averaged",
    "The layer norm's gradients are averaged along tp. They are parts of one sum, not "
    "gradients of several mean losses.",
)
def partial_averaged(trials: Sequence[Trial]) -> bool:
    return all_show(
        on_ranks(free(trials, 2)),
        lambda trial, rank: (
            cut_is_right(trial, rank)
            and is_times(trial, rank, 1 / trial.case.facts["sizes"]["tp"], PARTIAL)
        ),
    )


@mistake(
    "share cut along tp too",
    "Ranks along tp computed different samples, or different times. They hold parts of the "
    "same matrices: only together can they compute a sample, so all of them need the same.",
)
def share_along_tp(trials: Sequence[Trial]) -> bool:
    """Return whether ranks along tp computed with other samples, or another part of the time."""

    def differ(trial: Trial) -> bool:
        seen = [torch.cat([x.flatten() for x in mine]) for mine in measured(trial, "seen")]
        return any(
            not torch.equal(seen[rank], seen[other])
            for rank in range(trial.world_size)
            for other in sharing(trial, rank, ("tp",))
        )

    return all_show((t for t in ended(trials, 2) if t.case.facts["sizes"]["tp"] > 1), differ)


@mistake(
    "whole batch on every rank",
    "The ranks along dp or cp compute the same tokens again. The values may be right, but "
    "more ranks don't make a step any faster.",
)
def whole_batch(trials: Sequence[Trial]) -> bool:
    """Return whether somewhere, ranks that differ along dp or cp computed the same tokens."""

    def overlap(trial: Trial) -> bool:
        seen = [
            {float(x) for part in mine for x in part.flatten()} for mine in measured(trial, "seen")
        ]
        return any(
            seen[rank] & seen[other]
            for rank in range(trial.world_size)
            for other in set(range(rank)) - sharing(trial, rank, ("tp",))
        )

    return any(map(overlap, ended(trials, 2)))


def first_norm(trial: Trial, rank: int) -> float:
    norms = measured(trial, "norms")[rank]
    return norms[0] if isinstance(norms, list) and norms else math.nan


def is_square(norm: float, squares: Iterable[float]) -> bool:
    return any(math.isclose(norm**2, square, rel_tol=1e-8) for square in squares)


@mistake(added_to_the_last.name, added_to_the_last.says)
def not_cleared(trials: Sequence[Trial]) -> bool:
    """Return whether the first step is right, and the second has the gradients of both."""

    def holds_both(trial: Trial, rank: int) -> bool:
        first, second = (right_step(trial, rank, step) for step in (0, 1))
        found = trial.results[rank]["gradients"][1]
        more = {name: found[name] - second[name] for name in CUT}
        return alike(first_step(trial, rank), first) and (
            scale(more, {name: first[name] for name in CUT}) is not None
        )

    return all_show(on_ranks(free(trials)), holds_both)


@mistake(
    "norm counts replicas twice",
    "Some numbers count several times in the norm, because several ranks hold them. A larger "
    "norm clips too much. Each number of the model must count once.",
)
def counts_replicas(trials: Sequence[Trial]) -> bool:
    """Return whether the squared norm counts the parts, or the rest, several times, not once."""

    def counted(trial: Trial, rank: int) -> bool:
        sizes, squares = trial.case.facts["sizes"], trial.case.facts["squares"]
        times = {1, *sizes.values(), sizes["dp"] * sizes["cp"], trial.world_size}
        parts, partial, bias = (sum(squares[n] for n in of) for of in (CUT, PARTIAL, ["bias"]))
        return is_square(
            first_norm(trial, rank),
            (
                a * parts + b * partial + c * bias
                for a, b, c in itertools.product(times, repeat=3)
                if max(a, b, c) > 1
            ),
        )

    check = norms_equal()
    return all_show(on_ranks(t for t in ended(trials, 2) if check.wrong(t) is not None), counted)


@mistake(
    "norm before the sum",
    "Each rank takes the norm of its own gradients, before they are added up. The norm of a "
    "sum isn't that of its parts, so the ranks clip by factors that have no meaning.",
)
def norm_before_the_sum(trials: Sequence[Trial]) -> bool:
    """Return whether the norm is that of gradients which no message has touched."""

    def squares(trial: Trial, ranks: Iterable[int], names: Collection[str]) -> float:
        local = measured(trial, "local")
        return sum(float(local[rank][name].square().sum()) for rank in ranks for name in names)

    def untouched(trial: Trial, rank: int) -> bool:
        every = set(trial.case.facts["squares"])
        own, peers = [rank], sharing(trial, rank, ("tp",))
        mistaken = (
            squares(trial, own, every),
            squares(trial, peers, every),
            squares(trial, peers, CUT) + squares(trial, own, every - set(CUT)),
        )
        return is_square(first_norm(trial, rank), mistaken)

    several = (t for t in free(trials) if t.world_size > t.case.facts["sizes"]["tp"])
    return all_show(on_ranks(several), untouched)


@mistake(
    "norm of one rank's part",
    "The norm is that of the gradients on this rank. With parts of the matrices on other "
    "ranks, every rank then clips by another factor.",
)
def norm_of_one_part(trials: Sequence[Trial]) -> bool:
    """Return whether each rank's norm is that of its own optimizer's gradients, before clipping."""

    def own(trial: Trial, rank: int) -> bool:
        square = sum(float(g.square().sum()) for g in first_step(trial, rank).values())
        return is_square(first_norm(trial, rank), [square])

    return all_show(on_ranks(free(trials, 2)), own)


@mistake(
    "gradients never clipped",
    "The norm is right, but no gradient is multiplied by max_norm / norm before the "
    "optimizer's step.",
)
def never_clipped(trials: Sequence[Trial]) -> bool:
    """Return whether norms are right, but optimizers got unclipped gradients where they clip."""
    return all_show(
        on_ranks(trial for trial in ended(trials) if trial.case.facts["clips"]),
        lambda trial, rank: (
            is_times(trial, rank, trial.case.facts["times"])
            and math.isclose(
                first_norm(trial, rank), trial.case.expected[rank]["norms"][0], rel_tol=1e-6
            )
        ),
    )


@mistake(NEVER_REDUCED.name, NEVER_REDUCED.says)
def never_reduced(trials: Sequence[Trial]) -> bool:
    return sums_over(trials, "first", ())


@mistake(
    "divides by the world size",
    "The sum of the gradients is divided by the number of all ranks. Ranks along tp share one "
    "piece of the batch, so there are only dp · cp pieces to average.",
)
def divided_by_world_size(trials: Sequence[Trial]) -> bool:
    return scaled(trials, lambda sizes: 1 / sizes["tp"])


@mistake(
    "sum for mean",
    "Gradients are added up and not averaged. Each belongs to the mean loss of one piece of "
    "the batch, so the sum is dp · cp times too large.",
)
def summed_for_mean(trials: Sequence[Trial]) -> bool:
    return scaled(trials, lambda sizes: sizes["dp"] * sizes["cp"])


MISCONCEPTIONS = (  # in the order in which they are tried
    *MESSAGES,
    share_along_tp,
    whole_batch,
    over_the_world,
    parts_over_tp,
    wrong_groups,
    never_reduced,
    cp_left_out,
    divided_by_world_size,
    summed_for_mean,
    partial_not_summed,
    partial_averaged,
    not_cleared,
    never_clipped,
    norm_before_the_sum,
    counts_replicas,
    norm_of_one_part,
)
