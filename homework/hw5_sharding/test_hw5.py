"""Grade homework 5; run it with `pytest homework/hw5_sharding`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101 import Network
from parallel101.laboratory.exercises.training_exercises import (
    SGD,
    Optimizers,
    PeakBytes,
    TanhLinear,
    count_weights,
    gradients_of,
    make_model,
    mean_of,
    measured,
)
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.compared_values import close, difference
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
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
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    all_show,
    ask_sent,
    at_most,
    bytes_sent,
    communicated,
    ended,
    failed,
    on_ranks,
    received,
    right,
    wrong_trials,
)
from parallel101.laboratory.record.trace import Trace

LAYERS, WIDTH, STEPS = 5, 6, 2
ITEM = 8  # bytes of a float64
NARROW = 3  # features, fewer than the four ranks


def sizes_of(width: int) -> dict[str, int]:
    """Return the bytes of a model of this width, of a layer, and of a layer's weight."""
    count = count_weights([width] * (LAYERS + 1))
    return {
        "whole": count * ITEM,
        "layer": count * ITEM // LAYERS,
        "parameter": width * width * ITEM,
    }


WHOLE, LAYER, PARAMETER = sizes_of(WIDTH).values()  # those of the questions


def norm_of(named: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in named.values()))


def clipped(named: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    return {name: value * min(1.0, max_norm / norm_of(named)) for name, value in named.items()}


def train_whole(
    weights: Tensor, inputs: Tensor, targets: Tensor, max_norm: float
) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """Train one process with the whole batch, and return the model and its momentum."""
    model = make_model([inputs.shape[-1]] * (LAYERS + 1), weights)
    optimizer, named = SGD(model.parameters()), dict(model.named_parameters())
    for x, y in zip(inputs, targets):
        for name, gradient in clipped(
            gradients_of(model, F.mse_loss(model(x), y)), max_norm
        ).items():
            named[name].grad = gradient
        optimizer.step()
    return model, {name: optimizer.state[p]["momentum_buffer"] for name, p in named.items()}


def pieces_of(value: Tensor, n: int) -> list[Tensor]:
    return list(F.pad(value.detach().flatten(), (0, -value.numel() % n)).chunk(n))


# ---- what each rank runs ----


def train_sharded(
    function, weights: Tensor, inputs: Tensor, targets: Tensor, max_norm: float
) -> dict[str, Any]:
    """Train this rank's replica. inputs: (steps, samples of this rank, features)."""
    model = make_model([inputs.shape[-1]] * (LAYERS + 1), weights)
    optimizers, whole = Optimizers(), PeakBytes()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: whole.watch(p.grad))
    function(model, F.mse_loss, optimizers.make, list(zip(inputs, targets)), max_norm)
    # float32: torch adds 1e-6 to a norm before it divides
    found = {name: p.detach().float() for name, p in model.named_parameters()}
    return {"weights": found, "peak": whole.peak, **optimizers.result()}


