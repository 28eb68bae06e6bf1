"""Grades homework 4. `pytest homework/hw4_data_parallel` runs it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.grade.checks import MESSAGES, bytes_sent, close, communicated, difference, factor, right
from parallel101.grade.exercise import COLLECTIVES, OPTIM, P2P, Case, Check, Draw, Exercise, Misconception, Question, Trial
from parallel101.grade.harness import Steps, count_weights, gradients_of, make_model
from parallel101.sim.network import Network

SGD = {"lr": 0.1, "momentum": 0.9}  # with AdamW, gradients that are n times too large would go unnoticed
ITEM = 8  # bytes of a float64


def all_reduce_bytes(nbytes: float, n: int) -> int:
    """What each rank sends in an all-reduce, at least."""
    return round(2 * (n - 1) / n * nbytes)


# ---- 10: naive ----


def train(function, sizes: list[int], tied: bool, weights: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """What each rank runs. inputs: (steps, samples of this rank, features)."""
    model = make_model(sizes, weights, tied)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    steps = Steps(model, optimizer)
    function(model, F.mse_loss, optimizer, list(zip(inputs, targets)))
    return steps.result()


def train_whole(model, loss_fn, optimizer, batches) -> None:
    """One process with the whole batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def naive_case(draw: Draw, shares: Sequence[int], tied: bool = False, steps: int = 3) -> Case:
    """shares: how many samples of each step's batch each rank has."""
    n, sizes = len(shares), [8, 8, 8, 8] if tied else [5, 8, 6, 2]
    count = count_weights(sizes, tied)
    first = [0.5 * weights for weights in draw.tensors(n, count, dtype=torch.float64)]
    inputs = [draw.tensor(steps, share, sizes[0], dtype=torch.float64) for share in shares]
    targets = [draw.tensor(steps, share, sizes[-1], dtype=torch.float64) for share in shares]
    expected = train(train_whole, sizes, tied, first[0], torch.cat(inputs, 1), torch.cat(targets, 1))
    model = make_model(sizes, first[0], tied)
    local = [gradients_of(model, F.mse_loss(model(x[0]), y[0])) for x, y in zip(inputs, targets)]
    weight = sizes[0] * sizes[1] * ITEM
    uneven = len(set(shares)) > 1
    return Case(
        [(sizes, tied, first[rank], inputs[rank], targets[rank]) for rank in range(n)],
        [expected] * n,
        note=f"shares of {', '.join(map(str, shares))} samples" + (", tied weights" if tied else ""),
        facts={
            "bytes": count * ITEM, "steps": steps, "tied": {"0.weight": weight} if tied else {}, "uneven": uneven,
            "first": [dict(make_model(sizes, weights, tied).named_parameters()) for weights in first],
            "local": local, "mean of means": {name: sum(g[name] for g in local) / n for name in local[0]},
        },
        network=Network(latency=0.0, bandwidth=count * ITEM / 3),  # all weights in three seconds
    )  # fmt: skip


def naive_cases(draw: Draw) -> list[Case]:
    k = draw.integer(2, 3)
    return [
        naive_case(draw, [k]),
        naive_case(draw, [k, k]),
        naive_case(draw, [k, k], tied=True),
        naive_case(draw, [2, 4, 1]),
        naive_case(draw, [k] * 4),
        naive_case(draw, [1, k, 3, 1], tied=True),
    ]


def equals_one_process() -> Check:
    """The weights before the first step, each step's gradients, and the weights at the end."""

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected, strict=True)):
            for name in expected["start"]:
                if (what := difference(found["start"].get(name), expected["start"][name])) is not None:
                    return f"rank {rank} began with other weights than rank 0: its {name} is {what}"
            if len(found["gradients"]) != len(expected["gradients"]):
                return f"rank {rank} called optimizer.step() {len(found['gradients'])} times; expected {len(expected['gradients'])}"
            for step, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"]), start=1):
                for name in theirs:
                    if (what := difference(mine.get(name), theirs[name])) is not None:
                        return f"at step {step}, rank {rank}'s gradient of {name} is {what}"
            for name in expected["weights"]:
                if (what := difference(found["weights"].get(name), expected["weights"][name])) is not None:
                    return f"rank {rank}'s {name} at the end is {what}"
        return None

    return Check("value", "every step equals one process with the whole batch", wrong)


