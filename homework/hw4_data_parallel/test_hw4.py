"""Grades homework 4. `pytest homework/hw4_data_parallel` runs it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.grade.checks import MESSAGES, bytes_sent, close, communicated, difference, factor, failed, right, same, value
from parallel101.grade.exercise import COLLECTIVES, OPTIM, P2P, Case, Check, Draw, Exercise, Misconception, Question, Trial
from parallel101.grade.harness import BACKWARD, FORWARD, Steps, count_weights, gradients_of, make_model, mark_gradients
from parallel101.grade.training import (
    MEAN_OF_MEANS,
    MEAN_TWICE,
    NEVER_REDUCED,
    NO_FIRST_SYNCHRONISATION,
    NO_ZERO_GRAD,
    SUM_FOR_MEAN,
    alike,
    equals_one_process,
    flat,
    scale,
    scaled,
)
from parallel101.record.errors import MisuseError
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
    return Case(
        [(sizes, tied, first[rank], inputs[rank], targets[rank]) for rank in range(n)],
        [expected] * n,
        note=f"shares of {', '.join(map(str, shares))} samples" + (", tied weights" if tied else ""),
        facts={
            "bytes": count * ITEM, "steps": steps, "tied": {"0.weight": weight} if tied else {},
            "first": [dict(make_model(sizes, weights, tied).named_parameters()) for weights in first],
            "local": local,
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


bytes_check = bytes_sent(naive_bytes, "2(n−1)/n of the gradients' bytes per step, and the weights once", naive_slack)


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


TIED_TWICE = Misconception(
    "tied weights reduced twice",
    "Two layers share one parameter, and its gradient is all-reduced once for each layer. It is one tensor: the second all-reduce adds up "
    "sums, or at least sends the same bytes again.",
    tied_twice,
)


# ---- 11: buckets ----

CALLS = {"reduce_scatter": 0.5, "all_gather": 0.5}  # the two halves of an all-reduce; any other collective is one call


def average(function, names: list[str], shapes: list[list[int]], values: Tensor, cap: int) -> dict[str, Tensor]:
    """What each rank runs. values: all gradients, one after the other."""
    pieces = values.split([math.prod(shape) for shape in shapes])
    return function({name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes)}, cap)


def bucket_case(draw: Draw, n: int, shapes: list[list[int]], cap: int, dtype: torch.dtype, shuffled: bool, note: str) -> Case:
    names = [f"layer{number}" for number in range(len(shapes))]
    gradients = [{name: draw.tensor(*shape, dtype=dtype) for name, shape in zip(names, shapes)} for _ in range(n)]
    orders = [names[-rank:] + names[:-rank] if shuffled else names for rank in range(n)]
    flats = [torch.cat([own[name].flatten() for name in order]) for own, order in zip(gradients, orders)]
    mean = {name: torch.stack([own[name].double() for own in gradients]).mean(0).to(dtype) for name in names}
    item = dtype.itemsize
    sizes = {name: math.prod(shape) * item for name, shape in zip(names, shapes)}
    return Case(
        [(order, [shapes[names.index(name)] for name in order], flat_, cap) for order, flat_ in zip(orders, flats)],
        [mean] * n,
        note=note,
        facts={
            "bytes": sum(sizes.values()), "largest": max(sizes.values()), "cap": cap, "shuffled": shuffled, "count": len(names),
            "buckets": math.floor(2 * sum(sizes.values()) / cap) + 1,  # two neighbours are larger than the cap together
            "local": gradients, "orders": orders, "in own order": torch.stack(flats).double().mean(0),
        },
        network=Network(latency=1.0, bandwidth=math.inf),
    )  # fmt: skip


def bucket_cases(draw: Draw) -> list[Case]:
    mixed = [[3, 4], [2], [5, 3], [7], [4], [2, 6], [1], [3, 3], [8], [5], [2, 2], [6]]
    same = [[2, 3]] * 10
    total = 4 * sum(map(math.prod, mixed))
    return [
        bucket_case(draw, 1, mixed, total // 3, torch.float32, False, "three buckets"),
        bucket_case(draw, 2, mixed, total // 3, torch.float32, False, "the same order on all ranks"),
        bucket_case(draw, 2, same, 150, torch.float64, True, "orders that differ"),
        bucket_case(draw, 3, mixed, 40, torch.float32, True, "orders that differ, and gradients above the cap"),
        bucket_case(draw, 4, mixed, 10 * total, torch.float64, False, "a cap above all gradients together"),
        bucket_case(draw, 4, mixed, total // 2, torch.float32, True, "orders that differ"),
    ]


def calls(trial: Trial) -> float:
    """All-reduces of the busiest rank; 2(n−1) messages are one, as in a ring."""
    n = max(trial.world_size, 2)
    count = [0.0] * trial.world_size
    for event in trial.trace.events:
        if not event.dtype.startswith("float"):
            continue  # not gradients: an order, for example
        if event.kind == "send":
            count[event.rank] += 1 / (2 * (n - 1))
        elif event.kind in COLLECTIVES:
            count[event.rank] += CALLS.get(event.kind, 1.0)
    return max(count)


def few_calls() -> Check:
    def wrong(trial: Trial) -> str | None:
        most = trial.case.facts["buckets"] + 1  # one more, to agree on an order
        found = calls(trial)
        return None if found <= most else f"{found:g} all-reduces for {trial.case.facts['count']} gradients; {most - 1} buckets are enough"

    return Check("steps", "no more all-reduces than buckets", wrong)


def largest_payload(trial: Trial) -> int:
    return max((e.nbytes for e in trial.trace.events if e.kind in COLLECTIVES and e.dtype.startswith("float")), default=0)


def under_the_cap() -> Check:
    def wrong(trial: Trial) -> str | None:
        facts = trial.case.facts
        most, found = max(facts["cap"], facts["largest"]), largest_payload(trial)
        return None if found <= most + 32 else f"a bucket has {found} bytes; the cap is {facts['cap']}"

    return Check("memory", "no bucket above the cap, unless it holds one gradient", wrong)


def own_order(trials: Sequence[Trial]) -> bool:
    """Wrong only where the ranks' orders differ: buckets of other sizes meet, or values of other gradients are added."""
    several = [trial for trial in trials if trial.world_size > 1]
    wrong = [trial for trial in several if not right(trial)]
    if not wrong or not all(trial.case.facts["shuffled"] for trial in wrong):
        return False

    def in_own_order(trial: Trial) -> bool:
        mean = trial.case.facts["in own order"]
        pairs = list(zip(trial.results, trial.case.facts["orders"]))
        if not all(isinstance(found, dict) and all(isinstance(found.get(name), Tensor) for name in order) for found, order in pairs):
            return False
        return all(close(flat(found, order).double(), mean, 1e-5) for found, order in pairs)

    return any(isinstance(trial.error, MisuseError) or (trial.error is None and in_own_order(trial)) for trial in wrong)


