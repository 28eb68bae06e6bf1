"""Grade exercise 14b of homework 5: a block whose activations are recomputed in backward."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from parallel101.laboratory.exercises.training_exercises import LEARNING_RATE, PeakBytes, measured
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.compared_values import close
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    ask_sent,
    at_most,
    bytes_sent,
    ended,
    on_ranks,
)
from parallel101.spans import compute, span

BLOCKS, WIDTH, HIDDEN, SAMPLES, STEPS, MICROBATCHES = 4, 6, 12, 3, 2, 2
ITEM = 8  # bytes of a float64
X = SAMPLES * WIDTH * ITEM
INSIDE = 2 * SAMPLES * HIDDEN * ITEM  # what backward needs from inside a block, on each rank
COUNT = 2 * WIDTH * HIDDEN


class Sum(torch.autograd.Function):
    """All-reduce forward or backward: a tensor-parallel layer needs both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.reduces = not forward
        return all_reduced(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduced(gradients[0]) if ctx.reduces else gradients[0], None


def all_reduced(x: Tensor) -> Tensor:
    total = x.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


class Block(nn.Module):
    """Half of a transformer's block, tensor parallel: x + W₂ dropout(tanh(W₁ x)).

    `watch` is called with the activations inside.
    """

    def __init__(self, first: Tensor, second: Tensor, p: float, watch: Callable[..., None]):
        super().__init__()
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())
        self.p, self.watch = p, watch

    def forward(self, x: Tensor) -> Tensor:
        with span("forward"):
            compute(1.0)
            hidden = torch.tanh(Sum.apply(x, False) @ self.first)
            dropped = F.dropout(hidden, self.p)
            self.watch(hidden, dropped)
            return x + Sum.apply(dropped @ self.second, True)


class Whole(nn.Module):
    """A whole block in one process: the blocks of all ranks, each with the same dropped columns."""

    def __init__(self, weights: Sequence[tuple[Tensor, Tensor]], p: float):
        super().__init__()
        self.first = nn.ParameterList(first.clone() for first, _ in weights)
        self.second = nn.ParameterList(second.clone() for _, second in weights)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(*x.shape[:-1], HIDDEN, dtype=x.dtype), self.p)
        parts = [
            (torch.tanh(x @ first) * kept) @ second
            for first, second in zip(self.first, self.second)
        ]
        return x + sum(parts[1:], parts[0])


def train(
    recompute: Callable[[nn.Module, Tensor], Tensor],
    blocks: Sequence[nn.Module],
    inputs: Tensor,
    targets: Tensor,
) -> dict[str, Any]:
    """Train with both microbatches going forward before one goes backward, as in a pipeline.

    inputs: (steps, microbatches, samples, features).
    """
    parameters = [p for block in blocks for p in block.parameters()]
    found: list[dict[str, Any]] = []
    for xs, ys in zip(inputs, targets):
        losses = []
        for x, y in zip(xs, ys):
            out = x.clone().requires_grad_()
            for block in blocks:
                out = recompute(block, out)
            losses.append(F.mse_loss(out, y))
        for loss in reversed(losses):
            if loss.requires_grad:  # else the gradients are zeros, and the verdict says so
                loss.backward()
        found.append(
            {
                "losses": [float(loss.detach()) for loss in losses],
                "gradients": [
                    torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters
                ],
            }
        )
        with torch.no_grad():
            for p in parameters:
                p -= LEARNING_RATE * (torch.zeros_like(p) if p.grad is None else p.grad)
                p.grad = None
    return {"steps": found, "random": torch.rand(4)}


