"""Programs as users write them: on each layout equal to one process, or refused before the
first step with what differs.
"""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

import parallel101 as p101
from parallel101.trainers.layout import Axes
from tests.trainers.cases import adamw_by_shape, randn, seeded, sizes_of, world_size

SHARES = {"dp": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # a mesh, and options
    "alone": ("dp 1", {"accumulate": 2}),
    "accumulated": ("dp 2", {"accumulate": 2}),
    **{name: ("dp 2", {"zero_stage": stage}) for name, stage in SHARES.items()},
    "tp": ("dp 1, tp 2", {}),
    "pp": ("dp 1, pp 2", {}),
    "dp × tp": ("dp 2, tp 2", {}),
    "dp × pp": ("dp 2, pp 2", {}),
    "tp × pp": ("dp 1, tp 2, pp 2", {}),
}
DP, PIECES = ("dp",), ("ZeRO-1", "ZeRO-3", "tp")
# each part of the samples goes through the whole model
PARTS = (*DP, "ZeRO-2", "accumulated", "alone")

PLAN = {"0": "column", "2": "row"}
ROWS = randn(1, 6, 6), randn(2, 6, 6)  # samples, features
TWELVE = randn(1, 12, 6), randn(2, 12, 6)
TIMES = randn(1, 6, 5, 6), randn(2, 6, 5, 6)  # samples, time, features


def of_classes(*targets: int) -> tuple[Tensor, Tensor]:
    return randn(1, len(targets), 6), torch.tensor(targets)


CLASSES = of_classes(1, -100, 2, 3, 4, -100)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def chain(*middle: Any) -> nn.Sequential:
    """Three linear layers, and before the last one what else a program has: modules, classes of
    modules or functions of a tensor.
    """
    built = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)]
    for part in middle:
        part = part() if isinstance(part, type) else part
        built.append(part if isinstance(part, nn.Module) else Function(part))
    return seeded(nn.Sequential(*built, nn.Linear(6, 6)))


def inside(*middle: Any) -> Callable[[], nn.Module]:
    return partial(chain, *middle)


class Program(NamedTuple):
    """What a user brings, the layouts to try, and some words of the error; none if it is equal
    to one process.
    """

    says: str
    layouts: tuple[str, ...]
    build: Callable[[], nn.Module] = chain
    loss_fn: Any = F.mse_loss
    batch: tuple[Any, Tensor] = ROWS
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    plan: Any = PLAN
    options: Mapping[str, Any] = {}
    random: bool = False  # so that losses differ
    penalty: Callable[[nn.Module], Tensor] | None = None  # added to the loss
    prepare: Callable[[Any], object] = lambda trainer: None

    def model_and_loss(self, precision: Precision) -> tuple[nn.Module, Any]:
        model = self.build().to(precision.dtype)
        if self.penalty is None:
            return model, self.loss_fn
        return model, lambda y, t: self.loss_fn(y, t) + self.penalty(model)

    def trainer(self, layout: str, precision: Precision) -> Any:
        mesh, options = LAYOUTS[layout]
        plan = {"plan": self.plan} if "tp" in mesh else {}
        trainer = p101.HybridTrainer(
            *(*self.model_and_loss(precision), self.optimizer),
            mesh=Axes(None, sizes_of(mesh)),
            **{**options, **plan, "autocast": precision.autocast, **self.options},
        )
        self.prepare(trainer)
        return trainer

    def one_process(self, precision: Precision) -> list[float]:
        """The loss in evaluation, and those of two steps."""
        (model, loss_fn), (x, y) = self.model_and_loss(precision), precision.batch(self.batch)
        optimizer, losses = self.optimizer(list(model.parameters())), []
        self.prepare(SimpleNamespace(optimizer=optimizer))
        frozen = [module for module in model.modules() if not module.training]
        for training in (False, True, True):
            model.train(training)
            for module in frozen:
                module.eval()
            with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None):
                loss = loss_fn(model(x), y)
            loss, weight = loss if isinstance(loss, tuple) else (loss, 1)
            losses.append(loss.item() / weight)
            if training:
                optimizer.zero_grad()
                (loss / weight).backward()
                if "clip_norm" in self.options:
                    nn.utils.clip_grad_norm_(model.parameters(), self.options["clip_norm"])
                optimizer.step()
        return losses


class Precision(NamedTuple):
    dtype: torch.dtype
    autocast: torch.dtype | None
    close: float  # losses of a few steps

    def batch(self, batch: tuple[Any, Tensor]) -> Any:
        return tuple(t.to(self.dtype) if t.is_floating_point() else t for t in batch)