def never_flushed(trials: Sequence[Trial]) -> bool:
    """Some gradients are right, and the others are what the rank had, or a share of it."""
    wrong = [trial for trial in failed(trials) if trial.error is None and trial.world_size > 1 and not trial.case.facts["shuffled"]]
    if not wrong:
        return False

    def state(trial: Trial, rank: int, name: str) -> str:
        found = trial.results[rank].get(name) if isinstance(trial.results[rank], dict) else None
        expected, own = trial.case.expected[rank][name], trial.case.facts["local"][rank][name]
        if found is None:
            return "missing"
        if difference(found, expected) is None:
            return "right"
        return "own" if same(found, own) or factor(found, own) is not None else "other"

    states = [{state(trial, rank, name) for name in trial.case.expected[rank]} for trial in wrong for rank in range(trial.world_size)]
    return all(found <= {"right", "own", "missing"} for found in states) and any(
        "right" in found and found & {"own", "missing"} for found in states
    )


def dict_times_n(trials: Sequence[Trial]) -> bool:
    wrong = [trial for trial in failed(trials) if trial.error is None and not trial.case.facts["shuffled"]]
    pairs = [(trial, found, expected) for trial in wrong for found, expected in zip(trial.results, trial.case.expected)]
    ks = [scale(found, expected) if isinstance(found, dict) else None for _, found, expected in pairs]
    return bool(pairs) and all(k is not None and abs(k / trial.world_size - 1) < 1e-4 for k, (trial, _, _) in zip(ks, pairs))