def train_in_pieces(
    function, weights: Tensor, rank: int, n: int, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train with ZeRO-3: the layers have no weights, and this rank has its pieces."""
    optimizers, whole, width = Optimizers(), PeakBytes(), inputs.shape[-1]
    shards = [
        {name: pieces_of(p, n)[rank].clone() for name, p in layer.named_parameters()}
        for layer in make_model([width] * (LAYERS + 1), weights)
    ]
    layers = [TanhLinear(number, width, width, device="meta") for number in range(LAYERS)]
    for layer in layers:
        layer.uses = whole.watch
    found = function(layers, shards, F.mse_loss, optimizers.make, list(zip(inputs, targets)))
    return {"weights": found, "peak": whole.peak, **optimizers.result()}


# ---- cases ----


def sharded_case(
    draw: Draw, n: int, clip: bool, in_pieces: bool = False, width: int = WIDTH
) -> Case:
    sizes = sizes_of(width)
    weights = 0.7 * draw.tensor(sizes["whole"] // ITEM, dtype=torch.float64)
    inputs, targets = (draw.tensors(n, STEPS, 2, width, dtype=torch.float64) for _ in range(2))
    model = make_model([width] * (LAYERS + 1), weights)
    local = [gradients_of(model, F.mse_loss(model(x[0]), y[0])) for x, y in zip(inputs, targets)]
    norm = norm_of(mean_of(local))
    max_norm = 0.4 * norm if clip else math.inf
    trained, momentum = train_whole(weights, torch.cat(inputs, 1), torch.cat(targets, 1), max_norm)
    others = {"peak": ANYTHING, "state": ANYTHING, "squares": ANYTHING, "gradient bytes": ANYTHING}
    if in_pieces:
        arguments = [(weights, rank, n, inputs[rank], targets[rank]) for rank in range(n)]
        after = [
            [
                {name: pieces_of(p, n)[rank] for name, p in layer.named_parameters()}
                for layer in trained
            ]
            for rank in range(n)
        ]
    else:
        arguments = [(weights, inputs[rank], targets[rank], max_norm) for rank in range(n)]
        after = [{name: p.detach().float() for name, p in trained.named_parameters()}] * n
    return Case(
        arguments,
        [{"weights": mine, **others} for mine in after],
        note=f"{width} features" + (", gradients clipped" if clip else ""),
        facts={
            **sizes,
            "width": width,
            "state": torch.cat([values.flatten() for values in momentum.values()]),
            "norm": min(norm, max_norm),
            "norm before": norm,
            "max_norm": max_norm,
            "clipped locally": norm_of(mean_of([clipped(own, max_norm) for own in local])),
        },
        network=Network(latency=0.0, bandwidth=sizes["layer"]),  # a layer's weights take a second
        seconds=20.0,
    )


def sharded_cases(draw: Draw) -> list[Case]:
    few = sharded_case(draw, 4, True, width=NARROW)  # a bias has fewer numbers than there are ranks
    return [*(sharded_case(draw, n, clip) for n, clip in ((1, True), (2, False), (3, True))), few]


def zero3_cases(draw: Draw) -> list[Case]:
    return [
        sharded_case(draw, n, False, in_pieces=True, width=width)
        for n, width in ((1, WIDTH), (2, WIDTH), (3, WIDTH), (4, NARROW))
    ]


# ---- checks ----


def shared_bytes(times: int):
    """Return a function of the case: times · (n−1)/n of the weights' bytes per step, by rank."""
    return lambda case: (
        [STEPS * round(times * (case.world_size - 1) / case.world_size * case.facts["whole"])]
        * case.world_size
    )


def slack(case: Case) -> int:
    """Return the bytes allowed for norms and for padding in up to three collectives."""
    return 64 + STEPS * (64 + 3 * 2 * LAYERS * ITEM * (case.world_size - 1))


def least(case: Case) -> list[int]:
    """Return the bytes each rank needs: the others' gradients of its pieces, and their pieces."""
    n = case.world_size
    return [STEPS * (n - 1) * case.facts["whole"] // n - 64 if n > 1 else 0] * n


def weights_equal() -> Check:
    def wrong(trial: Trial) -> str | None:
        for rank, expected in enumerate(trial.case.expected):
            if (
                what := difference(measured(trial, "weights")[rank], expected["weights"])
            ) is not None:
                return f"rank {rank}'s weights after {STEPS} steps: {what}"
        return None

    return Check("value", "the weights equal those of one process with the whole batch", wrong)


def state_bytes(trial: Trial) -> list[int]:
    return [state.nbytes if isinstance(state, Tensor) else 0 for state in measured(trial, "state")]


def a_parameter(case: Case) -> int:
    """Return the bytes that a rank may hold beyond 1/n, since pieces are padded."""
    return case.facts["parameter"] if case.world_size > 1 else 0


def nth_part(case: Case) -> float:
    return case.facts["whole"] / case.world_size


def optimizer_is_sharded() -> Check:
    """Check that each rank holds 1/n of the momentum, and at most one parameter more.

    Together the ranks hold the momentum of the whole model, in any order.
    """
    held = at_most(
        "memory",
        "each rank's optimizer holds 1/n of the state",
        state_bytes,
        nth_part,
        "rank {rank}'s optimizer holds {found} bytes; 1/n is {most:g}",
        a_parameter,
    )

    def incomplete(trial: Trial) -> str | None:
        states = [state for state in measured(trial, "state") if isinstance(state, Tensor)]
        found = torch.cat([torch.zeros(0), *(state.flatten() for state in states)]).double()
        if close(found[found != 0].sort().values, trial.case.facts["state"].sort().values, 1e-5):
            return None
        return (
            "the ranks' optimizers together don't hold the momentum of the whole model, each "
            "number once"
        )

    return replace(held, wrong=lambda trial: held.wrong(trial) or incomplete(trial))


def sends_twice() -> Check:
    return bytes_sent(shared_bytes(2), "2(n−1)/n of the weights' bytes per step", slack)


def gradients_are_freed() -> Check:
    says = "whole gradients of at most two layers, then 1/n of them"
    peak = at_most(
        "memory",
        says,
        lambda trial: measured(trial, "peak"),
        lambda case: 2 * case.facts["layer"],
        "rank {rank} had {found} bytes of whole gradients at once; those of two layers are {most}",
    )
    kept = at_most(
        "memory",
        says,
        lambda trial: measured(trial, "gradient bytes"),
        nth_part,
        "at optimizer.step(), rank {rank} had {found} bytes of gradients; 1/n is {most:g}",
        a_parameter,
    )
    # an all-reduce brings whole gradients to every rank, whatever is freed then
    parts = (peak, kept, sends_twice())
    return replace(
        peak, wrong=lambda trial: next(filter(None, (part.wrong(trial) for part in parts)), None)
    )


def sends_three_times() -> Check:
    return bytes_sent(shared_bytes(3), "3(n−1)/n of the weights' bytes per step", slack)


def two_layers() -> Check:
    """Check the gathered weights. An all-reduce also brings whole gradients to every rank."""
    peak = at_most(
        "memory",
        "whole weights of at most two layers at once, and no whole gradients sent",
        lambda trial: measured(trial, "peak"),
        lambda case: 2 * case.facts["layer"] if case.world_size > 1 else math.inf,
        "rank {rank} had {found} bytes of whole weights at once; those of two layers are {most}",
        lambda case: 4 * ITEM * case.world_size,
    )
    sent = sends_three_times()
    return replace(peak, wrong=lambda trial: peak.wrong(trial) or sent.wrong(trial))


# ---- misconceptions ----


def first_norms(trial: Trial) -> list[float] | None:
    """Return the norm of the gradients that each rank's optimizers saw in their first step."""
    squares = measured(trial, "squares")
    if not all(isinstance(own, list) and own and isinstance(own[0], float) for own in squares):
        return None
    return [math.sqrt(own[0]) for own in squares]


@mistake(
    "clip by the local norm",
    "Each rank clips by the norm of what it holds itself. The norm of the whole gradient is "
    "another one, and it is the same on all ranks.",
)
def local_norm(trials: Sequence[Trial]) -> bool:
    """Check whether results are wrong only where gradients are clipped, by a local norm.

    Each rank's piece has the norm to which the whole should be clipped, or each rank clipped its
    own gradient before the mean was taken.
    """
    wrong = wrong_trials(trials)
    if not wrong or any(
        math.isinf(trial.case.facts["max_norm"]) or trial.world_size == 1 for trial in wrong
    ):
        return False

    def shows(trial: Trial) -> bool:
        norms, most = first_norms(trial), trial.case.facts["max_norm"]
        if norms is None:
            return False
        total = math.hypot(*norms)
        by_piece = total > 1.01 * most and all(norm <= 1.0001 * most for norm in norms)
        return by_piece or math.isclose(total, trial.case.facts["clipped locally"], rel_tol=1e-4)

    return all(map(shows, wrong))


@mistake(
    "gradients never clipped",
    "The optimizer gets the gradients as they are, also where the norm of the whole gradient "
    "is larger than max_norm.",
)
@every(failed)
def never_clipped(trial: Trial) -> bool:
    """Check whether results are wrong only because the optimizers got unclipped gradients."""
    facts, norm = trial.case.facts, math.hypot(*(first_norms(trial) or []))
    clips = trial.error is None and not math.isinf(facts["max_norm"])
    return clips and math.isclose(norm, facts["norm before"], rel_tol=1e-4)


@every(lambda trials: [t for t in ended(trials, 2) if math.isinf(t.case.facts["max_norm"])])
def summed(trial: Trial) -> bool:
    """Check whether unclipped gradients are n times too large in the first step."""
    norm = math.hypot(*(first_norms(trial) or []))
    times = trial.world_size * trial.case.facts["norm"]
    return math.isclose(norm, times, rel_tol=1e-4) and not right(trial)


@every(lambda trials: ended(trials, 2))
def whole_optimizer(trial: Trial) -> bool:
    """Check whether each rank has the whole state, and all values are right.

    With wrong values, this is not the first thing to fix.
    """
    return right(trial) and min(state_bytes(trial)) >= trial.case.facts["whole"]


def times_sent(trial: Trial) -> float:
    """Return the bytes sent per step, as a multiple of (n−1)/n of the weights' bytes."""
    n = trial.world_size
    return min(communicated(trial)) / (STEPS * (n - 1) / n * trial.case.facts["whole"])


def all_reduced(times: int):
    """Return a check whether every rank sends the weights' bytes once more than needed.

    It looks only at cases in which padding is a small part.
    """

    def seen(trials: Sequence[Trial]) -> bool:
        found = ended(trials, 2)
        wide = [trial for trial in found if trial.case.facts["width"] == WIDTH]
        return (
            bool(wide)
            and all(map(right, found))
            and all(times + 0.9 < times_sent(trial) < times + 1.4 for trial in wide)
        )

    return seen


def peak_of(trials: Sequence[Trial], part: float) -> bool:
    return all_show(
        ended(trials, 2),
        lambda t: right(t) and min(measured(t, "peak")) >= part * t.case.facts["whole"],
    )


@mistake(
    "all layers gathered at once",
    "Every rank gathers the weights of all layers before the first layer computes. Each layer "
    "needs only its own, at the moment when it computes.",
)
@every(lambda trials: on_ranks(ended(trials, 2)))
def gathered_first(trial: Trial, rank: int) -> bool:
    """Check whether each rank receives all weights before its first forward.

    All values are right.
    """
    n, own = trial.world_size, [e for e in trial.trace.events if e.rank == rank]
    first = min(e.start for e in own if e.name == "forward")
    before = [e for e in own if e.kind != "span" and e.start < first]
    got = received(Trial(trial.case, [], Trace(before, n, trial.trace.backend)))[rank]
    return right(trial) and got > 0.95 * (n - 1) / n * trial.case.facts["whole"]


WHOLE_OPTIMIZER = Misconception(
    "whole optimizer on each rank",
    "Every rank's optimizer gets all parameters, so each rank holds the state of the whole "
    "model: n copies of it instead of one.",
    whole_optimizer,
)
SUM_FOR_MEAN = Misconception(
    "sum for mean",
    "A reduce-scatter adds the ranks' gradients. Each belongs to a mean over one share, so the sum "
    "is n times the gradient of the mean loss.",
    summed,
)
ALL_REDUCED = Misconception(
    "gradients all-reduced",
    "Every rank gets the whole sum of the gradients, although it needs only its piece of it. "
    "That is half an all-reduce too much.",
    all_reduced(2),
)
ALL_GRADIENTS = Misconception(
    "all gradients held at once",
    "Whole gradients stay in memory until backward has ended, so at that moment a rank holds "
    "all of them: that is ZeRO-1.",
    lambda trials: peak_of(trials, 0.9),
)
DISGUISED = Misconception(
    "disguised data parallel",
    "Every rank gathers all weights and then trains the whole model, with an optimizer for all of "
    "it. Its memory is that of data parallel training.",
    whole_optimizer,
)
NEVER_FREED = Misconception(
    "gathered weights never freed",
    "The whole weights of many layers are in memory at once. Something still holds those that have "
    "been used: a list, an attribute, or autograd's graph, which keeps what backward needs.",
    lambda trials: peak_of(trials, 0.6),
)
ALL_REDUCED_3 = Misconception(ALL_REDUCED.name, ALL_REDUCED.says, all_reduced(3))


# ---- the exercises ----


def sharded(
    function: str, number: str, title: str, hints: tuple[str, ...], **more: Any
) -> Exercise:
    checks = (
        weights_equal(),
        sends_twice(),
        optimizer_is_sharded(),
    )
    misconceptions = (
        *MESSAGES,
        WHOLE_OPTIMIZER,
        never_clipped,
        local_norm,
        SUM_FOR_MEAN,
        ALL_REDUCED,
    )
    return Exercise(
        number=number,
        function=function,
        title=title,
        points=5,
        cases=sharded_cases,
        program=train_sharded,
        allowed=P2P | COLLECTIVES,
        checks=(*checks, *more.pop("checks", ())),
        least_received=least,
        misconceptions=(*misconceptions, *more.pop("misconceptions", ())),
        hints=hints,
        picture="lanes",
        **more,
    )


EXERCISES = [
    sharded(
        "train_zero1",
        "13a",
        "ZeRO-1",
        (
            "A rank's optimizer updates only its piece of each parameter. Which part of the summed "
            "gradients does it need for that?",
            "Give make_optimizer an nn.Parameter for each piece. After backward: reduce-scatter "
            "each padded gradient into the piece's grad, divided by n; clip; step; all-gather the "
            "pieces into the parameters.",
            "F.pad fills a flat gradient up to a multiple of n. dist.reduce_scatter_single and "
            "dist.all_gather_single take whole flat tensors. The norm is that of the whole model, "
            "and each rank has the squares of its own pieces. What do you add up over the ranks "
            "before you take the root?",
        ),
        weights={"value": 0.2, "bytes": 0.3, "memory": 0.5},
        questions=(
            Question(
                "state",
                f"The weights have {WHOLE} bytes, and SGD with momentum keeps one number for each "
                "weight. How many bytes of state does each of three ranks hold?",
                lambda: sharded_case(Draw("question"), 3, True),  # three divides all sizes
                lambda trial: max(state_bytes(trial)),
                "bytes",
            ),
        ),
    ),
    sharded(
        "train_zero2",
        "13b",
        "ZeRO-2",
        (
            "When can a whole gradient be freed? Not at the end of backward, but much earlier.",
            "Register one hook for each parameter. It reduce-scatters p.grad into its piece's "
            "grad, and sets p.grad to None.",
            "All the rest is train_zero1, without its loop of reduce-scatters. Register the hooks "
            "before the first step: what would happen if each step registered them again?",
        ),
        checks=(replace(gradients_are_freed(), weight=4.0),),
        weights={"value": 0.15, "bytes": 0.15, "memory": 0.7},
        misconceptions=(ALL_GRADIENTS,),
        questions=(
            Question(
                "peak",
                f"The gradients have {WHOLE} bytes, in {LAYERS} layers of a weight ({PARAMETER} "
                f"bytes) and a bias ({LAYER - PARAMETER}). If each is freed at once, what is the "
                "largest number of bytes in all p.grad at any time?",
                lambda: sharded_case(Draw("question"), 4, True),
                lambda trial: max(measured(trial, "peak")),
                "bytes",
            ),
        ),
    ),
    Exercise(
        number="14",
        function="train_zero3",
        title="ZeRO-3",
        points=10,
        cases=zero3_cases,
        program=train_in_pieces,
        allowed=P2P | COLLECTIVES,
        checks=(
            weights_equal(),
            sends_three_times(),
            replace(two_layers(), weight=4.0),
            optimizer_is_sharded(),
        ),
        weights={"value": 0.15, "bytes": 0.2, "memory": 0.65},
        least_received=least,
        misconceptions=(
            *MESSAGES,
            SUM_FOR_MEAN,
            DISGUISED,
            gathered_first,
            NEVER_FREED,
            ALL_REDUCED_3,
        ),
        hints=(
            "What is the backward of an all-gather? Lesson 03 shows it. And what does autograd "
            "keep of y = x Wᵀ + b? The warm-up in the notebook counts it.",
            "An autograd.Function that all-gathers a piece forward, and reduce-scatters the "
            "gradient backward. Run each layer under torch.utils.checkpoint, with the gathers "
            "inside: then only x is kept, and backward gathers again.",
            "torch.func.functional_call runs a layer with other weights than its own: the "
            "gathered ones, by name. What would torch.utils.checkpoint keep if you "
            "gathered them outside of the function that it runs?",
        ),
        questions=(
            ask_sent(
                f"The weights have {WHOLE} bytes. How many bytes does each of two ranks send "
                f"in {STEPS} steps?",
                lambda: sharded_case(Draw("question"), 2, False, in_pieces=True),
            ),
        ),
        picture="lanes",
    ),
]
