"""The steps of training in which a learner's function runs, and how they are judged.

    layer 0   ▇ forward, 1 s                      ▇▇ backward, 2 s: its gradients are ready
    layer 1     ▇                              ▇▇                    at the end
    layer 2       ▇                         ▇▇

Models whose layers take virtual time are built inside the ranks' processes, and in the grader's,
which trains on the whole batch with the same weights:

    found:     {"start": weights by name, "gradients": [step 1: by name, step 2, …],
                "weights": by name}, from `recorded`
    expected:  the same, from one process

Every step of every rank is compared. What a wrong program does shows best in the gradients of its
first step: facts["local"] has, by rank, those that the rank computes alone.
"""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.laboratory.grade.compared_values import difference, factor, same
from parallel101.laboratory.grade.exercise import Case, Check, Misconception, Trial, mistake
from parallel101.laboratory.grade.exercise_checks import all_show, on_ranks, wrong_trials
from parallel101.spans import compute, recorder, span

Named = dict[str, Tensor]
ITEM = 8  # bytes of a float64
FORWARD, BACKWARD = 1.0, 2.0  # seconds that a layer takes on the virtual clock
LEARNING_RATE, MOMENTUM = 0.1, 0.9  # of the optimizers that the learner's code makes


class TanhLinear(nn.Linear):
    """A linear layer and a tanh.

    In the record, its forward is a span "forward", and its backward a span "backward".
    """

    def __init__(self, number: int, features: int, outputs: int, device: str | None = None):
        super().__init__(features, outputs, dtype=torch.float64, device=device)
        self.number = number
        # told of the weights with which forward computes
        self.uses: Callable[..., None] = lambda *weights: None

    def forward(self, x: Tensor) -> Tensor:
        self.uses(self.weight, self.bias)
        with span("forward", layer=self.number):
            compute(FORWARD)
            y = torch.tanh(super().forward(x))
        return backward_takes(BACKWARD, y, layer=self.number)


class _BackwardTakesTime(torch.autograd.Function):
    """The identity. Its backward comes first in the backward of what it is applied to."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, seconds: float, labels: dict[str, int]) -> Tensor:
        ctx.seconds, ctx.labels = seconds, labels
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with span("backward", **ctx.labels):
            compute(ctx.seconds)
        return gradients[0], None, None


def backward_takes(seconds: float, y: Tensor, **labels: int) -> Tensor:
    """Return y. Its backward takes time on the virtual clock, and is a span with these labels."""
    return _BackwardTakesTime.apply(y, seconds, labels)


def make_model(sizes: Sequence[int], weights: Tensor, tied: bool = False) -> nn.Sequential:
    """Return a model with these weights: layers from sizes[0] to sizes[1] features, and so on.

    The weights are all parameters one after the other. With `tied`, the last layer has the weight
    of the first one: the same Parameter, under two names.
    """
    model = nn.Sequential(
        *(TanhLinear(number, a, b) for number, (a, b) in enumerate(zip(sizes, sizes[1:])))
    )
    if tied:
        model[-1].weight = model[0].weight
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return model


def count_weights(sizes: Sequence[int], tied: bool = False) -> int:
    """Return the number of weights that `make_model` needs."""
    return sum(a * b + b for a, b in zip(sizes, sizes[1:])) - (sizes[0] * sizes[1] if tied else 0)


def mark(name: str, **labels: Any) -> None:
    """Record a moment: a span that takes no time."""
    with span(name, **labels):
        pass


class SGD(torch.optim.Optimizer):
    """SGD with momentum, as torch's own computes it. The record has a span for each step.

    With AdamW, gradients that are n times too large would go unnoticed.

    Attributes:
        steps: by step, each parameter's value before it and its gradient, or None.
    """

    # without what makes torch import its compiler, in seconds, with the first optimizer
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(
        self, parameters: Iterable[Any], lr: float = LEARNING_RATE, momentum: float = MOMENTUM
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.steps: list[list[tuple[Tensor, Tensor | None]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        mark("optimizer step", step=len(self.steps) + 1)
        self.steps.append([])
        for group in self.param_groups:
            for p in group["params"]:
                gradient = None if p.grad is None else p.grad.clone()
                self.steps[-1].append((p.clone(), gradient))
                if gradient is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(group["momentum"]).add_(gradient)
                    p.add_(momentum, alpha=-group["lr"])
        return loss


def recorded(model: nn.Module, optimizer: SGD) -> dict[str, Any]:
    """Return the first weights, each step's gradients and the last weights, for the grader."""
    named = dict(model.named_parameters())
    return {
        "start": dict(zip(named, (value for value, _ in sum(optimizer.steps[:1], [])))),
        "gradients": [dict(zip(named, (g for _, g in step))) for step in optimizer.steps],
        "weights": {name: p.detach() for name, p in named.items()},
    }


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `loss`, by name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def mark_gradients(model: nn.Module) -> None:
    """Record a span "gradient ready" whenever backward has made a parameter's gradient.

    Call it before the learner adds hooks.
    """

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: mark("gradient ready", parameter=name)
        )


