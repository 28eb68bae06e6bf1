"""What the tests of the trainers share: small models in float64, what one process makes of them
with nothing but torch, and where a trainer's numbers differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel101 as p101
from parallel101.models import GPT_PLAN
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.seeding import initial_weight
from parallel101.trainers.layout import Axes

STEPS = 3
CLOSE = 1e-10
WITHOUT_HEAD = {name: style for name, style in GPT_PLAN.items() if style != "vocabulary"}


def adamw_by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups: matrices, whose weights decay, and all else."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw by shape": adamw_by_shape,
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def raised(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What a call raises, in words."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_ranks(n: int, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What a program returns on each of n virtual ranks."""
    return p101.launch(program, *args, world_size=n, backend="sim", **options).results


def sends_in(trace: p101.Trace, name: str) -> list[list[Any]]:
    """The sends in spans of this name, by rank."""
    spans = {span.rank: span for span in trace.spans(name)}
    sends = [e for e in trace.events if e.kind == "send"]
    inside = [e for e in sends if spans[e.rank].start <= e.posted <= spans[e.rank].end]
    return [[e for e in inside if e.rank == rank] for rank in range(trace.world_size)]


DATA: dict[str, dict[str, Any]] = {  # the ways of the axis dp
    "naive": {"overlap": False, "bucket_bytes": 0},
    "bucketed": {"overlap": False, "bucket_bytes": 200},
    "overlapped": {"bucket_bytes": 200},
    "ZeRO-1": {"zero_stage": 1, "bucket_bytes": 200},
    "ZeRO-2": {"zero_stage": 2, "bucket_bytes": 200},
    "ZeRO-3": {"zero_stage": 3},
}
TRAINERS: dict[str, Callable[..., Any]] = {
    name: partial(
        p101.ShardedTrainer if "zero_stage" in options else p101.DataParallelTrainer,
        verify=False,
        **options,
    )
    for name, options in DATA.items()
}


def sizes_of(shape: str) -> dict[str, int]:
    """ "dp 2, pp 4" """
    return {name: int(size) for name, size in (axis.split() for axis in shape.split(", "))}


def world_size(shape: str) -> int:
    return math.prod(sizes_of(shape).values())


def mesh_of(shape: str) -> DeviceMesh:
    sizes = sizes_of(shape)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on_mesh(shape: str) -> Callable[..., p101.HybridTrainer]:
    """Builds a HybridTrainer on this mesh from everything else."""
    return lambda *args, **options: p101.HybridTrainer(
        *args, mesh=mesh_of(shape), **{"verify": False, **options}
    )


# ── tasks ──