PRECISIONS = {
    "float64": Precision(torch.float64, None, 1e-10),
    "float32": Precision(torch.float32, None, 1e-5),
    "bfloat16": Precision(torch.bfloat16, None, 0.05),
    "autocast": Precision(torch.float32, torch.bfloat16, 0.05),
}


# ── losses ──


def info_nce(y: Tensor, t: Tensor) -> Tensor:
    """Each output is to be closer to its own target than to those of the other samples."""
    return F.cross_entropy(F.normalize(y) @ F.normalize(t).t(), torch.arange(len(y)))


def balance(y: Tensor, t: Tensor) -> Tensor:
    """As of experts: all classes are to be chosen equally often."""
    return F.mse_loss(y, t) + y.softmax(-1).mean(0).square().sum()


def hardest(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t, reduction="none").mean(1).topk(min(4, len(y))).values.mean()


def pairs(y: Tensor, t: Tensor) -> Tensor:
    """Samples 2i and 2i + 1 are to be alike."""
    return F.mse_loss(y, t) + (y[::2] - y[1::2]).square().mean()


def triplets(y: Tensor, t: Tensor) -> Tensor:
    near, far = (y[::3] - y[1::3]).square(), (y[::3] - y[2::3]).square()
    return F.mse_loss(y, t) + (near - far + 1).clamp_min(0).mean()


def sum_and_weight(y: Tensor, t: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(y, t, reduction="sum"), int((t >= 0).sum())


def squares(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())


def rms(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t).sqrt()


NO_MEAN = "loss_fn isn't a mean over samples|a loss that is no mean over samples"
DIFFERS = "differs by"
CUT = (*PARTS, "pp", "dp × tp", "dp × pp")
ENTROPY, SUMMED = F.cross_entropy, partial(F.mse_loss, reduction="sum")
WEIGHTED = partial(F.cross_entropy, weight=torch.arange(1, 7).double().square())
NOT_COUNTED = of_classes(-100, -100, -100, 1, 1, 1)
EQUALLY, LATE = of_classes(1, 2, -100, 3, 4, -100), of_classes(*[1, 2] * 5, -100, -100)
LOSSES = {
    "ignore_index": Program(NO_MEAN, (*PARTS, "pp"), chain, ENTROPY, CLASSES),
    "ignore_index, late": Program(NO_MEAN, PARTS, chain, ENTROPY, LATE),
    "ignore_index, equally often": Program(NO_MEAN, ("dp", "ZeRO-3"), chain, ENTROPY, EQUALLY),
    "ignore_index, each third": Program(
        *("loss_fn isn't a mean", DP, chain, ENTROPY), of_classes(*[0, -100, 2] * 4)
    ),
    "ignore_index, all on each rank": Program("", ("tp",), chain, ENTROPY, CLASSES),
    "no targets": Program("a mean over no targets", ("alone",), chain, ENTROPY, NOT_COUNTED),
    "class weights": Program(NO_MEAN, PARTS, chain, WEIGHTED, of_classes(*[0] * 6, *[5] * 6)),
    "a sum": Program(NO_MEAN, CUT, chain, SUMMED),
    "root mean square": Program(NO_MEAN, CUT, chain, rms),
    "InfoNCE": Program(NO_MEAN, CUT, chain, info_nce),
    "balance": Program(NO_MEAN, CUT, chain, balance),
    "the hardest": Program(NO_MEAN, PARTS, chain, hardest, TWELVE),
    "pairs": Program("", tuple(SHARES), chain, pairs, (randn(1, 8, 6), randn(2, 8, 6))),
    "one triplet a rank": Program("", tuple(SHARES), chain, triplets, ROWS),
    "two triplets a rank": Program("", tuple(SHARES), chain, triplets, TWELVE),
    "pairs, apart": Program(DIFFERS, DP, chain, pairs, ROWS),
    "a penalty, of parts": Program(DIFFERS, ("tp", "pp"), penalty=squares),
    "a penalty, of whole weights": Program("", ("dp", "ZeRO-2", "alone"), penalty=squares),
}


# ── what must not be cut along tp, cp or pp ──


class Attention(nn.Module):
    """Four heads of two features, or however `split` finds them."""

    def __init__(
        self, split: Callable[[Tensor], Tensor], fused: Callable[[Tensor], Any] | None = None
    ):
        super().__init__()
        self.fused, self.split, self.out = fused, split, nn.Linear(8, 6)
        into = {"fused": 24} if fused else dict.fromkeys(("query", "key", "value"), 8)
        self.into = nn.ModuleDict({name: nn.Linear(6, width) for name, width in into.items()})

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x) for layer in self.into.values()]
        parts = self.fused(*parts) if self.fused else parts
        q, k, v = (self.split(part).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """With something before it, or between its layers."""

    def __init__(self, between: Any = F.gelu, before: Any = lambda x: x):
        super().__init__()
        self.norm, self.between, self.before = nn.LayerNorm(6), between, before
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + self.down(self.between(self.up(self.norm(x))))


def of(*modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: seeded(nn.Sequential(*(build() for build in modules), nn.Linear(6, 6)))


def attention(*how: Any) -> Callable[[], nn.Module]:
    return of(partial(Attention, *how))


def counted(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1))


def wide(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2))


