"""What the tests of the trainers share: small models in float64, and what one process makes of
them with nothing but torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101 import DataParallelTrainer, ShardedTrainer
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP

STEPS = 5
CLOSE = 1e-10

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


class Setting(NamedTuple):
    optimizer: str
    clip_norm: float | None
    accumulate: int


EVERY_SETTING = [Setting(*values) for values in itertools.product(OPTIMIZERS, (None, 0.05), (1, 2))]
SETTINGS = (  # half of them: every pair of two options' values is in one
    Setting("sgd", None, 2),
    Setting("sgd", 0.05, 1),
    Setting("adamw", None, 1),
    Setting("adamw", 0.05, 2),
)


def setting(*numbers: int) -> Setting:
    """One of the four. Where the numbers are those of a task, a variant and the ranks, each
    pair of these meets all four.
    """
    return SETTINGS[sum(numbers) % len(SETTINGS)]


TRAINERS: dict[str, Callable[..., Any]] = {
    "naive": partial(DataParallelTrainer, overlap=False, bucket_bytes=0, verify=False),
    "bucketed": partial(DataParallelTrainer, overlap=False, bucket_bytes=200, verify=False),
    "overlapped": partial(DataParallelTrainer, overlap=True, bucket_bytes=200, verify=False),
    "ZeRO-1": partial(ShardedTrainer, zero_stage=1, bucket_bytes=200, verify=False),
    "ZeRO-2": partial(ShardedTrainer, zero_stage=2, bucket_bytes=200, verify=False),
    "ZeRO-3": partial(ShardedTrainer, zero_stage=3, verify=False),
}


def adamw_by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups: matrices, whose weights decay, and all else."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


ALL_OPTIMIZERS = {**OPTIMIZERS, "adamw by shape": adamw_by_shape}


class Sometimes(nn.Module):
    """Samples that begin with a positive number take a path of their own, which a batch without
    such never touches; `never` is on none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (
            MLP([4, 6, 1], seed=s, dtype=torch.float64) for s in (1, 2, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, special = self.always(x), x[:, 0] > 0
        if special.any():
            y = y.index_add(0, special.nonzero()[:, 0], self.sometimes(x[special]))
        return y


class Task(NamedTuple):
    build: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    # of a step: 11 samples, which only one rank can share evenly
    batch: Callable[[int], tuple[Tensor, Tensor]]


def randn(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def special_in_few_samples(step: int) -> tuple[Tensor, Tensor]:
    """Step 1 has no special sample, the others one or two, which only some ranks see."""
    x = randn(step, 11, 4)
    x[:, 0] = -1
    if step != 1:
        x[[step, 10], 0] = 1
    return x, randn(100 + step, 11, 1)


def text(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(13, (11, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def gpt(tied: bool, dtype: torch.dtype = torch.float64) -> GPT:
    return GPT(
        GPTConfig(vocabulary=13, context=6, layers=2, heads=2, width=8, tied=tied), dtype=dtype
    )


TASKS = {
    "mlp": Task(
        lambda: MLP([4, 7, 7, 3], dtype=torch.float64),
        F.mse_loss,
        lambda step: (randn(step, 11, 4), randn(100 + step, 11, 3)),
    ),
    "sometimes": Task(Sometimes, F.mse_loss, special_in_few_samples),
    "tied gpt": Task(lambda: gpt(True), next_token_loss, text),
    "untied gpt": Task(lambda: gpt(False), next_token_loss, text),
}


class Outcome(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor | None]]  #  of every step, as the optimizer took them
    weights: dict[str, Tensor]


def copied(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.detach().clone() for name, g in gradients.items()}


@cache  #  virtual ranks share it, as they share all modules
def one_process(task: Task, optimizer: str, clip_norm: float | None, steps: int = STEPS) -> Outcome:
    """The whole batch at once, in plain torch."""
    model = task.build()
    opt, losses, gradients = ALL_OPTIMIZERS[optimizer](model.parameters()), [], []
    for step in range(steps):
        x, y = task.batch(step)
        opt.zero_grad()
        loss = task.loss_fn(model(x), y)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        opt.step()
        losses.append(loss.item())
        gradients.append(copied({name: p.grad for name, p in model.named_parameters()}))
    return Outcome(losses, gradients, model.state_dict())


def trained(trainer: Any, task: Task, steps: int = STEPS) -> Outcome:
    """The same by a trainer, each rank with its share."""
    losses, gradients = [], []
    for step in range(steps):
        losses.append(trainer.step(*trainer.share(task.batch(step))))
        gradients.append(copied(trainer.gradients()))
    return Outcome(losses, gradients, trainer.state_dict())


def differences(found: Outcome, expected: Outcome, close: float = CLOSE) -> list[str]:
    """Where losses, gradients or weights differ by more than `close` of what they are."""
    wrong = [
        f"loss {a} and not {b}"
        for a, b in zip(found.losses, expected.losses)
        if abs(a - b) > close * abs(b)
    ]
    for step, (have, want) in enumerate(zip(found.gradients, expected.gradients)):
        wrong += [f"gradient, step {step}: {what}" for what in differing(have, want, close)]
    return wrong + [f"weight: {what}" for what in differing(found.weights, expected.weights, close)]


def differing(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], close: float
) -> list[str]:
    if found.keys() != expected.keys():
        return [f"names {sorted(found.keys() ^ expected.keys())}"]
    wrong = []
    for name, b in expected.items():
        a = found[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(f"{name} is {'absent' if a is None else 'there'}")
            continue
        if a.shape != b.shape or largest(a - b) > close * largest(b):
            wrong.append(f"{name} by {largest(a - b) if a.shape == b.shape else a.shape}")
    return wrong


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