@dataclass(frozen=True, eq=False)
class Task:
    build: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Tensor], Tensor]
    # of a step: 11 samples or so, which only one rank can share evenly
    batch: Callable[[int], tuple[Any, Any]]
    # options of a trainer whose mesh has the axis tp; of every trainer
    on_tp: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def randn(salt: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def seeded(model: nn.Module) -> nn.Module:
    """In float64; every number of every parameter differs from the others, biases and norms too."""
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            shape = p.shape if p.dim() > 1 else (1, *p.shape)
            weight = initial_weight(name + " matrix", shape).view(p.shape)
            p.copy_(weight * (1 if p.dim() > 1 else 0.3)).add_(0 if p.dim() > 1 else 0.5)
    return model


class Sometimes(nn.Module):
    """Samples that begin with a positive number take a path of their own. A batch without such
    samples never touches it; `never` is on no path.
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


def special_in_few_samples(step: int) -> tuple[Tensor, Tensor]:
    """Step 1 has no special sample, the others one or two, which only some ranks see."""
    x = randn(step, 11, 4)
    x[:, 0] = -1
    if step != 1:
        x[[step, 10], 0] = 1
    return x, randn(100 + step, 11, 1)


def gpt(tied: bool = True, heads: int = 12, **options: Any) -> nn.Module:
    sizes = {"vocabulary": 13, "context": 7, "layers": 2, "heads": heads, "width": 24}
    return seeded(GPT(GPTConfig(**{**sizes, **options}, tied=tied)))


def text(step: int) -> tuple[Tensor, Tensor]:
    """Shares and microbatches are uneven, and their shapes change from step to step."""
    samples, time = [(11, 6), (12, 5), (10, 6)][step % 3]
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (samples, time + 1), generator=generator, device="cpu")
    return tokens[:, :-1], tokens[:, 1:]


def rows(inputs: int, outputs: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda step: (randn(step, 11, inputs), randn(100 + step, 11, outputs))


CUT_HEAD = {"loss_fn": p101.vocabulary_cross_entropy}
TASKS = {  # models.py adds others
    "mlp": Task(lambda: MLP([4, 7, 7, 3], dtype=torch.float64), F.mse_loss, rows(4, 3)),
    "sometimes": Task(Sometimes, F.mse_loss, special_in_few_samples),
    "tied gpt": Task(gpt, next_token_loss, text, CUT_HEAD),
    "untied gpt": Task(partial(gpt, tied=False), next_token_loss, text, CUT_HEAD),
}


# ── one process, and a trainer ──


class Outcome(NamedTuple):
    losses: list[float]
    gradients: dict[int, dict[str, Tensor | None]]  # by step, as the optimizer took them
    weights: dict[str, Tensor | None]
    evaluated: float  # the loss of the first batch afterwards


def copied(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.detach().cpu().clone() for name, t in tensors.items()}


@cache  # virtual ranks share it, as they share all modules
def one_process(task: Task, optimizer: str, clip_norm: float | None, steps: int = STEPS) -> Outcome:
    """The whole batch at once, in plain torch."""
    model = task.build()
    opt, losses, gradients = OPTIMIZERS[optimizer](model.parameters()), [], {}
    for step in range(steps):
        x, y = task.batch(step)
        opt.zero_grad()
        loss = task.loss_fn(model(x), y)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        opt.step()
        losses.append(loss.item())
        gradients[step] = copied(
            {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        )
    weights, (x, y) = copied(model.state_dict()), task.batch(0)
    model.eval()
    with torch.no_grad():
        return Outcome(losses, gradients, weights, task.loss_fn(model(x), y).item())


def trained(trainer: Any, task: Task, steps: int = STEPS) -> Outcome:
    """The same by a trainer, each rank with its share. The gradients are those of step 1: some
    tasks reach fewer weights in it.
    """
    losses, gradients = [], {}
    for step in range(steps):
        losses.append(trainer.step(*trainer.share(task.batch(step))))
        if step == 1:
            gradients[step] = copied(trainer.gradients())
    weights = copied(trainer.state_dict())
    return Outcome(losses, gradients, weights, trainer.evaluate([task.batch(0)]))


class Case(NamedTuple):
    mesh: str
    task: Task
    optimizer: str
    clip_norm: float | None
    options: Mapping[str, Any]
    words: str  # what it is called where it fails


def case(
    mesh: str, task: str, optimizer: str = "adamw", clip_norm: float | None = 0.05, **options: Any
) -> Case:
    """A task on a mesh such as "dp 2, tp 2". An option `loss_fn` is the trainer's, not that of one
    process; `change` is done to the trainer's model only.
    """
    of = TASKS[task]
    given = {"loss_fn": of.loss_fn, **of.options, **(of.on_tp if "tp" in mesh else {}), **options}
    return Case(mesh, of, optimizer, clip_norm, given, f"{task} on {mesh}, {optimizer}, {options}")


def unlike_one_process(
    cases: Iterable[Case], close: float = CLOSE, steps: int = STEPS, device: str = "cpu"
) -> list[str]:
    """Where the trainers' numbers differ from those of one process, by case."""
    wrong = []
    for mesh, task, optimizer, clip_norm, options, words in cases:
        with torch.device("cpu"):
            model = task.build().to(device)
        options = {"clip_norm": clip_norm, **options}
        options.pop("change", lambda model: None)(model)
        sizes = sizes_of(mesh)  # a DeviceMesh would make process groups that no trainer uses
        axes = Axes(None, sizes if "dp" in sizes else {"dp": 1} | sizes)
        given = {"optimizer": OPTIMIZERS[optimizer], "mesh": axes, "verify": False, **options}
        trainer = p101.HybridTrainer(model, **given)
        found = trained(trainer, task, steps)
        with torch.device("cpu"):
            expected = one_process(task, optimizer, clip_norm, steps)
            wrong += [f"{words}: {what}" for what in differences(found, expected, close)]
    return wrong


def differences(found: Outcome, expected: Outcome, close: float = CLOSE) -> list[str]:
    """Where losses, gradients or weights differ by more than `close` of what they are."""
    losses = zip([*found.losses, found.evaluated], [*expected.losses, expected.evaluated])
    wrong = [f"loss {a} and not {b}" for a, b in losses if not abs(a - b) <= close * abs(b)]
    for step, have in found.gradients.items():
        wrong += [f"gradient: {what}" for what in differing(have, expected.gradients[step], close)]
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
        elif a.shape != b.shape or not largest(a - b) <= close * largest(b):
            wrong.append(f"{name} by {largest(a - b) if a.shape == b.shape else a.shape}")
    return wrong


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
