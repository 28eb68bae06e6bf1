"""Shared code of exercises on a mesh: bytes by axis, sums over ranks, and usual mistakes.

    rank = (dp · cp ranks + cp) · tp ranks + tp            the last axis runs fastest

Each rank returns the gradients of its first backward before any message ("local"). So a sum over
wrong ranks shows in its coefficients: found = Σ cᵣ · local of rank r. Calls from the exercise's own
program send activations, and don't count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from parallel101.laboratory.exercises.training_exercises import (
    NEVER_REDUCED,
    NO_ZERO_GRAD,
    alike,
    ended,
    equals_one_process,
    measured,
    recorded,
    scale,
)
from parallel101.laboratory.grade.compared_values import close, weights
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial
from parallel101.laboratory.grade.exercise_checks import MESSAGES, communicated
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


def sent_along(trial: Trial) -> dict[frozenset[str], list[int]]:
    """Return the bytes that the learner's own calls sent, by axes and rank.

    Messages of activations, which the exercise's program sends, don't count.
    """
    sizes, n = trial.case.facts["sizes"], trial.world_size
    by_axes: dict[frozenset[str], list[Event]] = {}
    for event in trial.trace.events:
        if event.kind == "span" or event.where.rpartition(":")[0] == trial.case.facts["program"]:
            continue
        ranks: Collection[int] = event.group.ranks or range(n)
        if event.kind in ("send", "recv") and event.peer is not None:
            ranks = (event.rank, event.peer)
        by_axes.setdefault(axes_of(sizes, ranks), []).append(event)
    trace = type(trial.trace)
    return {
        axes: communicated(Trial(trial.case, [], trace(events, n, trial.trace.backend)))
        for axes, events in by_axes.items()
    }


def sent(trial: Trial, kind: Callable[[frozenset[str]], bool]) -> int:
    """Return the bytes that the busiest rank sent along axes of this kind."""
    totals = [bytes_ for axes, bytes_ in sent_along(trial).items() if kind(axes)]
    return max(map(sum, zip(*totals)), default=0)


def is_data(axes: frozenset[str]) -> bool:
    return bool(axes) and "tp" not in axes


def is_tensor(axes: frozenset[str]) -> bool:
    return axes == {"tp"}


def crosses(axes: frozenset[str]) -> bool:
    return "tp" in axes and len(axes) > 1


def ring(nbytes: float, n: int) -> int:
    return round(2 * (n - 1) / n * nbytes)


def most_along(case: Case, kind: Callable[[frozenset[str]], bool]) -> int:
    """Return the bytes along axes of this kind that are enough for all steps."""
    sizes, steps = case.facts["sizes"], case.facts["steps"]
    if kind is is_data:
        # a learner's own ring adds the remainders of its chunks
        each = sum(ring(case.facts["bytes"], sizes[axis]) for axis in ("dp", "cp")) + 100
    else:
        each = ring(case.facts["replicated"], sizes["tp"] if kind is is_tensor else case.world_size)
    return steps * (each + SMALL)


def bytes_along(kind: Callable[[frozenset[str]], bool], which: str, says: str) -> Check:
    def wrong(trial: Trial) -> str | None:
        found, most = sent(trial, kind), most_along(trial.case, kind)
        return (
            None
            if found <= most
            else f"a rank sent {found} bytes of gradients {which}; {most} are enough"
        )

    return Check("bytes", says, wrong)


# ---- checks ----


def gradients_equal() -> Check:
    inner = equals_one_process()

    def wrong(trial: Trial) -> str | None:
        return None if trial.case.facts["clips"] else inner.wrong(trial)

    return Check("value", "without clipping, every step equals one process", wrong)


def clipped_as_expected(trial: Trial, rank: int) -> bool:
    found, expected = trial.results[rank], trial.case.expected[rank]
    return (
        recorded(found)
        and len(found["gradients"]) == len(expected["gradients"])
        and all(
            isinstance(mine.get(name), Tensor) and close(mine[name], value, 1e-5)
            for mine, theirs in zip(found["gradients"], expected["gradients"])
            for name, value in theirs.items()
        )
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
    def wrong(trial: Trial) -> str | None:
        sizes = trial.case.facts["sizes"]
        most = trial.case.facts["steps"] * trial.case.facts["tokens"] // (sizes["dp"] * sizes["cp"])
        for rank, seen in enumerate(measured(trial, "seen")):
            tokens = sum(x.numel() for x in seen)
            if tokens > most:
                return f"rank {rank} computed {tokens} tokens; its share is {most}"
        return None

    return Check("memory", "each rank computes 1/(dp · cp) of the tokens", wrong)


# ---- misconceptions ----


def first_step(trial: Trial, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a rank's first optimizer step."""
    result = trial.results[rank]
    return result["gradients"][0] if recorded(result) and result["gradients"] else {}


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
    found = free(trials, least_tp)
    return bool(found) and all(
        summed_ranks(trial, rank, name) == sharing(trial, rank, axes)
        for trial in found
        for rank in range(trial.world_size)
    )