class PeakBytes:
    """The most bytes of some tensors that were alive at once, counted when another one comes.

    It holds weak references to their storages. A storage counts until its last tensor, view or
    place in autograd's graph is gone; of a larger one, only the parts that were watched.
    """

    def __init__(self) -> None:
        self.storages: dict[weakref.ref[torch.UntypedStorage], dict[int, int]] = {}
        self.peak = 0

    def watch(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            parts = self.storages.setdefault(weakref.ref(tensor.untyped_storage()), {})
            parts[int(tensor.storage_offset())] = tensor.nbytes
        if self._now() > self.peak:
            gc.collect()  # what only a cycle of references still holds does not count
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        return sum(
            min(storage.nbytes(), sum(parts.values()))
            for ref, parts in self.storages.items()
            if (storage := ref()) is not None
        )


def clock_seconds() -> float:
    """Return this rank's clock: virtual time on sim and under the grader, otherwise real time."""
    found = recorder()
    if found is not None and hasattr(found, "seconds"):  # the grader's: see rank.py
        return found.seconds()
    now = found.now() if found is not None else None
    return now if isinstance(now, float) else time.perf_counter()


class Optimizers:
    """The optimizers that the learner's code makes, all of them SGD with momentum."""

    def __init__(self) -> None:
        self.made: list[SGD] = []

    def make(self, parameters: Iterable[Any]) -> SGD:
        """Return an optimizer; the learner's code gets this function as `make_optimizer`."""
        self.made.append(SGD(parameters))
        return self.made[-1]

    def result(self) -> dict[str, Any]:
        """Return what a rank sends to the grader.

        This is the optimizers' state in one flat tensor; by step, the sum of the squared gradients
        that the optimizers saw; and the most bytes of gradients that one of them saw at a step.
        """
        gradients = [
            [[g for _, g in step if g is not None] for step in one.steps] for one in self.made
        ]
        squares = [
            sum(float(g.double().square().sum()) for seen in step for g in seen)
            for step in zip_longest(*gradients, fillvalue=())
        ]
        states = [values for optimizer in self.made for values in optimizer.state.values()]
        tensors = [
            v.flatten() for values in states for v in values.values() if isinstance(v, Tensor)
        ]
        return {
            "state": torch.cat(tensors or [torch.zeros(0)]),
            "squares": squares,
            "gradient bytes": max(
                (sum(g.nbytes for g in step) for steps in gradients for step in steps), default=0
            ),
        }


# ---- what a trial found ----


def measured(trial: Trial, name: str) -> list[Any]:
    """Return what the program returned under this name, by rank."""
    return [found[name] for found in trial.results]


# ---- what the ranks run, and what one process runs ----


def all_reduce_bytes(nbytes: float, n: int) -> int:
    """Return the least bytes that each rank sends in an all-reduce of `nbytes`."""
    return round(2 * (n - 1) / n * nbytes)


def train(
    function, sizes: list[int], tied: bool, weights: Tensor, inputs: Tensor, targets: Tensor
) -> dict[str, Any]:
    """Train with the learner's function on this rank.

    `inputs` has the shape (steps, samples of this rank, features).
    """
    model = make_model(sizes, weights, tied)
    optimizer = SGD(model.parameters())
    function(model, F.mse_loss, optimizer, list(zip(inputs, targets)))
    return recorded(model, optimizer)


def train_whole(model, loss_fn, optimizer, batches) -> None:
    """Train in one process on the whole batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def ring_slack(case: Case) -> int:
    """Return the bytes allowed for counts, and for uneven chunks in a learner's own ring."""
    n = case.world_size
    return 64 + case.facts["steps"] * (32 + 6 * 2 * ITEM * (n - 1) ** 2 // n)


# ---- the check ----


def equals_one_process() -> Check:
    """Return a check of the start weights, each step's gradients, and the final weights."""

    def wrong(trial: Trial) -> str | None:
        for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected)):
            steps, most = found["gradients"], expected["gradients"]
            if len(steps) != len(most):
                return (
                    f"rank {rank} called optimizer.step() {len(steps)} times; expected {len(most)}"
                )
            for says, mine, theirs in (
                ("weights at the start, which must be rank 0's", found["start"], expected["start"]),
                *((f"gradients at step {i}", *two) for i, two in enumerate(zip(steps, most), 1)),
                ("weights at the end", found["weights"], expected["weights"]),
            ):
                mine = {name: mine.get(name) for name in theirs}
                if (what := difference(mine, theirs)) is not None:
                    return f"rank {rank}'s {says}: {what}"
        return None

    return Check("value", "every step equals one process with the whole batch", wrong)