OWN_ORDER = Misconception(
    "order that differs between ranks",
    "Each rank fills its buckets in its own order. An all-reduce adds what lies at the same place, so different gradients are added to "
    "each other, or buckets of different sizes meet.",
    own_order,
)
NEVER_FLUSHED = Misconception(
    "last bucket never flushed",
    "A bucket is all-reduced when the next gradient no longer fits. After the last gradient nothing follows, so the last bucket is "
    "never all-reduced.",
    never_flushed,
)
BUCKETS_SUMMED = replace(SUM_FOR_MEAN, seen=dict_times_n)
ABOVE_THE_CAP = Misconception(
    "bucket above its cap",
    "A bucket holds more than the cap: it is closed when the gradient that no longer fits is already in it, or never before the end.",
    lambda trials: all(map(right, trials)) and any(t.case.facts["largest"] < t.case.facts["cap"] < largest_payload(t) - 32 for t in trials),
)
ONE_BY_ONE = Misconception(
    "one all-reduce for each gradient",
    "Every gradient has an all-reduce of its own, so every gradient pays the latency.",
    lambda trials: all(map(right, trials)) and all(calls(t) >= t.case.facts["count"] for t in trials if t.world_size > 1),
)


# ---- 12: overlapped ----

LAYERS = 4


def train_in_microbatches(function, sizes: list[int], weights: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """What each rank runs. inputs: (steps, microbatches, samples, features)."""
    model = make_model(sizes, weights)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    steps = Steps(model, optimizer)
    mark_gradients(model)
    function(model, F.mse_loss, optimizer, [list(zip(*share)) for share in zip(inputs, targets)])
    return steps.result()


def overlap_case(draw: Draw, n: int, microbatches: int, steps: int = 2) -> Case:
    sizes = [8] * (LAYERS + 1)
    count = count_weights(sizes)
    weights = 0.5 * draw.tensor(count, dtype=torch.float64)
    inputs = draw.tensors(n, steps, microbatches, 2, 8, dtype=torch.float64)
    targets = draw.tensors(n, steps, microbatches, 2, 8, dtype=torch.float64)
    expected = train(train_whole, sizes, False, weights, torch.cat(inputs, 2).flatten(1, 2), torch.cat(targets, 2).flatten(1, 2))
    model = make_model(sizes, weights)
    local = [gradients_of(model, F.mse_loss(model(x[0].flatten(0, 1)), y[0].flatten(0, 1))) for x, y in zip(inputs, targets)]
    return Case(
        [(sizes, weights, inputs[rank], targets[rank]) for rank in range(n)],
        [expected] * n,
        note=f"{microbatches} microbatch{'es' * (microbatches > 1)}",
        facts={
            "bytes": count * ITEM, "steps": steps, "microbatches": microbatches, "local": local,
            "compute": microbatches * LAYERS * (FORWARD + BACKWARD), "communication": 2 * (n - 1) / n * LAYERS,
        },
        network=Network(latency=0.0, bandwidth=count * ITEM / LAYERS),  # each layer's weights take a second
    )  # fmt: skip


def overlap_cases(draw: Draw) -> list[Case]:
    return [overlap_case(draw, *case) for case in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 1))]


def gradient_bytes(case: Case) -> list[int]:
    return [case.facts["steps"] * all_reduce_bytes(case.facts["bytes"], case.world_size)] * case.world_size


class StepRecord(NamedTuple):
    """One step of one rank, from its record."""

    rank: int
    step: int
    seconds: float
    first_sent: float | None  # when the first gradients were sent
    last_ready: float  # when backward had made the last gradient
    last_forward: float  # when the last microbatch's forward began
    sent: int  # bytes of messages and collectives, counted as calls count them


def steps_of(trial: Trial) -> list[StepRecord]:
    found = []
    for rank in range(trial.world_size):
        own = [event for event in trial.trace.events if event.rank == rank]
        begin = 0.0
        for number, mark in enumerate((e for e in own if e.name == "optimizer step"), start=1):
            inside = [e for e in own if begin <= e.posted and (e.posted < mark.start or (e.kind != "span" and e.posted <= mark.start))]
            sent = [e for e in inside if e.kind != "span" and e.kind != "recv" and e.nbytes > 32]
            ready = [e.end for e in inside if e.name == "backward"]
            forwards = [e.start for e in inside if e.name == "forward" and (e.args or {}).get("layer") == 0]
            first = min((e.posted for e in sent), default=None)
            found.append(
                StepRecord(
                    rank,
                    number,
                    mark.start - begin,
                    first,
                    max(ready, default=0.0),
                    max(forwards, default=0.0),
                    sum(e.nbytes for e in sent),
                )
            )
            begin = mark.start
    return found