def many_bytes(trial: Trial, kind: Callable[[frozenset[str]], bool]) -> bool:
    return sent(trial, kind) > most_along(trial.case, kind)


def over_the_world(trials: Sequence[Trial]) -> bool:
    """Return whether gradients of parts were sent across axes: to all ranks, if all took part."""
    found = free(trials, 2)
    return bool(found) and all(
        many_bytes(trial, crosses)
        and all(
            summed_ranks(trial, rank, "first") in (set(range(trial.world_size)), None)
            or alike(first_step(trial, rank), trial.case.expected[rank]["gradients"][0])
            for rank in range(trial.world_size)
        )
        for trial in found
    )


def parts_over_tp(trials: Sequence[Trial]) -> bool:
    return sums_over(trials, "first", AXES, 2) and not over_the_world(trials)


def wrong_groups(trials: Sequence[Trial]) -> bool:
    """Return whether ranks summed gradients of several ranks that are not those along dp and cp."""
    found = free(trials, 2)

    def confused(trial: Trial, rank: int) -> bool:
        summed = summed_ranks(trial, rank, "first") or set()
        right = sharing(trial, rank, ("dp", "cp"))
        return 1 < len(summed) < trial.world_size and not summed <= right

    return bool(found) and all(
        any(confused(trial, rank) for rank in range(trial.world_size)) for trial in found
    )


def cp_left_out(trials: Sequence[Trial]) -> bool:
    found = [trial for trial in free(trials) if trial.case.facts["sizes"]["cp"] > 1]
    return sums_over(found, "first", ("dp",))


def scaled(trials: Sequence[Trial], by: Callable[[dict[str, int]], float]) -> bool:
    """Return whether all gradients are `by` times the right ones, wherever that is not 1."""
    found = [t for t in free(trials) if by(t.case.facts["sizes"]) != 1]
    return bool(found) and all(
        (k := scale(first_step(trial, rank), trial.case.expected[rank]["gradients"][0])) is not None
        and math.isclose(k, by(trial.case.facts["sizes"]), rel_tol=1e-6)
        for trial in found
        for rank in range(trial.world_size)
    )


def cut_is_right(trial: Trial, rank: int) -> bool:
    expected = trial.case.expected[rank]["gradients"][0]
    return alike(first_step(trial, rank), {name: expected[name] for name in CUT})


def partial_not_summed(trials: Sequence[Trial]) -> bool:
    found = free(trials, 2)
    return sums_over(trials, "norm.weight", ("dp", "cp"), 2) and all(
        cut_is_right(trial, rank) for trial in found for rank in range(trial.world_size)
    )


def partial_averaged(trials: Sequence[Trial]) -> bool:
    found = free(trials, 2)

    def averaged(trial: Trial, rank: int) -> bool:
        expected = trial.case.expected[rank]["gradients"][0]
        k = scale(first_step(trial, rank), {name: expected[name] for name in PARTIAL})
        return k is not None and math.isclose(k * trial.case.facts["sizes"]["tp"], 1, rel_tol=1e-6)

    return bool(found) and all(
        cut_is_right(trial, rank) and averaged(trial, rank)
        for trial in found
        for rank in range(trial.world_size)
    )