def by_heads(x: Tensor) -> tuple[Tensor, ...]:
    """(heads, 3, features)"""
    return tuple(part.flatten(-2) for part in x.unflatten(-1, (-1, 3, 2)).unbind(-2))


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = chain()
        model[0].weight.register_hook(hook)
        return model

    return build


def behind_zeros() -> nn.Module:
    model = hooked(lambda g: 2 * g)()
    nn.init.zeros_(model[3].weight)
    return model


def remembering() -> nn.Module:
    """A hook that scales with a mean over the gradients that it has seen."""
    mean = [0.0]

    def hook(g: Tensor) -> Tensor:
        mean[0] = 0.9 * mean[0] + 0.1 * g.abs().mean().item()
        return g * (1 + mean[0])

    return hooked(hook)()


class Sequenced(nn.Module):
    """Its forward is what `how` makes of three layers, and its sequence says that it is their
    composition.
    """

    def __init__(self, how: Callable[..., Tensor]):
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.a, self.b, self.c)

    def sequence(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]


def output_hook() -> nn.Sequential:
    model = chain()
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def average(trainer: Any) -> None:
    """Keep a moving average of a weight."""
    mean = torch.zeros(8, 6, dtype=torch.float64)

    def hook(layer: nn.Module, *_: object) -> None:
        mean.lerp_(layer.weight.detach(), 0.1)

    trainer.model[0].register_forward_hook(hook)


def torchs_encoder() -> nn.Module:  # whose dropout is 0.1
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    return seeded(nn.TransformerEncoder(layer, 2))


HEADS = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
FUSED, THIRDS = (
    {"*.fused": p101.column(parts=3, heads=4), "*.out": "row"},
    partial(torch.chunk, chunks=3, dim=-1),
)
FEED, LINEARS = {"*.up": "column", "*.down": "row"}, {"*.linear1": "column", "*.linear2": "row"}
TP, PP, TWO = ("tp", "dp × tp"), ("pp", "dp × pp"), {"accumulate": 2}
OVER_TIME = {"batch": TIMES, "plan": FEED, "options": {"sequence_parallel": True}}
NOT_CUT, ALONE = "Along tp a rank has some features", "every module between the cut layers must act"
NOT_FORWARD = r"Along pp a rank calls some modules of \.sequence"
AXES = {
    "counted heads": Program(NOT_CUT, TP, attention(counted), batch=TIMES, plan=HEADS),
    "wide heads": Program("", TP, attention(wide), batch=TIMES, plan=HEADS),
    "fused by heads": Program(NOT_CUT, TP, attention(wide, by_heads), batch=TIMES, plan=FUSED),
    "fused, wide": Program("", TP, attention(wide, THIRDS), batch=TIMES, plan=FUSED),
    "softmax between": Program(
        NOT_CUT, TP, of(partial(FeedForward, partial(torch.softmax, dim=-1))), plan=FEED
    ),
    "a norm between, auto": Program(
        NOT_CUT, TP, of(partial(FeedForward, lambda h: h / h.norm(dim=-1)[:, None])), plan="auto"
    ),
    "a token shift": Program(
        *(ALONE, TP, of(partial(FeedForward, before=lambda x: x + x.roll(1, 1)), FeedForward)),
        **OVER_TIME,
    ),
    "each position alone": Program("", TP, of(FeedForward, FeedForward), **OVER_TIME),
    "TransformerEncoder": Program("", TP, torchs_encoder, batch=TIMES, plan=LINEARS, random=True),
    "a doubled gradient": Program(NOT_CUT, ("tp",), hooked(lambda g: 2 * g)),
    "behind a head of zeros": Program(NOT_CUT, ("tp",), behind_zeros, options={"verify": 1}),
    "a clamped gradient": Program(DIFFERS, ("tp", "dp"), hooked(lambda g: g.clamp(-1e-3, 1e-3))),
    "large ones clamped": Program(
        DIFFERS, (*SHARES, "accumulated"), hooked(lambda g: g.clamp(-20, 20))
    ),
    "a hook that remembers": Program(DIFFERS, ("dp", "ZeRO-3", "tp"), remembering),
    "a moving average": Program("was raised(.|\n)*a moving average", ("tp",), prepare=average),
    "a hook, zero bubble": Program(
        "", ("pp",), hooked(lambda g: 2 * g), options={"schedule": "zb-h1"}
    ),
    "a skip over entries": Program(
        NOT_FORWARD, PP, lambda: seeded(Sequenced(lambda x, a, b, c: c(b(a(x))) + a(x)))
    ),
    "a composition": Program("", PP, lambda: seeded(Sequenced(lambda x, a, b, c: c(b(a(x)))))),
    "a hook on the model": Program(NOT_FORWARD, (*PP, "tp × pp"), output_hook),
}