def train_blocks(
    function, weights: Sequence[tuple[Tensor, Tensor]], p: float, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train this rank's blocks."""
    inside = PeakBytes()
    blocks = [Block(first, second, p, inside.watch) for first, second in weights]
    refuse_checkpoint()
    return {**train(function, blocks, inputs, targets), "peak": inside.peak}


def refuse_checkpoint() -> None:
    """Make torch.utils.checkpoint raise: writing it is the exercise."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch.utils.checkpoint is what you are about to write: don't use it")

    for name in ("checkpoint", "checkpoint_sequential", "CheckpointFunction"):
        setattr(torch.utils.checkpoint, name, refuse)


# ---- cases ----


def recompute_case(draw: Draw, n: int, p: float, seed: int = 1) -> Case:
    scale = 1 / math.sqrt(WIDTH * n)
    weights = [
        [
            (
                scale * draw.tensor(WIDTH, HIDDEN, dtype=torch.float64),
                scale * draw.tensor(HIDDEN, WIDTH, dtype=torch.float64),
            )
            for _ in range(n)
        ]
        for _ in range(BLOCKS)
    ]
    shape = STEPS, MICROBATCHES, SAMPLES, WIDTH
    inputs, targets = (
        draw.tensor(*shape, dtype=torch.float64),
        draw.tensor(*shape, dtype=torch.float64),
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    whole = train(lambda block, x: block(x), [Whole(of, p) for of in weights], inputs, targets)
    torch.set_rng_state(state)

    def of_rank(rank: int, step: dict[str, Any]) -> dict[str, Any]:
        # a block's parameters: the first of all ranks, and then the second of all ranks
        mine = [
            step["gradients"][2 * n * block + half * n + rank]
            for block in range(BLOCKS)
            for half in range(2)
        ]
        return {**step, "gradients": mine}

    return Case(
        [([of[rank] for of in weights], p, inputs, targets) for rank in range(n)],
        [
            {
                "steps": [of_rank(rank, step) for step in whole["steps"]],
                "random": whole["random"],
                "peak": ANYTHING,
            }
            for rank in range(n)
        ],
        note=f"dropout {p:g}" if p else "no dropout",
        facts={"p": p},
        seconds=20.0,
        seed=seed,
    )


def cases(draw: Draw) -> list[Case]:
    return [
        recompute_case(draw, n, p, seed=draw.integer(1, 10**6))
        for n, p in ((1, 0.0), (1, 0.4), (2, 0.0), (2, 0.4), (3, 0.3))
    ]


# ---- checks ----


def equal_gradients(trial: Trial, rank: int, step: int) -> bool:
    steps, expected = measured(trial, "steps")[rank], trial.case.expected[rank]["steps"]
    return (
        isinstance(steps, list)
        and len(steps) == STEPS
        and all(map(close, steps[step]["gradients"], expected[step]["gradients"]))
    )


def equal_losses(trial: Trial, rank: int, step: int) -> bool:
    steps, expected = measured(trial, "steps")[rank], trial.case.expected[rank]["steps"]
    return (
        isinstance(steps, list)
        and len(steps) == STEPS
        and all(map(math.isclose, steps[step]["losses"], expected[step]["losses"]))
    )


def values_equal() -> Check:
    def wrong(trial: Trial) -> str | None:
        for step in range(STEPS):
            for rank in range(trial.world_size):
                if not equal_losses(trial, rank, step):
                    return f"rank {rank}'s losses in step {step} differ from those of block(x)"
                if not equal_gradients(trial, rank, step):
                    what = "are all zero" if zero(trial, rank, range(BLOCKS), step) else "differ"
                    return (
                        f"rank {rank}'s gradients in step {step} {what}; expected those of block(x)"
                    )
        for rank, drawn in enumerate(measured(trial, "random")):
            if not torch.equal(drawn, trial.case.expected[rank]["random"]):
                return f"after training, rank {rank} draws other random numbers than with block(x)"
        return None

    return Check("value", "losses, gradients and random numbers are those of block(x)", wrong)


def one_block() -> Check:
    return at_most(
        "memory",
        "activations from inside one block at a time",
        lambda trial: measured(trial, "peak"),
        lambda case: INSIDE,
        "rank {rank} held {found} bytes from inside the blocks at once; one block has {most}",
    )


def twice_forward(case: Case) -> list[int]:
    """Return the bytes of three all-reduces: of x, of x again in backward, and of its gradient."""
    n = case.world_size
    return [STEPS * MICROBATCHES * BLOCKS * 3 * round(2 * (n - 1) / n * X)] * n


def slack(case: Case) -> int:
    """Return the bytes that a rank may send in addition."""
    return STEPS * MICROBATCHES * BLOCKS * 4 * ITEM


def least(case: Case) -> list[int]:
    """Return the bytes that each rank needs: the second forward's sum isn't needed."""
    n = case.world_size
    return [STEPS * MICROBATCHES * BLOCKS * 2 * round(2 * (n - 1) / n * X) - 64 if n > 1 else 0] * n


# ---- misconceptions ----


def judged(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that ended, or none if none of them has several ranks."""
    return ended(trials) if ended(trials, 2) else []


def forwards(trial: Trial) -> float:
    """Return how often each block computed forward for each microbatch, on average."""
    once = trial.world_size * STEPS * MICROBATCHES * BLOCKS
    return len(trial.trace.spans("forward")) / once


def all_of(equal: Callable[[Trial, int, int], bool], trial: Trial, step: int) -> bool:
    return all(equal(trial, rank, step) for rank in range(trial.world_size))


@mistake(
    "nothing is recomputed",
    "The activations from inside all blocks stay in memory until backward, because autograd "
    "keeps the graph of the first forward.",
)
@every(judged)
def computes_once(trial: Trial) -> bool:
    return forwards(trial) < 1.1 and min(measured(trial, "peak")) >= BLOCKS * INSIDE


@mistake(
    "random state not restored",
    "The second forward drops different numbers from the first. So its activations and the "
    "gradients belong to a different output.",
)
def other_numbers_dropped(trials: Sequence[Trial]) -> bool:
    """Check whether, only with dropout, the first losses are right but their gradients wrong."""
    found = judged(trials)
    drops = [trial for trial in found if trial.case.facts["p"]]
    others = [trial for trial in found if not trial.case.facts["p"]]
    return (
        bool(drops)
        and bool(others)
        and all(all_of(equal_gradients, t, step) for t in others for step in range(STEPS))
        and all(all_of(equal_losses, t, 0) for t in drops)
        and not any(all_of(equal_gradients, t, 0) for t in drops)
    )


@mistake(
    "random state not put back",
    "After backward, torch draws numbers that it has drawn before, because the second "
    "forward's random state is still set. So the next step drops the wrong numbers.",
)
def state_not_put_back(trials: Sequence[Trial]) -> bool:
    """Check whether, with dropout, the first step is right but later random numbers are not."""
    found = judged(trials)
    drops = [trial for trial in found if trial.case.facts["p"]]
    return (
        bool(drops)
        and all(all_of(equal_gradients, t, 0) for t in drops)
        and not any(all_of(equal_losses, t, 1) for t in drops)
        and all(
            all_of(equal_gradients, t, step)
            for t in found
            if not t.case.facts["p"]
            for step in range(STEPS)
        )
    )


@mistake(
    "recomputed with other weights",
    "In step 1, the second forward still computes with the weights of step 0, because it uses "
    "a copy of the block that was made too early.",
)
@every(lambda trials: [trial for trial in judged(trials) if not trial.case.facts["p"]])
def other_weights(trial: Trial) -> bool:
    """Check whether, without dropout, the second step's gradients are the first to be wrong."""
    first = all_of(equal_gradients, trial, 0) and all_of(equal_losses, trial, 1)
    return first and not all_of(equal_gradients, trial, 1)


def zero(trial: Trial, rank: int, blocks: Sequence[int], step: int = 0) -> bool:
    steps = measured(trial, "steps")[rank]
    if not isinstance(steps, list):
        return False
    found = steps[step]["gradients"]
    return not any(found[2 * block + half].any() for block in blocks for half in range(2))


@mistake(
    "gradient of the weights lost",
    "No weight of any block gets a gradient. Either the second forward built no graph, or you "
    "only asked that graph for the gradient of x.",
)
@every(lambda trials: on_ranks(judged(trials)))
def weights_without_gradient(trial: Trial, rank: int) -> bool:
    twice = forwards(trial) > 1.9
    return twice and equal_losses(trial, rank, 0) and zero(trial, rank, range(BLOCKS))


@mistake(
    "gradient stops at x",
    "Only the last block's weights get gradients. The gradient of x must also reach the block "
    "before.",
)
@every(lambda trials: on_ranks(judged(trials)))
def stops_at_x(trial: Trial, rank: int) -> bool:
    last_only = zero(trial, rank, range(BLOCKS - 1)) and not zero(trial, rank, [BLOCKS - 1])
    return last_only and equal_losses(trial, rank, 0)


EXERCISES = [
    Exercise(
        number="14b",
        function="recompute",
        title="Recompute a block in backward",
        points=5,
        cases=cases,
        program=train_blocks,
        allowed=P2P | COLLECTIVES,
        checks=(
            values_equal(),
            one_block(),
            bytes_sent(twice_forward, "the messages of a forward twice, of a backward once", slack),
        ),
        weights={"value": 0.3, "bytes": 0.1, "memory": 0.6},
        least_received=least,
        misconceptions=(
            *MESSAGES,
            computes_once,
            weights_without_gradient,
            stops_at_x,
            other_numbers_dropped,
            state_not_put_back,
            other_weights,
        ),
        hints=(
            "What does backward need from this block, and what can be computed from x? What did "
            "the first forward depend on, besides x and the weights?",
            "Write an autograd.Function whose forward computes block(x) without a graph, and keeps "
            "x and torch.get_rng_state(). Its backward computes block(x) again, with a graph, from "
            "a detached x that requires a gradient. Pass the weights to the Function, too. "
            "Otherwise autograd doesn't know that the result depends on them.",
            "In backward, compute y = block(x) under torch.enable_grad(). "
            "torch.autograd.backward(y, gradient) then adds to the weights' .grad by itself. "
            "Before the second forward, set the random state that you kept. Afterwards, restore "
            "the one that you found.",
        ),
        questions=(
            Question(
                "peak",
                f"Backward needs {INSIDE} bytes from inside each of the {BLOCKS} blocks, and two "
                "microbatches go forward before one goes backward. If every block is recomputed, "
                "how many of these bytes does a rank hold at most?",
                lambda: recompute_case(Draw("question"), 2, 0.4),
                lambda trial: max(measured(trial, "peak")),
                "bytes",
            ),
            ask_sent(
                f"x has {X} bytes, and a block all-reduces that much once forward and once "
                f"backward. In {STEPS} steps of {MICROBATCHES} microbatches, how many bytes does "
                "each of two ranks send?",
                lambda: recompute_case(Draw("question"), 2, 0.4),
            ),
        ),
        picture="lanes",
    )
]