def naive_bytes(case: Case) -> list[int]:
    n, facts = case.world_size, case.facts
    return [facts["steps"] * all_reduce_bytes(facts["bytes"], n) + (facts["bytes"] if n > 1 else 0)] * n


def naive_slack(case: Case) -> int:
    """Counts, and the remainders of chunks if each gradient goes round a ring of the learner's own."""
    n = case.world_size
    return 64 + case.facts["steps"] * (32 + 6 * 2 * ITEM * (n - 1) ** 2 // n)


def naive_least(case: Case) -> list[int]:
    """A rank receives at least the sum of the others' gradients in each step; all but rank 0 also the first weights."""
    n, facts = case.world_size, case.facts
    if n == 1:
        return [0]
    return [facts["steps"] * facts["bytes"] + (rank > 0) * facts["bytes"] * (n - 1) // n - 64 for rank in range(n)]


# What a wrong program's first step shows


def alike(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> bool:
    """Whether all gradients, or weights, are as expected."""
    return all(isinstance(found.get(name), Tensor) and close(found[name], value) for name, value in expected.items())


def scale(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> float | None:
    """k if all of `found` is k times `expected`, and k is not 1."""
    if set(found) != set(expected) or any(value is None for value in found.values()):
        return None
    return factor(torch.cat([found[name].flatten() for name in expected]), torch.cat([value.flatten() for value in expected.values()]))


def first_steps(trials: Sequence[Trial]) -> list[tuple[Trial, int, dict]]:
    """(trial, rank, gradients of the first step) of all ranks that got that far, in runs of two or more ranks with wrong values."""
    ended = [trial for trial in trials if trial.error is None and trial.world_size > 1 and not right(trial)]
    return [
        (t, r, found["gradients"][0]) for t in ended for r, found in enumerate(t.results) if isinstance(found, dict) and found["gradients"]
    ]


def unsynchronised(trials: Sequence[Trial]) -> bool:
    found = [(t, r) for t, r, _ in first_steps(trials) if r > 0]
    return bool(found) and all(alike(t.results[r]["start"], t.case.facts["first"][r]) for t, r in found)


def summed(trials: Sequence[Trial]) -> bool:
    """n times the mean over the ranks' means, or over all samples."""
    found = first_steps(trials)
    rules = [(t, g, rule) for t, _, g in found for rule in (t.case.expected[0]["gradients"][0], t.case.facts["mean of means"])]
    hits = {id(g) for t, g, rule in rules if _is(scale(g, rule), t.world_size)}
    return bool(found) and len(hits) == len(found)


def divided_twice(trials: Sequence[Trial]) -> bool:
    found = first_steps(trials)
    rules = [(t, g, rule) for t, _, g in found for rule in (t.case.expected[0]["gradients"][0], t.case.facts["mean of means"])]
    hits = {id(g) for t, g, rule in rules if _is(scale(g, rule), 1 / t.world_size)}
    return bool(found) and len(hits) == len(found)


def _is(k: float | None, expected: float) -> bool:
    return k is not None and abs(k - expected) < 1e-4 * expected


def mean_of_means(trials: Sequence[Trial]) -> bool:
    found = [(t, g) for t, _, g in first_steps(trials)]
    return bool(found) and all(t.case.facts["uneven"] and alike(g, t.case.facts["mean of means"]) for t, g in found)


def never_reduced(trials: Sequence[Trial]) -> bool:
    """Each rank's gradient is its own, or some share of it."""
    found = first_steps(trials)
    return bool(found) and all(alike(g, t.case.facts["local"][r]) or scale(g, t.case.facts["local"][r]) is not None for t, r, g in found)


def added_to_the_last(trials: Sequence[Trial]) -> bool:
    """The first step is right, and the second has the gradients of both."""
    failed = [trial for trial in trials if trial.error is None and not right(trial)]
    pairs = [(found["gradients"], expected["gradients"]) for t in failed for found, expected in zip(t.results, t.case.expected)]
    return bool(pairs) and all(
        len(mine) > 1 and alike(mine[0], theirs[0]) and alike(mine[1], {name: theirs[0][name] + theirs[1][name] for name in theirs[0]})
        for mine, theirs in pairs
    )


def tied_twice(trials: Sequence[Trial]) -> bool:
    """Only tied weights are wrong, all the rest is right; or all is right, and the tied weights' bytes were sent once more."""
    tied = [t for t in trials if t.error is None and t.world_size > 1 and t.case.facts["tied"]]
    others = [t for t in trials if t.error is None and not t.case.facts["tied"]]
    if not tied or not all(right(t) and bytes_check.wrong(t) is None for t in others):
        return False

    def shows(trial: Trial) -> bool:
        facts = trial.case.facts
        again = facts["steps"] * all_reduce_bytes(sum(facts["tied"].values()), trial.world_size)
        if right(trial):
            once = naive_bytes(trial.case)[0] - facts["bytes"] // trial.world_size  # torch's broadcast counts (n−1)/n of the weights
            return min(communicated(trial)) >= once + 0.9 * again
        expected = trial.case.expected[0]["gradients"][0]
        alone = {name: value for name, value in expected.items() if name not in facts["tied"]}
        return all(alike(found["gradients"][0], alone) and not alike(found["gradients"][0], expected) for found in trial.results)

    return all(shows(trial) for trial in tied)


bytes_check = bytes_sent(naive_bytes, "2(n−1)/n of the gradients' bytes per step, and the weights once", naive_slack)

NO_FIRST_SYNCHRONISATION = Misconception(
    "no first synchronisation",
    "Every rank starts from its own weights. Equal gradients then change unequal weights, so the replicas never become equal.",
    unsynchronised,
)
SUM_FOR_MEAN = Misconception(
    "sum for mean",
    "An all-reduce adds the ranks' gradients. Each of them belongs to a mean over one share, so their sum is n times the gradient of the "
    "mean loss, and each step is n times too long.",
    summed,
)
MEAN_TWICE = Misconception(
    "mean taken twice",
    "The gradients are divided by n twice, for example once in the loss and once after the all-reduce: each step is n times too short.",
    divided_twice,
)
MEAN_OF_MEANS = Misconception(
    "mean of means",
    "Each rank takes the mean over its share, and then all ranks' means count the same. If shares differ in length, the samples of a short "
    "share count more than those of a long one.",
    mean_of_means,
)
NEVER_REDUCED = Misconception(
    "gradients never synchronised",
    "At optimizer.step(), p.grad still holds this rank's own gradient. Each rank takes a different step.",
    never_reduced,
)
NO_ZERO_GRAD = Misconception(
    "gradients not cleared",
    "backward() adds to p.grad. The gradients of the step before are still there, so they are counted again.",
    added_to_the_last,
)
TIED_TWICE = Misconception(
    "tied weights reduced twice",
    "Two layers share one parameter, and its gradient is all-reduced once for each layer. It is one tensor: the second all-reduce adds up "
    "sums, or at least sends the same bytes again.",
    tied_twice,
)


def bytes_question() -> Case:
    return naive_case(Draw("question"), [2] * 4)


EXERCISES = [
    Exercise(
        number="10",
        function="train_naive",
        title="Naive data parallel",
        points=10,
        cases=naive_cases,
        program=train,
        allowed=P2P | COLLECTIVES,
        imports=OPTIM,
        checks=(equals_one_process(), bytes_check),
        least_received=naive_least,
        misconceptions=(
            *MESSAGES, NO_FIRST_SYNCHRONISATION, NEVER_REDUCED, SUM_FOR_MEAN, MEAN_TWICE, TIED_TWICE, MEAN_OF_MEANS, NO_ZERO_GRAD,
        ),
        hints=(
            "Run the loop of one process on each rank. What must be equal on all ranks before the first step, and what before each step?",
            "Broadcast rank 0's parameters. After backward(), all-reduce each p.grad: that adds. The mean over all samples is "
            "Σ (sum of a rank's losses) / (samples of all ranks).",
            "All-reduce len(inputs) into total. loss = loss_fn(…) * len(inputs) / total; loss.backward(); dist.all_reduce(p.grad) for each "
            "p in model.parameters(), which yields a tied parameter once; optimizer.step().",
        ),
        questions=(
            Question(
                "sent",
                "Four ranks train a model of 116 numbers of float64 for three steps. How many bytes does each rank send, weights included?",
                bytes_question,
                lambda trial: max(communicated(trial)),
                "bytes",
            ),
        ),
        picture="lanes",
    ),
]  # fmt: skip