# ---- what a wrong program's first step shows ----


def alike(found: Named, expected: Named) -> bool:
    """Return whether all gradients, or weights, are as expected."""
    return all(same(found.get(name), value) for name, value in expected.items())


def scale(found: Named, expected: Named) -> float | None:
    """Return k if all of `found` is k times `expected`; None if there is no such factor."""
    return (
        1.0 if alike(found, expected) else factor(flat(found, expected), flat(expected, expected))
    )


def flat(named: Named, names: Iterable[str]) -> Tensor:
    return torch.cat([named[name].flatten() for name in names])


def mean_of(local: Sequence[Named]) -> Named:
    """Return the mean of the ranks' gradients, with equal weight for each rank."""
    return {
        name: torch.stack([gradients[name] for gradients in local]).mean(0) for name in local[0]
    }


def first_steps(trials: Sequence[Trial]) -> list[tuple[Trial, int, Named]]:
    """Return (trial, rank, gradients of the first step) for all ranks that got that far.

    The runs are those of two or more ranks with wrong values.
    """
    return [
        (trial, rank, trial.results[rank]["gradients"][0])
        for trial, rank in on_ranks(wrong_trials(trials, 2))
        if trial.results[rank]["gradients"]
    ]


def scaled(trials: Sequence[Trial], by: Callable[[Trial], float]) -> bool:
    """Return whether all first gradients are `by` times the right ones, or the ranks' mean."""

    def is_so(trial: Trial, _: int, found: Named) -> bool:
        rules = (trial.case.expected[0]["gradients"][0], mean_of(trial.case.facts["local"]))
        ks = [scale(found, rule) for rule in rules]
        return any(k is not None and abs(k / by(trial) - 1) < 1e-4 for k in ks)

    return all_show(first_steps(trials), is_so)


@mistake(
    "begins with another rank's weights",
    "All ranks begin with the same weights, but not with those of rank 0: they are another "
    "rank's, or a mean.",
)
def from_another_start(trials: Sequence[Trial]) -> bool:
    """Return whether all ranks begin with the same weights, which are not those of rank 0."""
    return all_show(
        first_steps(trials),
        lambda trial, rank, _: (
            alike(trial.results[rank]["start"], trial.results[0]["start"])
            and not alike(trial.results[rank]["start"], trial.case.facts["first"][0])
        ),
    )


@mistake(
    "gradients not cleared",
    "backward() adds to p.grad. The gradients of the step before are still there, so they are "
    "counted again.",
)
def added_to_the_last(trials: Sequence[Trial]) -> bool:
    """Return whether the first step is right, and the second has the gradients of both.

    The first step's gradients may be in it once, or n times if they were summed again.
    """

    def holds_both(trial: Trial, rank: int) -> bool:
        (first, second, *_), (right_first, right_second, *_) = (
            result[rank]["gradients"] for result in (trial.results, trial.case.expected)
        )
        more = {name: second[name] - value for name, value in right_second.items()}
        return alike(first, right_first) and scale(more, right_first) is not None

    return all_show(on_ranks(wrong_trials(trials)), holds_both)


NO_FIRST_SYNCHRONISATION = Misconception(
    "no first synchronisation",
    "Every rank starts from its own weights. Equal gradients then change unequal weights, so "
    "the replicas never become equal.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, rank, _: alike(trial.results[rank]["start"], trial.case.facts["first"][rank]),
    ),
)
SUM_FOR_MEAN = Misconception(
    "sum for mean",
    "An all-reduce adds the ranks' gradients. Each of them belongs to a mean over one share, so "
    "their sum is n times the gradient of the mean loss, and each step is n times too long.",
    lambda trials: scaled(trials, lambda trial: trial.world_size),
)
MEAN_TWICE = Misconception(
    "mean taken twice",
    "The gradients are divided by n twice, for example once in the loss and once after the "
    "all-reduce: each step is n times too short.",
    lambda trials: scaled(trials, lambda trial: 1 / trial.world_size),
)
MEAN_OF_MEANS = Misconception(
    "mean of means",
    "Each rank takes the mean over its share, and then all ranks' means count the same. If shares "
    "differ in length, the samples of a short share count more than those of a long one.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, _, gradients: alike(gradients, mean_of(trial.case.facts["local"])),
    ),
)
NEVER_REDUCED = Misconception(
    "gradients never synchronised",
    "At optimizer.step(), p.grad still holds this rank's own gradient. Each rank takes a "
    "different step.",
    lambda trials: all_show(
        first_steps(trials),
        lambda trial, rank, own: scale(own, trial.case.facts["local"][rank]) is not None,
    ),
)