def share_along_tp(trials: Sequence[Trial]) -> bool:
    """Return whether ranks along tp computed with other samples, or another part of the time."""
    found = [t for t in ended(trials, 2) if t.case.facts["sizes"]["tp"] > 1]

    def differ(trial: Trial) -> bool:
        seen = [torch.cat([x.flatten() for x in mine]) for mine in measured(trial, "seen")]
        return any(
            not torch.equal(seen[rank], seen[other])
            for rank in range(trial.world_size)
            for other in sharing(trial, rank, ("tp",))
        )

    return bool(found) and all(map(differ, found))


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


def first_norms(trial: Trial) -> list[float]:
    return [
        norms[0] if isinstance(norms, list) and norms else math.nan
        for norms in measured(trial, "norms")
    ]


def not_cleared(trials: Sequence[Trial]) -> bool:
    """Return whether the first step is right, and the second has the gradients of both."""
    found = free(trials)

    def holds_both(trial: Trial, rank: int) -> bool:
        expected = trial.case.expected[rank]["gradients"]
        second = trial.results[rank]["gradients"][1]
        more = {name: second[name] - expected[1][name] for name in CUT}
        return alike(first_step(trial, rank), expected[0]) and (
            scale(more, {name: expected[0][name] for name in CUT}) is not None
        )

    return bool(found) and all(
        holds_both(trial, rank) for trial in found for rank in range(trial.world_size)
    )


def counts_replicas(trials: Sequence[Trial]) -> bool:
    """Return whether the squared norm counts the parts, or the rest, several times, not once."""

    def squares(trial: Trial, names: Collection[str]) -> float:
        return sum(trial.case.facts["squares"][name] for name in names)

    def counted(trial: Trial) -> bool:
        sizes, n = trial.case.facts["sizes"], trial.world_size
        times = {1, *sizes.values(), sizes["dp"] * sizes["cp"], n}
        parts, partial, bias = (squares(trial, of) for of in (CUT, PARTIAL, ["bias"]))
        mistaken = [
            a * parts + b * partial + c * bias
            for a, b, c in itertools.product(times, repeat=3)
            if max(a, b, c) > 1
        ]
        return all(
            any(math.isclose(norm**2, square, rel_tol=1e-8) for square in mistaken)
            for norm in first_norms(trial)
        )

    found = [t for t in ended(trials, 2) if norms_equal().wrong(t) is not None]
    return bool(found) and all(map(counted, found))


def norm_before_the_sum(trials: Sequence[Trial]) -> bool:
    """Return whether the norm is that of gradients which no message has touched."""
    found = [t for t in free(trials) if t.world_size > t.case.facts["sizes"]["tp"]]

    def squares(trial: Trial, rank: int, names: Collection[str]) -> float:
        local = measured(trial, "local")[rank]
        return sum(float(local[name].square().sum()) for name in names)

    def untouched(trial: Trial, rank: int) -> bool:
        every = set(trial.case.facts["squares"])
        peers = sharing(trial, rank, ("tp",))
        mistaken = (
            squares(trial, rank, every),
            sum(squares(trial, peer, every) for peer in peers),
            sum(squares(trial, peer, CUT) for peer in peers)
            + squares(trial, rank, every - set(CUT)),
        )
        norm = first_norms(trial)[rank]
        return any(math.isclose(norm**2, square, rel_tol=1e-8) for square in mistaken)

    return bool(found) and all(
        untouched(trial, rank) for trial in found for rank in range(trial.world_size)
    )


def norm_of_one_part(trials: Sequence[Trial]) -> bool:
    """Return whether each rank's norm is that of its own optimizer's gradients, before clipping."""
    found = free(trials, 2)

    def own(trial: Trial, rank: int) -> float:
        squares = sum(float(g.square().sum()) for g in first_step(trial, rank).values())
        return math.sqrt(squares)

    return bool(found) and all(
        math.isclose(norm, own(trial, rank), rel_tol=1e-8)
        for trial in found
        for rank, norm in enumerate(first_norms(trial))
    )