def starts_early() -> Check:
    def wrong(trial: Trial) -> str | None:
        for step in steps_of(trial) if trial.world_size > 1 else []:
            if step.first_sent is None or step.first_sent >= step.last_ready:
                when = "never" if step.first_sent is None else f"{step.first_sent - step.last_ready:g} s after the last one is ready"
                return f"in step {step.step}, rank {step.rank} sends the first gradient {when}"
        return None

    return Check("overlap", "the first message starts before the last gradient is ready", wrong)


def exposed(trial: Trial) -> float:
    """The largest part of a step's communication that is not hidden behind compute."""
    facts = trial.case.facts
    if not facts["communication"]:
        return 0.0
    return max((step.seconds - facts["compute"] for step in steps_of(trial)), default=0.0) / facts["communication"]


def hidden() -> Check:
    def wrong(trial: Trial) -> str | None:
        part = exposed(trial)
        return None if part <= 0.6 else f"{part:.0%} of the messages' time is added to the step; with one message for each layer it is 25%"

    return Check("overlap", "most of the messages' time is hidden behind backward", wrong)


def waits_at_once(trials: Sequence[Trial]) -> bool:
    several = [trial for trial in trials if trial.world_size > 1]
    return bool(several) and all(right(t) and starts_early().wrong(t) is None and exposed(t) > 0.9 for t in several)


def after_backward(trials: Sequence[Trial]) -> bool:
    several = [trial for trial in trials if trial.world_size > 1]
    return bool(several) and all(right(t) and all((s.first_sent or 0) >= s.last_ready for s in steps_of(t)) for t in several)


def every_microbatch(trials: Sequence[Trial]) -> bool:
    """Gradients are sent before the last microbatch has begun."""
    several = [trial for trial in trials if trial.world_size > 1 and trial.case.facts["microbatches"] > 1 and trial.error is None]
    found = [step for trial in several for step in steps_of(trial)]
    return bool(found) and all(step.first_sent is not None and step.first_sent <= step.last_forward for step in found)


def piling_up(trials: Sequence[Trial]) -> bool:
    """The second step sends twice as much as the first."""
    several = [trial for trial in trials if trial.world_size > 1 and trial.error is None]
    found = [(step.step, step.sent, trial.case.facts["bytes"]) for trial in several for step in steps_of(trial)]
    return bool(found) and all(sent >= 0.9 * step * nbytes for step, sent, nbytes in found) and any(step > 1 for step, _, _ in found)


def not_averaged(trials: Sequence[Trial]) -> bool:
    """The gradients are as many times too large as there are microbatches."""
    several = [trial for trial in trials if trial.case.facts["microbatches"] > 1]
    return scaled(several, lambda trial: trial.case.facts["microbatches"])


def summed_twice(trials: Sequence[Trial]) -> bool:
    return scaled(trials, lambda trial: trial.world_size * trial.case.facts["microbatches"])


EVERY_MICROBATCH = Misconception(
    "synchronises every microbatch",
    "Gradients are all-reduced after each microbatch. They are complete only after the last one: everything before is sent in vain.",
    every_microbatch,
)
WAITS_AT_ONCE = Misconception(
    "async, then wait at once",
    "Each all-reduce starts as soon as its gradient is ready, and then its end is awaited at once. Backward stands still meanwhile, so no "
    "message is hidden.",
    waits_at_once,
)
AFTER_BACKWARD = Misconception(
    "starts after backward",
    "The first all-reduce starts when the last gradient is ready. Then nothing is left to compute behind which messages could be hidden.",
    after_backward,
)
HOOKS_PILE_UP = Misconception(
    "hooks pile up",
    "Hooks are registered in every step and stay: in the second step each gradient has two, and is all-reduced twice.",
    piling_up,
)
MICROBATCHES_SUMMED = Misconception(
    "microbatches summed",
    "backward() adds the microbatches' gradients. Each belongs to a mean over one microbatch, so their sum is too large by the number of "
    "microbatches.",
    not_averaged,
)
SUMMED_TWICE = Misconception(
    "sum for mean",
    "The gradients are summed over the microbatches and over the ranks. Each belongs to a mean over one microbatch, so the sum is too "
    "large by the number of microbatches on all ranks.",
    summed_twice,
)