# ── optimizers ──


class Own(torch.optim.Optimizer):
    """An elementwise one that keeps things of its own on itself."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__(parameters, {"lr": 1e-2})
        self.count, self.velocity, self.sign = 0, {}, torch.sign

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                v = self.velocity[p] = 0.9 * self.velocity.get(p, torch.zeros_like(p)) + p.grad
                p -= group["lr"] / self.count * (self.sign(v) + v)


class Coupled(torch.optim.AdamW):
    """AdamW, and before it `change`, which looks at the parameters and their state."""

    def __init__(self, change: Callable[[Any, list], None], parameters: list[nn.Parameter]):
        super().__init__(parameters, lr=1e-2)
        self.change, self.count = change, 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        trained = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.change(self, trained)
        super().step()


def clip_inside(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


def clip_jumps(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    norm = sum(p.grad.square().sum() for p in parameters).sqrt()
    usual = vars(optimizer).setdefault("usual", norm)
    for p in parameters:
        p.grad *= (3 * usual / norm).clamp(max=1)
    optimizer.usual = usual.lerp(norm, 0.1)


def decay_matrices(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.mul_(1 - 0.01 * (p.ndim > 1))


def stable(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """StableAdamW: updates are no larger than the root mean square of g²/v says, from step 2 on."""
    for p in parameters:
        v = optimizer.state[p].get("exp_avg_sq", p.grad.square())
        ratio = (p.grad.square() / v.clamp_min(1e-12)).mean().sqrt() / 10
        p.grad /= ratio.clamp_min(1) if optimizer.count > 1 else 1


def adapted(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """As D-Adaptation and Prodigy: one learning rate, from all elements together."""
    group = optimizer.param_groups[0]
    group["s"] = group.get("s", 0) + sum((p.grad * p.grad.sign()).sum().item() for p in parameters)
    group["lr"] = 1e-2 * (1 + group["s"] * (optimizer.count > 1))


def shampoo(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.ndim == 2:
            left = torch.linalg.eigh(p.grad @ p.grad.t() + 1e-3 * torch.eye(len(p)).to(p))
            p.grad = left[1] @ (left[0].pow(-0.25).unsqueeze(1) * (left[1].t() @ p.grad))


def sometimes(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """Each fifth update has the norm 1, and later all."""
    for p in parameters:
        p.grad /= p.grad.norm() if optimizer.count % 5 == 0 or optimizer.count > 12 else 1


def late(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad /= p.grad.norm() if optimizer.count > 100 and optimizer.count % 50 == 0 else 1


def by_table(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """Its counter can't be moved ahead."""
    optimizer.param_groups[0]["lr"] = [1e-2 / (1 + i) for i in range(40)][optimizer.count]