def never_clipped(trials: Sequence[Trial]) -> bool:
    """Return whether norms are right, but optimizers got unclipped gradients where they clip."""
    found = [trial for trial in ended(trials) if trial.case.facts["clips"]]

    def unclipped(trial: Trial, rank: int) -> bool:
        expected = trial.case.expected[rank]
        k = scale(first_step(trial, rank), expected["gradients"][0])
        norm = first_norms(trial)[rank]
        return (
            k is not None
            and math.isclose(k, trial.case.facts["times"], rel_tol=1e-6)
            and math.isclose(norm, expected["norms"][0], rel_tol=1e-6)
        )

    return bool(found) and all(unclipped(t, rank) for t in found for rank in range(t.world_size))


MISCONCEPTIONS = (
    *MESSAGES,
    Misconception(
        "share cut along tp too",
        "Ranks along tp computed different samples, or different times. They hold parts of the "
        "same matrices: only together can they compute a sample, so all of them need the same.",
        share_along_tp,
    ),
    Misconception(
        "whole batch on every rank",
        (
            "The ranks along dp or cp compute the same tokens again. The values may be right, but "
            "more ranks don't make a step any faster."
        ),
        whole_batch,
    ),
    Misconception(
        "reduces over the world",
        (
            "Gradients are added up over all ranks of the world. Ranks along tp hold different "
            "parts of the matrices: their gradients don't belong together."
        ),
        over_the_world,
    ),
    Misconception(
        "parts summed over tp",
        (
            "The gradients of parameters that are cut are added up along tp. Each rank has a "
            "different part of the matrix, so this adds gradients of different weights."
        ),
        parts_over_tp,
    ),
    Misconception(
        "groups of the wrong ranks",
        (
            "Gradients are added up over ranks that don't share a part of the model: rows and "
            "columns of the mesh are confused. The last axis runs fastest."
        ),
        wrong_groups,
    ),
    Misconception(
        NEVER_REDUCED.name,
        NEVER_REDUCED.says,
        lambda trials: sums_over(trials, "first", ()),
    ),
    Misconception(
        "cp left out",
        (
            "Gradients are averaged along dp only. Ranks along cp computed other parts of the "
            "same sequences with the same weights, so their gradients count as well."
        ),
        cp_left_out,
    ),
    Misconception(
        "divides by the world size",
        (
            "The sum of the gradients is divided by the number of all ranks. Ranks along tp share "
            "one piece of the batch, so there are only dp · cp pieces to average."
        ),
        lambda trials: scaled(trials, lambda sizes: 1 / sizes["tp"]),
    ),
    Misconception(
        "sum for mean",
        (
            "Gradients are added up and not averaged. Each belongs to the mean loss of one piece "
            "of the batch, so the sum is dp · cp times too large."
        ),
        lambda trials: scaled(trials, lambda sizes: sizes["dp"] * sizes["cp"]),
    ),
    Misconception(
        "partial gradients not summed",
        (
            "The layer norm's gradients are not added up along tp. Each rank along tp used these "
            "weights for its own part of the time, so its copies now drift apart."
        ),
        partial_not_summed,
    ),
    Misconception(
        "partial gradients averaged",
        (
            "The layer norm's gradients are averaged along tp. They are parts of one sum, not "
            "gradients of several mean losses."
        ),
        partial_averaged,
    ),
    Misconception(NO_ZERO_GRAD.name, NO_ZERO_GRAD.says, not_cleared),
    Misconception(
        "gradients never clipped",
        (
            "The norm is right, but no gradient is multiplied by max_norm / norm before the "
            "optimizer's step."
        ),
        never_clipped,
    ),
    Misconception(
        "norm before the sum",
        (
            "Each rank takes the norm of its own gradients, before they are added up. The norm of "
            "a sum isn't that of its parts, so the ranks clip by factors that have no meaning."
        ),
        norm_before_the_sum,
    ),
    Misconception(
        "norm counts replicas twice",
        (
            "Some numbers count several times in the norm, because several ranks hold them. A "
            "larger norm clips too much. Each number of the model must count once."
        ),
        counts_replicas,
    ),
    Misconception(
        "norm of one rank's part",
        (
            "The norm is that of the gradients on this rank. With parts of the matrices on other "
            "ranks, every rank then clips by another factor."
        ),
        norm_of_one_part,
    ),
)