# ---- the exercises ----


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
    Exercise(
        number="11",
        function="average_in_buckets",
        title="Buckets",
        points=10,
        cases=bucket_cases,
        program=average,
        allowed=P2P | COLLECTIVES,
        checks=(
            value("every gradient is the mean over the ranks"),
            bytes_sent(
                lambda case: [all_reduce_bytes(case.facts["bytes"], case.world_size)] * case.world_size,
                "2(n−1)/n of the gradients' bytes",
                lambda case: 256 + case.facts["buckets"] * 16 * case.world_size,
            ),
            few_calls(),
            under_the_cap(),
        ),
        least_received=lambda case: [case.facts["bytes"] - 64 if case.world_size > 1 else 0] * case.world_size,
        misconceptions=(*MESSAGES, NEVER_FLUSHED, BUCKETS_SUMMED, OWN_ORDER, ONE_BY_ONE, ABOVE_THE_CAP),
        hints=(
            "Which order do all ranks know without asking each other?",
            "Go through the sorted names. Keep a list of the names in the open bucket, and its bytes. If the next gradient doesn't fit, "
            "all-reduce the bucket and open a new one. What is still open at the end?",
            "flat = torch.cat([gradients[name].flatten() for name in names]); dist.all_reduce(flat); flat /= n; flat.split(sizes) "
            "gives the pieces, piece.view_as(gradients[name]) their shapes. Do it for each bucket, and once more after the loop.",
        ),
        questions=(
            Question(
                "calls",
                "Ten gradients of 48 bytes each, and a cap of 150 bytes: how many all-reduces?",
                lambda: bucket_case(Draw("question"), 2, [[2, 3]] * 10, 150, torch.float64, True, "ten gradients of 48 bytes, cap 150"),
                calls,
                "all-reduces",
            ),
        ),
        picture="lanes",
    ),
    Exercise(
        number="12",
        function="train_overlapped",
        title="Overlapped",
        points=10,
        cases=overlap_cases,
        program=train_in_microbatches,
        allowed=P2P | COLLECTIVES,
        imports=OPTIM,
        checks=(
            equals_one_process(),
            bytes_sent(gradient_bytes, "2(n−1)/n of the gradients' bytes per step", lambda case: naive_slack(case) + 512),
            starts_early(),
            hidden(),
        ),
        least_received=lambda case: [
            case.facts["steps"] * case.facts["bytes"] - 64 if case.world_size > 1 else 0 for _ in range(case.world_size)
        ],
        misconceptions=(
            HOOKS_PILE_UP, *MESSAGES, EVERY_MICROBATCH, NEVER_REDUCED, SUMMED_TWICE, SUM_FOR_MEAN, MICROBATCHES_SUMMED,
            MEAN_TWICE, NO_ZERO_GRAD, WAITS_AT_ONCE, AFTER_BACKWARD,
        ),
        hints=(
            "backward() makes the last layer's gradients first. Who tells you that one is ready, and in which microbatch is it complete?",
            "Register one hook for each parameter, once. In the last microbatch the hook starts dist.all_reduce(p.grad, async_op=True) and "
            "keeps the work that this returns. All works are waited for just before optimizer.step().",
            "def ready(p): if last: works.append(dist.all_reduce(p.grad, async_op=True)). For each step: zero_grad; for each microbatch "
            "set last, and (loss / (microbatches · n)).backward(); for work in works: work.wait(); works.clear(); optimizer.step().",
        ),
        questions=(
            Question(
                "seconds",
                "Each of four layers takes 1 s forward and 2 s backward, and its all-reduce on two ranks 1 s. How long does a step take?",
                lambda: overlap_case(Draw("question"), 2, 1, steps=1),
                lambda trial: trial.trace.makespan,
                "seconds",
            ),
        ),
        picture="lanes",
    ),
]  # fmt: skip