def lookahead(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """Each fifth time it goes half of the way back. It acts on each element alone."""
    for p in parameters:
        slow = vars(optimizer).setdefault("slow", {}).setdefault(p, p.clone())
        if optimizer.count % 5 == 0:
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def langevin(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad += 1e-2 * torch.randn_like(p)


def matrices() -> nn.Sequential:
    layers = (nn.Linear(*sizes, bias=False) for sizes in ((6, 8), (8, 6), (6, 6)))
    first, second, third = layers
    return seeded(nn.Sequential(first, nn.Tanh(), second, third))


def seeded_alike(trainer: Any) -> None:
    torch.manual_seed(0)


def seeded_apart(trainer: Any) -> None:
    torch.manual_seed(getattr(trainer, "position", 0))


def updating(says: str, layouts: tuple[str, ...], optimizer: Any, **more: Any) -> Program:
    return Program(says, layouts, matrices, optimizer=optimizer, **more)


MUON, ADAFACTOR = partial(torch.optim.Muon, lr=1e-2), partial(torch.optim.Adafactor, lr=1e-2)
NOT_ELEMENTWISE = "From equal gradients the optimizer makes other weights"
OF_MATRICES = {"Shampoo": shampoo, "StableAdamW": stable, "at times": sometimes, "late": late}
OF_ALL = {"one rate": adapted, "clipping inside": clip_inside, "clipping of jumps": clip_jumps}
ELEMENTWISE: dict[str, Any] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "AdamW": adamw,
    "one's own": Own,
    "Lookahead": partial(Coupled, lookahead),
    "a table of rates": partial(Coupled, by_table),
    "with a scheduler": lambda p: torch.optim.lr_scheduler.StepLR(adamw(p), 2).optimizer,
}
NOISY: dict[str, Any] = {"optimizer": partial(Coupled, langevin)}
OPTIMIZERS = {
    "Muon": updating("was raised: Param gradient must be a 2D matrix", ("ZeRO-1",), MUON),
    "Muon, whole": updating("", ("pp",), MUON),
    "Adafactor": updating(NOT_ELEMENTWISE, PIECES, ADAFACTOR),
    "decay of matrices": Program(
        NOT_ELEMENTWISE, ("ZeRO-1", "ZeRO-2"), optimizer=partial(Coupled, decay_matrices)
    ),
    **{
        name: updating(NOT_ELEMENTWISE, PIECES, partial(Coupled, change))
        for name, change in OF_MATRICES.items()
    },
    **{
        name: updating(NOT_ELEMENTWISE, (*PIECES, "pp"), partial(Coupled, change))
        for name, change in OF_ALL.items()
    },
    **{
        f"{name}, whole": updating("", ("dp",), partial(Coupled, change))
        for name, change in {**OF_ALL, **OF_MATRICES}.items()
    },
    **{
        name: Program("", (*DP, *PIECES, "pp"), optimizer=build)
        for name, build in ELEMENTWISE.items()
    },
    "a warm-up from 0": updating(
        *(NOT_ELEMENTWISE, ("ZeRO-1",), partial(Coupled, shampoo)),
        prepare=lambda trainer: warm_up(trainer),
    ),
    "noise": Program("", DP, prepare=seeded_alike, random=True, **NOISY),
    "noise, unlike": Program(NOT_ELEMENTWISE, DP, prepare=seeded_apart, **NOISY),
    "noise, of pieces": Program(NOT_ELEMENTWISE, ("ZeRO-1", "ZeRO-3"), **NOISY),
}


# ── what looks at other samples, or at earlier ones ──

COUNT = 0


def count() -> int:
    """For a program in another module."""
    global COUNT
    COUNT += 1
    return COUNT


class Mean(nn.Module):
    """A running mean that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


class Counts(nn.Module):
    """It counts its forwards, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x


class Carried(nn.Module):
    """It remembers what it saw in its forward before."""

    before = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y, self.before = x + self.before, x.detach().mean().item()
        return y


class ActNorm(nn.Module):
    """Its first batch gives its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.known = nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.known:
            self.scale.data, self.known = 1 / x.detach().std(0), True
        return x * self.scale


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def own_batch_norm() -> nn.Module:
    return chain(p101.layers.BatchNorm(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), 6))


def centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


def branching(x: Tensor) -> Tensor:
    """The shares of the first batch take the same branch; sorted, they don't."""
    return x if x.mean() > 0 else 2 * x


def capacity(x: Tensor) -> Tensor:
    """Each of two experts takes max(3, n/2) samples, and what is too much passes by."""
    choice = (x[:, 0] > -9).long()
    place = F.one_hot(choice, 2).cumsum(0).gather(1, choice[:, None])
    return x + x * (place <= max(3, len(x) // 2))


def begun_alike(parametrized: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return chain(parametrized(nn.Linear(6, 6).double()))


SEVERAL = ("alone", "accumulated", "pp")  # forwards in a step
MIXES, SPECTRAL = (
    "Look for what mixes them",
    partial(begun_alike, parametrizations.spectral_norm),
)
SAMPLES = {
    "parallel101's BatchNorm": Program("parallel101.layers", DP, own_batch_norm),
    "centered": Program(MIXES, (*PARTS, "pp"), inside(centered)),
    "centered, with a weight": Program(MIXES, DP, inside(centered), sum_and_weight, CLASSES),
    "a branch": Program(
        *("differs by .* in step 2", ("dp", "ZeRO-3"), of(lambda: Function(branching))),
        batch=(TWELVE[0] + 0.2, TWELVE[1]),
    ),
    "a capacity": Program(MIXES, PARTS, inside(capacity), batch=TWELVE),
    "time first": Program(
        "samples that don't lie along dim 0", PARTS, lambda: seeded(TimeFirst()), batch=TIMES
    ),
    "a running mean": Program("the buffer of '3.mean' differs by", PARTS, inside(Mean)),
    "a counter": Program("", (*SHARES, "tp", "dp × tp"), inside(Counts)),
    "a counter, twice": Program("buffer of '3.forwards' differs by 1", SEVERAL, inside(Counts)),
    "a state in an attribute": Program(DIFFERS, SEVERAL, inside(Carried)),
    "ActNorm": Program("", ("tp",), inside(ActNorm)),
    "ActNorm, of shares": Program(DIFFERS, tuple(SHARES), inside(ActNorm)),
    "spectral norm": Program("", tuple(SHARES), SPECTRAL),
    "spectral norm, twice": Program(DIFFERS, SEVERAL, SPECTRAL),
    "a rank without samples": Program(DIFFERS, DP, SPECTRAL, batch=(ROWS[0][:1], ROWS[1][:1])),
}


# ── what must not be refused ──


class Lora(nn.Module):
    """A frozen layer, and an adapter that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Dropouts(nn.Module):
    """A module, a function, and that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training)
        x = self.attention(x, x, x, need_weights=False)[0] + y
        return F.dropout(self.dropout(x), 0.5, self.training)


class LateDropout(nn.Module):
    """Its fused attention drops nothing in the first step."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        p, heads = 0.5 * (self.forwards > 1), x[:, None]
        return x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)[:, 0]


class Sample(nn.Module):
    """Draws from the distribution whose mean and deviation it is given."""

    def forward(self, x: Tensor) -> Tensor:
        mean, log = x.chunk(2, -1)
        return mean + log.exp() * torch.randn_like(mean) * self.training


def vae() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 8), Sample(), nn.Linear(4, 6)))


def tied() -> nn.Sequential:
    model = chain(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[5].weight = model[3].weight
    return model


def frozen_lora() -> nn.Sequential:
    """Its head is zero, too."""
    model = chain(Lora())
    for p in (*model[3].b.parameters(), *model[4].parameters()):
        nn.init.zeros_(p)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def hook_on_a_module() -> nn.Sequential:
    model = chain()
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def outputs_in_a_dict() -> nn.Sequential:
    model = chain()
    return model.append(Function(lambda x: {"y": x, "not used": x.sum()}))


def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.5, 0.5)


def warm_up(trainer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: step / 10)


def compiled() -> nn.Module:
    return torch.compile(chain(nn.Dropout(0.0)), backend="eager")


EVERY = tuple(LAYOUTS)
FEW = randn(1, 5, 6), randn(2, 5, 6)  # which two ranks share unevenly
EQUAL = {
    "dropout": Program("", EVERY, inside(Dropouts), batch=TIMES, random=True),
    "dropout from the second step on": Program(
        "", tuple(SHARES), inside(LateDropout), batch=TIMES, random=True
    ),
    "a VAE": Program("", EVERY, vae, random=True, plan={"2": "column_gather"}),
    "tied weights": Program("", EVERY, tied),
    "LoRA, and frozen parts": Program("", EVERY, frozen_lora),
    "parameter groups": Program("", EVERY, optimizer=adamw_by_shape),
    "a warm-up from 0": Program("", EVERY, prepare=warm_up),
    "uneven shares": Program("", EVERY, batch=FEW, options={"clip_norm": 0.05}),
    "a module's hook": Program("", EVERY, hook_on_a_module),
    "outputs in a dict": Program("", EVERY, outputs_in_a_dict, lambda y, t: F.mse_loss(y["y"], t)),
    "a sum and its weight": Program("", EVERY, chain, sum_and_weight, CLASSES),
    "an optimizer's hook": Program(
        "", EVERY, prepare=lambda trainer: trainer.optimizer.register_step_post_hook(clamp)
    ),
    "a norm that is frozen": Program("", EVERY, lambda: chain(nn.BatchNorm1d(6).eval())),
    "compiled": Program("", ("dp", "ZeRO-1"), compiled),
}


# ── all of them ──

TABLES = {
    "losses": LOSSES,
    "axes": AXES,
    "optimizers": OPTIMIZERS,
    "samples": SAMPLES,
    "equal": EQUAL,
}


class Case(NamedTuple):
    table: str
    name: str
    layout: str
    precision: str = "float64"

    def wrong(self) -> str:
        """On this rank: what is not as the table says."""
        program, precision = TABLES[self.table][self.name], PRECISIONS[self.precision]
        trainer, batch = program.trainer(self.layout, precision), precision.batch(program.batch)
        if program.says:
            return not_refused(trainer, batch, program.says)
        share = trainer.share(batch)
        losses = [trainer.evaluate([batch]), trainer.step(*share), trainer.step(*share)]
        expected = program.one_process(precision)
        if program.random:
            del losses[1:], expected[1:]
        right = losses == pytest.approx(expected, rel=precision.close)
        return "" if right else f"{losses}, not {expected}"


def not_refused(trainer: Any, batch: Any, says: str) -> str:
    before = trainer.state_dict()
    try:
        trainer.step(*trainer.share(batch))
    except (p101.NotEqualError, FloatingPointError) as error:
        after = trainer.state_dict()
        changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
        return f"{changed} changed" * bool(changed) or f"it says: {error}" * (
            not re.search(says, str(error))
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def cases_of(table: str) -> list[Case]:
    """In turn, a program gets three of the layouts that it asks for; and if it must be equal, each
    of them another precision.
    """
    cases = []
    for i, (name, program) in enumerate(TABLES[table].items()):
        for k in range(min(3, len(program.layouts))):
            layout = program.layouts[(2 * i + 3 * k) % len(program.layouts)]
            precision = list(PRECISIONS)[(i + k) % 4] if table == "equal" else "float64"
            cases.append(Case(table, name, layout, precision))
    return cases


def wrong_in(cases: list[Case]) -> list[tuple[Case, str]]:
    return [(case, wrong) for case in cases if (wrong := case.wrong())]


@pytest.mark.parametrize("table", TABLES)
def test_it_is_equal_or_refused_with_what_differs(table, capfd):
    for ranks in (1, 2, 4):
        cases = [c for c in cases_of(table) if world_size(LAYOUTS[c.layout][0]) == ranks]
        if cases:
            run = p101.launch(wrong_in, cases, world_size=ranks, backend="sim")
            assert run.results == [[]] * ranks
    assert "not verified" not in capfd.readouterr().out


def test_rounding_hides_no_loss_that_mixes_samples():
    names = ("root mean square", "InfoNCE", "a sum")
    cases = [Case("losses", n, "dp", p) for n in names for p in ("bfloat16", "autocast")]
    assert p101.launch(wrong_in, cases, world_size=2, backend="sim").results == [[], []]


# ── the rest: programs of two ranks, each with what is to be true of it ──


def dp(*arguments: Any, **options: Any) -> Any:
    model, loss_fn = (*arguments, F.mse_loss)[:2]
    return p101.DataParallelTrainer(model, loss_fn, adamw, **options)


def a_loss_that_is_no_mean_from_the_fourth_batch_on() -> None:
    """−100 is absent before."""
    trainer = dp(chain(), F.cross_entropy)
    for _ in range(3):
        trainer.step(*trainer.share(of_classes(1, 2, 3, 4, 5, 0)))
    with pytest.raises(p101.NotEqualError, match=NO_MEAN):
        trainer.step(*trainer.share(of_classes(1, 2, 3, 4, 5, -100)))


class Late(nn.Module):
    """From its sixth forward on, it mixes samples."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x if self.forwards < 6 else x - x.mean(0)


def what_changes_later_is_found_in_as_many_steps() -> None:
    trainer = dp(chain(Late), verify=3)
    assert trainer.verify(*trainer.share(ROWS)).equal
    trainer = dp(chain(Late), verify=6)
    with pytest.raises(p101.NotEqualError, match="in step 6"):
        trainer.verify(*trainer.share(ROWS))


def copies_that_are_no_longer_equal() -> None:
    """Of an embedding that shortens the rows that its samples use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6, max_norm=0.1), nn.Linear(6, 6)).double()
    trainer, rows = dp(model, verify=1), torch.arange(12)
    trainer.step(*trainer.share((rows.repeat(2), randn(2, 24, 6))))  # each rank uses all of them
    with pytest.raises(ValueError, match=r"no longer equal: '0\.weight'"):
        trainer.step(*trainer.share((rows, randn(2, 12, 6))))


def a_weight_that_needs_a_gradient() -> None:
    trainer = dp(chain(), lambda y, t: (F.mse_loss(y, t), y.square().sum()))
    with pytest.raises(p101.NotEqualError, match="weight of the loss needs a"):
        trainer.step(*trainer.share(ROWS))


def sparse_gradients() -> None:
    for stage in range(4):
        model = chain(lambda x: x + model[3].table((x[:, 0] > 0).long()))  # noqa: B023
        model[3].table = nn.Embedding(5, 6, sparse=True).double()
        trainer = p101.HybridTrainer(
            *(model, F.mse_loss, adamw), mesh=Axes(None, {"dp": 2}), zero_stage=stage
        )
        with pytest.raises(p101.NotEqualError, match=r"of '3\.table\.weight' is sparse"):
            trainer.step(*trainer.share(ROWS))


def a_trainer_without_verify_keeps_no_copy() -> None:
    with pytest.raises(ValueError, match="built with verify=False and keeps no copy of the whole"):
        dp(chain(), verify=False).verify(*ROWS)


def it_can_be_asked_for_at_any_time() -> None:
    """Of a converged model, and of an optimizer that has learnt something."""
    with torch.no_grad():
        learnt = ROWS[0], chain()(ROWS[0]) + 1e-10
    for layout in ("dp", "ZeRO-3", "tp", "pp"):
        for batch, optimizer in ((learnt, adamw), (ROWS, adamw if layout != "dp" else Own)):
            program = Program("", (), optimizer=optimizer)
            trainer = program.trainer(layout, PRECISIONS["float64"])
            losses = [trainer.step(*trainer.share(batch)) for _ in range(1 + (batch is ROWS))]
            assert batch is ROWS or losses[0] < 1e-19
            assert trainer.verify(*trainer.share(batch)).worst.ratio <= 1


def with_its_gradient(x: Tensor) -> Tensor:
    """As of an energy: such a model can't be evaluated without gradients."""
    (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return x + gradient


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(randn(3, 6), randn(4, 6)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real


class InBfloat16(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def locked() -> nn.Module:
    model = chain()
    model.lock = threading.Lock()
    return model


SINGLE = ROWS[0].float(), ROWS[1].float()
FAR = SINGLE[0] + 300, SINGLE[1]  # from zero
SYNC, CLIPPED = {"sync_batch_norm": True}, {"clip_norm": 0.05}
COMPARED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "a lock": (locked, TIMES, {}),
    "a shorter last share": (chain, TIMES, {}),
    "inputs that change in place": (of(lambda: Function(lambda x: x.mul_(2))), ROWS, {}),
    "an orthogonal matrix": (partial(begun_alike, parametrizations.orthogonal), ROWS, CLIPPED),
    "a gradient": (inside(with_its_gradient), ROWS, CLIPPED),
    "complex weights": (inside(Turned), ROWS, CLIPPED),
    "autocast inside": (lambda: chain(InBfloat16(6, 6)).float(), SINGLE, {}),
    "a synchronized norm": (lambda: chain(nn.BatchNorm1d(6)).float(), FAR, SYNC),
}


def these_are_equal() -> None:
    for name, (build, batch, options) in COMPARED.items():
        trainer = dp(build(), **options)
        shorter = trainer.position * ("shorter" in name)
        share = [t[:, : t.shape[1] - shorter] for t in trainer.share(batch)]
        trainer.step(*(t.clone() for t in share))
        assert trainer.verify(*(t.clone() for t in share)).equal, name


REST = [
    a_loss_that_is_no_mean_from_the_fourth_batch_on,
    what_changes_later_is_found_in_as_many_steps,
    copies_that_are_no_longer_equal,
    a_weight_that_needs_a_gradient,
    sparse_gradients,
    a_trainer_without_verify_keeps_no_copy,
    it_can_be_asked_for_at_any_time,
    these_are_equal,
]


@pytest.mark.parametrize("program", REST)
def test_what_is_true_of_a_program(program):
    p101.launch(program, world_size=2, backend="sim")


def boxes(x: Tensor) -> dict[str, Tensor]:
    return {"boxes": x}


def without_words(x: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("evaluated", [boxes, without_words], ids=["boxes", "without words"])
def test_a_model_that_does_something_else_in_evaluation_is_trained(evaluated, capfd):
    def train() -> bool:
        model = chain()
        model.append(Function(lambda x: x if model.training else evaluated(x)))
        trainer = dp(model)
        trainer.step(*trainer.share(ROWS))
        return trainer.verify(*trainer.share(ROWS)).equal

    assert p101.launch(train, world_size=2, backend="sim").results == [True, True]
    assert "evaluation isn't compared: in one process it raises" in capfd.readouterr().out


def test_a_refusal_is_pickled_with_its_report():
    def pickled() -> bytes:
        trainer = LOSSES["a sum"].trainer("dp", PRECISIONS["float64"])
        with pytest.raises(p101.NotEqualError) as refused:
            trainer.step(*trainer.share(ROWS))
        return pickle.dumps(refused.value)

    first, second = map(pickle.loads, p101.launch(pickled, world_size=2, backend="sim").results)
    assert str(first) == str(second) and first.report == second.report
    assert not first.report.equal and first.report.worst.ratio > 1
    assert "✗" in str(first.report) and str(first.report).startswith("not equal to one process")
    assert first.report.cause in str(first)
