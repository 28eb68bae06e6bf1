"""Programs as users write them: on each layout equal to one process, or refused before the
first step with the cause in words.
"""

from __future__ import annotations

import pickle
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
from tests.trainers.cases import adamw_by_shape, randn, seeded, sizes_of

MESHES = {"dp × tp": "dp 2, tp 2", "dp × pp": "dp 2, pp 2", "tp × pp": "tp 2, pp 2"}
LAYOUTS: dict[str, tuple[int, Callable[..., Any]]] = {  # how many ranks, and what trains
    "alone": (1, partial(p101.DataParallelTrainer, accumulate=2)),
    "dp": (2, p101.DataParallelTrainer),
    "accumulated": (2, partial(p101.DataParallelTrainer, accumulate=2)),
    **{f"ZeRO-{stage}": (2, partial(p101.ShardedTrainer, zero_stage=stage)) for stage in (1, 2, 3)},
    "tp": (2, p101.TensorParallelTrainer),
    "pp": (2, p101.PipelineTrainer),
    **{
        name: (
            4,
            lambda *args, mesh=mesh, **more: p101.HybridTrainer(
                *args, mesh=Axes(None, {"dp": 1, **sizes_of(mesh)}), **more
            ),
        )
        for name, mesh in MESHES.items()
    },
}
DP, ZERO = ("dp",), ("ZeRO-1", "ZeRO-2", "ZeRO-3")
SHARES = (*DP, *ZERO)
# each part of the samples goes through the whole model
PARTS = (*DP, "ZeRO-2", "accumulated", "alone")
EVERY = (*SHARES, "accumulated", "alone", "tp", "pp", *MESHES)

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Any, Tensor]
PLAN = {"0": "column", "2": "row"}
ROWS: Batch = randn(1, 6, 6), randn(2, 6, 6)  # samples, features
FEW: Batch = randn(1, 5, 6), randn(2, 5, 6)  # which two ranks share unevenly
TIMES: Batch = randn(1, 6, 5, 6), randn(2, 6, 5, 6)  # samples, time, features
CLASSES: Batch = randn(1, 6, 6), torch.tensor([1, -100, 2, 3, 4, -100])


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Program(NamedTuple):
    """What a user brings, the layouts to try, and some words of the error; none if it is equal
    to one process.
    """

    says: str
    layouts: tuple[str, ...]
    build: Callable[[], nn.Module]
    loss_fn: Any = F.mse_loss
    batch: Batch = ROWS
    optimizer: Optimizer = adamw
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
        options = {**self.options, "autocast": precision.autocast} | (
            {"plan": self.plan} if "tp" in layout else {}
        )
        trainer = LAYOUTS[layout][1](*self.model_and_loss(precision), self.optimizer, **options)
        self.prepare(trainer)
        return trainer

    def one_process(self, precision: Precision) -> list[float]:
        """The loss in evaluation, and those of two steps."""
        (model, loss_fn), (x, y) = self.model_and_loss(precision), precision.batch(self)
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


def chain(*middle: nn.Module) -> nn.Sequential:
    return seeded(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), *middle, nn.Linear(6, 6))
    )


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# ── losses that are no mean over samples ──


def info_nce(y: Tensor, t: Tensor) -> Tensor:
    """Each output is to be closer to its own target than to those of the other samples."""
    return F.cross_entropy(F.normalize(y) @ F.normalize(t).t(), torch.arange(len(y)))


def balance(y: Tensor, t: Tensor) -> Tensor:
    """As of experts: all classes are to be chosen equally often."""
    return F.mse_loss(y, t) + y.softmax(-1).mean(0).square().sum()


def sum_and_weight(y: Tensor, t: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(y, t, reduction="sum"), int((t >= 0).sum())


def squares(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())


DIFFERS = "differs by"  # what differs first is named, and no cause
IGNORED, WEIGHTS = torch.tensor([-100] * 3 + [1] * 3), torch.arange(1, 7).double().square()
NO_MEAN, CUT = "loss_fn isn't a mean over samples", (*PARTS, "pp", "dp × tp", "dp × pp", "tp × pp")
LOSSES = {
    "ignore_index": Program(NO_MEAN, CUT, chain, F.cross_entropy, CLASSES),
    "a microbatch without targets": Program(
        NO_MEAN, ("alone",), chain, F.cross_entropy, (ROWS[0], IGNORED)
    ),
    "class weights": Program(
        NO_MEAN,
        CUT,
        chain,
        partial(F.cross_entropy, weight=WEIGHTS),
        (ROWS[0], CLASSES[1].abs() % 6),
    ),
    "a sum": Program(NO_MEAN, CUT, chain, partial(F.mse_loss, reduction="sum")),
    "root mean square": Program(NO_MEAN, CUT, chain, lambda y, t: F.mse_loss(y, t).sqrt()),
    "relative L2": Program(NO_MEAN, CUT, chain, lambda y, t: (y - t).norm() / t.norm()),
    "InfoNCE": Program(NO_MEAN, CUT, chain, info_nce),
    "balance": Program(NO_MEAN, CUT, chain, balance),
    "a penalty, of parts": Program(DIFFERS, ("tp", "pp"), chain, penalty=squares),
    "a penalty, of whole weights": Program(
        "", ("dp", "ZeRO-1", "ZeRO-2", "alone"), chain, penalty=squares
    ),
    "ignore_index, all samples on each rank": Program("", ("tp",), chain, F.cross_entropy, CLASSES),
}


# ── plans that cut what must not be cut ──


class Attention(nn.Module):
    """Four heads of two features, or however `split` finds them."""

    def __init__(
        self, split: Callable[[Tensor], Tensor], fused: Callable[[Tensor], Any] | None = None
    ):
        super().__init__()
        names = ("query", "key", "value")
        self.into = nn.ModuleDict(
            {"fused": nn.Linear(6, 24)} if fused else {name: nn.Linear(6, 8) for name in names}
        )
        self.out, self.split, self.fused = nn.Linear(8, 6), split, fused

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.fused(self.into["fused"](x))
            if self.fused
            else [layer(x) for layer in self.into.values()]
        )
        q, k, v = (self.split(part).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(6, 8), nn.Linear(8, 6), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def model_of(*modules: nn.Module) -> nn.Sequential:
    return seeded(nn.Sequential(*modules))


def attention(*how: Any) -> nn.Sequential:
    return model_of(Attention(*how), nn.Linear(6, 6))


def fed(between: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return model_of(FeedForward(between), nn.Linear(6, 6))


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Sequential:
    model = chain()
    model[0].weight.register_hook(hook)
    return model


class Encoder(nn.Module):
    """A small ViT: patches, torch's layers, a head for the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers, self.head = (
            nn.Linear(6, 8),
            nn.Sequential(encoder_layer(), encoder_layer()),
            nn.Linear(8, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x)).mean(1))


def encoder_layer(width: int = 8) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, 2, 12, batch_first=True)  # whose dropout is 0.1


def torchs_encoder() -> nn.Module:
    return seeded(nn.TransformerEncoder(encoder_layer(6), 2))


def counted(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1))


def wide(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2))


def by_heads(x: Tensor) -> tuple[Tensor, ...]:
    """(heads, 3, features)"""
    return tuple(part.flatten(-2) for part in x.unflatten(-1, (-1, 3, 2)).unbind(-2))


THIRDS = partial(torch.chunk, chunks=3, dim=-1)
HEADS = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
FUSED = {"*.fused": p101.column(parts=3, heads=4), "*.out": "row"}
FEED, LINEARS = {"*.up": "column", "*.down": "row"}, {"*.linear1": "column", "*.linear2": "row"}
NOT_CUT, ONE_AXIS = "Along tp a rank has some features", ("tp",)
TP = (*ONE_AXIS, "dp × tp", "tp × pp")
IMAGES: Batch = TIMES[0], ROWS[1]
TENSOR = {
    "heads that are counted": Program(
        NOT_CUT, ONE_AXIS, partial(attention, counted), batch=TIMES, plan=HEADS
    ),
    "fused heads that are counted": Program(
        NOT_CUT, ONE_AXIS, partial(attention, counted, THIRDS), batch=TIMES, plan=FUSED
    ),
    "fused by heads": Program(
        NOT_CUT, TP, partial(attention, wide, by_heads), batch=TIMES, plan=FUSED
    ),
    "heads of a width": Program("", TP, partial(attention, wide), batch=TIMES, plan=HEADS),
    "fused heads of a width": Program(
        "", ONE_AXIS, partial(attention, wide, THIRDS), batch=TIMES, plan=FUSED
    ),
    "a norm of one's own": Program(
        NOT_CUT, ONE_AXIS, partial(fed, lambda h: h / h.norm(dim=-1, keepdim=True)), plan=FEED
    ),
    "a norm of one's own, auto": Program(
        NOT_CUT, TP, partial(fed, lambda h: h / h.norm(dim=-1, keepdim=True)), plan="auto"
    ),
    "softmax": Program(NOT_CUT, ONE_AXIS, partial(fed, partial(torch.softmax, dim=-1)), plan=FEED),
    "softmax, auto": Program(
        NOT_CUT, TP, partial(fed, partial(torch.softmax, dim=-1)), plan="auto"
    ),
    "a dropout that keeps all": Program(
        "", ONE_AXIS, partial(fed, partial(F.dropout, p=0.0)), plan="auto"
    ),
    "a hook that doubles a gradient": Program(NOT_CUT, ("tp",), partial(hooked, lambda g: 2 * g)),
    "a hook that clamps a gradient": Program(
        DIFFERS, ("tp", "dp"), partial(hooked, lambda g: g.clamp(-1e-3, 1e-3))
    ),
    "a hook, in a zero-bubble pipeline": Program(
        "", ("pp",), partial(hooked, lambda g: 2 * g), options={"schedule": "zb-h1"}
    ),
    "TransformerEncoder": Program(
        "", TP[:2], torchs_encoder, batch=TIMES, plan=LINEARS, random=True
    ),
    "ViT": Program("", TP[:2], lambda: seeded(Encoder()), batch=IMAGES, plan=LINEARS, random=True),
}


# ── what needs all positions of a sequence ──


class InTime(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.norm, self.up, self.down, self.mix = (
            nn.LayerNorm(6),
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            mix,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def in_time(mix: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return model_of(InTime(mix), InTime(lambda x: x), nn.LayerNorm(6))


POSITIONS = randn(3, 5, 6)
SEQUENCE = {"batch": TIMES, "plan": FEED, "options": {"sequence_parallel": True}}
ALONE = "With sequence_parallel, every module between the cut layers must act"
TIME = {
    "roll": Program(ALONE, ONE_AXIS, partial(in_time, lambda x: x + x.roll(1, 1)), **SEQUENCE),
    "a token shift": Program(
        ALONE, TP, partial(in_time, lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0))), **SEQUENCE
    ),
    "a mean over time": Program(
        ALONE, ONE_AXIS, partial(in_time, lambda x: x - x.mean(1, keepdim=True)), **SEQUENCE
    ),
    "positions": Program(
        ALONE, ONE_AXIS, partial(in_time, lambda x: x + POSITIONS[: x.shape[1]]), **SEQUENCE
    ),
    "each position alone": Program("", TP, partial(in_time, lambda x: x), **SEQUENCE),
    "a time-first LSTM": Program(
        "samples may not lie along dim 0", PARTS, lambda: seeded(TimeFirst()), batch=TIMES
    ),
}


# ── pipelines ──


class Sequenced(nn.Module):
    """Its forward is what `how` makes of three layers, and its sequence says that it is their
    composition.
    """

    def __init__(self, how: Callable[..., Tensor], middle: nn.Module):
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(6, 6), middle, nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.a, self.b, self.c)

    def sequence(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]


def sequenced(how: Callable[..., Tensor], middle: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return seeded(Sequenced(how, middle()))


def skip(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
    h = a(x)
    return c(b(h)) + h


def output_hook() -> nn.Sequential:
    model = chain()
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


NOT_FORWARD = "Along pp a rank calls some modules of .sequence()"
PP = ("pp", "dp × pp")
PIPELINE = {
    "a skip over entries": Program(NOT_FORWARD, PP, partial(sequenced, skip)),
    "a scaling of the output": Program(
        NOT_FORWARD, PP, partial(sequenced, lambda x, a, b, c: 2 * c(b(a(x))))
    ),
    "a hook on the model": Program(NOT_FORWARD, (*PP, "tp × pp"), output_hook),
    "the composition": Program("", PP, partial(sequenced, lambda x, a, b, c: c(b(a(x))))),
}


# ── optimizers ──


class Lars(torch.optim.Optimizer):
    """A step for each parameter in proportion to its norm. It has no lr."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__(parameters, {"trust": 1e-2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["trust"] * p.norm() / (p.grad.norm() + 1e-12) * p.grad


class MuonAndAdam(torch.optim.AdamW):
    """AdamW, except that a matrix moves along the nearest orthogonal one."""

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() == 2 and p.grad is not None:
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.grad = u @ v
        super().step()


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

    def __init__(self, parameters: list[nn.Parameter], change: Callable[[Any, list], None]):
        super().__init__(parameters, lr=1e-2)
        self.change, self.count = change, 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        found = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.change(self, found)
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


def lamb(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """A trust ratio that is clamped, so that it does nothing in the first step."""
    for p in parameters:
        p.grad *= (p.norm() / p.grad.norm().clamp_min(1e-12)).clamp(
            max=1 + 1e4 * (optimizer.count > 1)
        )


def shampoo(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.ndim == 2:
            left = torch.linalg.eigh(p.grad @ p.grad.t() + 1e-3 * torch.eye(len(p)).to(p))
            p.grad = left[1] @ (left[0].pow(-0.25).unsqueeze(1) * (left[1].t() @ p.grad))


def sometimes(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """Each fifth update has the norm 1, and later all."""
    for p in parameters:
        p.grad /= p.grad.norm() if optimizer.count % 5 == 0 or optimizer.count > 12 else 1


def lookahead(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    """Each fifth time it goes half of the way back. It acts on each element alone."""
    for p in parameters:
        slow = vars(optimizer).setdefault("slow", {}).setdefault(p, p.clone())
        if optimizer.count % 5 == 0:
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def matrices() -> nn.Sequential:
    layers = (
        nn.Linear(6, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, 6, bias=False),
        nn.Linear(6, 6, bias=False),
    )
    return model_of(*layers)


NOT_ELEMENTWISE, PIECES = (
    "From equal gradients the optimizer makes other weights",
    ("ZeRO-1", "ZeRO-3", "tp"),
)
REFUSED: dict[str, Optimizer] = {
    "LARS": Lars,
    "Muon and AdamW in one": lambda p: MuonAndAdam(p, lr=1e-2),
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Shampoo": partial(Coupled, change=shampoo),
    "StableAdamW": partial(Coupled, change=stable),
    "LAMB, clamped": partial(Coupled, change=lamb),
    "normalized each fifth time": partial(Coupled, change=sometimes),
}
OF_ALL: dict[str, Optimizer] = {
    "one rate for all": partial(Coupled, change=adapted),
    "clipping inside": partial(Coupled, change=clip_inside),
    "clipping if gradients jump": partial(Coupled, change=clip_jumps),
}
ELEMENTWISE: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": adamw,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "one's own": Own,
    "Lookahead": partial(Coupled, change=lookahead),
    "with a scheduler": lambda p: torch.optim.lr_scheduler.StepLR(adamw(p), 2).optimizer,
}
OPTIMIZERS = {
    "torch's Muon": Program(
        "One process can compute this batch, and here ValueError was raised: Muon only",
        ("ZeRO-1", "ZeRO-3"),
        matrices,
        optimizer=lambda p: torch.optim.Muon(p, lr=1e-2),
    ),
    "decay of matrices": Program(
        NOT_ELEMENTWISE, ZERO, chain, optimizer=partial(Coupled, change=decay_matrices)
    ),
    **{
        name: Program(NOT_ELEMENTWISE, PIECES, matrices, optimizer=build)
        for name, build in REFUSED.items()
    },
    **{
        name: Program(NOT_ELEMENTWISE, (*PIECES, "pp"), matrices, optimizer=build)
        for name, build in OF_ALL.items()
    },
    **{
        f"{name}, whole": Program("", DP, matrices, optimizer=build)
        for name, build in OF_ALL.items()
    },
    **{
        f"{name}, whole": Program("", ("pp",), matrices, optimizer=build)
        for name, build in REFUSED.items()
    },
    **{
        name: Program("", (*DP, *PIECES, "pp"), chain, optimizer=build)
        for name, build in ELEMENTWISE.items()
    },
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


def own_batch_norm() -> nn.Module:
    return chain(p101.layers.BatchNorm(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), 6))


def normalize(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt()


def begun_alike(parametrized: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return chain(parametrized(nn.Linear(6, 6).double()))


spectral = partial(begun_alike, parametrizations.spectral_norm)
MIXES = "Something in the model mixes samples"
STATISTICS = {
    "parallel101's BatchNorm": Program("BatchNorm", DP, own_batch_norm),
    "statistics of one's own": Program(MIXES, (*PARTS, "pp"), lambda: chain(Function(normalize))),
    "a mean of one's own": Program(
        MIXES, (*PARTS, "pp"), lambda: chain(Function(lambda x: x - x.mean(0)))
    ),
    "a mean, and a loss with a weight": Program(
        MIXES, DP, lambda: chain(Function(lambda x: x - x.mean(0))), sum_and_weight, CLASSES
    ),
    "a running mean": Program("the buffer of '3.mean' differs by", PARTS, lambda: chain(Mean())),
    "a counter of forwards, twice in a step": Program(
        "the buffer of '3.forwards' differs by 1",
        ("alone", "accumulated", "pp"),
        lambda: chain(Counts()),
    ),
    "spectral norm, twice in a step": Program(DIFFERS, ("alone", "accumulated", "pp"), spectral),
    "spectral norm": Program("", SHARES, spectral),
}


# ── what the first samples, a first step or small gradients don't show ──


def hardest(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t, reduction="none").mean(1).topk(min(4, len(y))).values.mean()


def capacity(x: Tensor) -> Tensor:
    """Each of two experts takes max(3, n/2) samples, and what is too much passes by."""
    choice = (x[:, 0] > -9).long()
    place = F.one_hot(choice, 2).cumsum(0).gather(1, choice[:, None])
    return x + x * (place <= max(3, len(x) // 2))


class Carried(nn.Module):
    """It remembers what it saw in its forward before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = 0.0

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


def pairs(y: Tensor, t: Tensor) -> Tensor:
    """Samples 2i and 2i + 1 are to be alike."""
    return F.mse_loss(y, t) + (y[::2] - y[1::2]).square().mean()


class Sample(nn.Module):
    """Draws from the distribution whose mean and deviation it is given."""

    def forward(self, x: Tensor) -> Tensor:
        mean, log = x.chunk(2, -1)
        return mean + log.exp() * torch.randn_like(mean) * self.training


def vae() -> nn.Sequential:
    return model_of(nn.Linear(6, 8), Sample(), nn.Linear(4, 6))


def langevin(optimizer: Coupled, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad += 1e-2 * torch.randn_like(p)


def seeded_alike(trainer: Any) -> None:
    torch.manual_seed(0)


def seeded_apart(trainer: Any) -> None:
    torch.manual_seed(getattr(trainer, "position", 0))


SORTED: Batch = randn(1, 12, 6), torch.tensor([0] * 6 + [5] * 6)
LATE: Batch = randn(1, 12, 6), torch.tensor([1, 2] * 5 + [-100] * 2)
EQUALLY: Batch = ROWS[0], torch.tensor([1, 2, -100, 3, 4, -100])
ONE: Batch = ROWS[0][:1], ROWS[1][:1]
TWELVE: Batch = randn(1, 12, 6), randn(2, 12, 6)


def remembering() -> nn.Sequential:
    """A hook that scales with a mean over the gradients that it has seen."""
    mean = [0.0]

    def hook(g: Tensor) -> Tensor:
        mean[0] = 0.9 * mean[0] + 0.1 * g.abs().mean().item()
        return g * (1 + mean[0])

    return hooked(hook)


CLAMP = partial(hooked, lambda g: g.clamp(-20, 20))
HIDDEN = {
    "class weights, sorted": Program(
        NO_MEAN, PARTS, chain, partial(F.cross_entropy, weight=WEIGHTS), SORTED
    ),
    "ignore_index, late": Program(NO_MEAN, PARTS, chain, F.cross_entropy, LATE),
    "ignore_index, equally often": Program(NO_MEAN, SHARES, chain, F.cross_entropy, EQUALLY),
    "the hardest": Program(NO_MEAN, PARTS, chain, hardest, TWELVE),
    "a capacity": Program(MIXES, PARTS, lambda: chain(Function(capacity)), batch=TWELVE),
    "neighbours": Program(MIXES, PARTS, lambda: chain(Function(lambda x: x + x.roll(1, 0)))),
    "large gradients are clamped": Program(DIFFERS, (*SHARES, "accumulated"), CLAMP),
    "a hook that remembers": Program("differs by", ("dp", "ZeRO-3", "tp"), remembering),
    "a state in an attribute": Program(
        DIFFERS, ("accumulated", "alone", "pp"), lambda: chain(Carried())
    ),
    "ActNorm": Program("", ("tp",), lambda: chain(ActNorm())),
    "ActNorm, of shares": Program(DIFFERS, SHARES, lambda: chain(ActNorm())),
    "a rank without samples": Program(DIFFERS, DP, spectral, batch=ONE),
    "a VAE": Program("", EVERY, vae, random=True, plan={"2": "column_gather"}),
    "a VAE, summed": Program(NO_MEAN, PARTS, vae, partial(F.mse_loss, reduction="sum")),
    "pairs": Program("", SHARES, chain, pairs, (randn(1, 8, 6), randn(2, 8, 6))),
    "pairs, apart": Program(DIFFERS, DP, chain, pairs, ROWS),
    "noise in the optimizer": Program(
        "",
        DP,
        chain,
        optimizer=partial(Coupled, change=langevin),
        prepare=seeded_alike,
        random=True,
    ),
    "noise in the optimizer, unlike": Program(
        NOT_ELEMENTWISE,
        DP,
        chain,
        optimizer=partial(Coupled, change=langevin),
        prepare=seeded_apart,
    ),
    "noise in the optimizer, of pieces": Program(
        NOT_ELEMENTWISE, ZERO, chain, optimizer=partial(Coupled, change=langevin)
    ),
}


# ── what must not be refused ──


class Counts(nn.Module):
    """It counts its forwards, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x


class Lora(nn.Module):
    """A frozen layer, and an adapter that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.Linear(6, 2, bias=False),
            nn.Linear(2, 6, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Dropouts(nn.Module):
    """A module, a function, and that of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.attention = (
            nn.Dropout(0.5),
            nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0] + F.scaled_dot_product_attention(
            x, x, x, dropout_p=0.5 * self.training
        )
        return F.dropout(self.dropout(x), 0.5, self.training)


class InADict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x, "not used": x.sum()}


def tied() -> nn.Sequential:
    model = chain(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[5].weight = model[3].weight
    return model


def frozen() -> nn.Sequential:
    model = chain(nn.Linear(6, 6))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def with_zeros(*modules: nn.Module, name: str) -> nn.Sequential:
    model = chain(*modules)
    for p in model.get_submodule(name).parameters():
        nn.init.zeros_(p)
    return model


def frozen_lora() -> nn.Sequential:
    model = with_zeros(Lora(), name="3.b")
    for entry in (model[0], model[2], model[4]):
        entry.requires_grad_(False)
    return model


def hook_on_a_module() -> nn.Sequential:
    model = chain()
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def outputs_in_a_dict() -> nn.Sequential:
    return seeded(nn.Sequential(*chain(), InADict()))


def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.5, 0.5)


def warm_up(trainer: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: step / 10)


TWO, CLIPPED = {"accumulate": 2}, {"clip_norm": 0.05}
EQUAL = {
    "dropout": Program("", EVERY, lambda: chain(Dropouts()), batch=TIMES, random=True),
    "tied weights": Program("", EVERY, tied),
    "frozen parts": Program("", EVERY, frozen),
    "LoRA": Program("", EVERY, frozen_lora),
    "a head of zeros": Program("", EVERY, lambda: with_zeros(name="3")),
    "parameter groups": Program("", EVERY, chain, optimizer=adamw_by_shape),
    "a warm-up from 0": Program("", EVERY, chain, prepare=warm_up),
    "accumulation": Program("", (*SHARES, "tp", "dp × tp"), chain, options=TWO),
    "uneven shares": Program("", EVERY, chain, batch=FEW),
    "a module's hook": Program("", EVERY, hook_on_a_module),
    "outputs in a dict": Program("", EVERY, outputs_in_a_dict, lambda y, t: F.mse_loss(y["y"], t)),
    "weight norm": Program(
        "", SHARES, lambda: chain(parametrizations.weight_norm(nn.Linear(6, 6)))
    ),
    "a sum and its weight": Program("", EVERY, chain, sum_and_weight, CLASSES),
    "a counter": Program("", (*SHARES, "tp", "dp × tp"), lambda: chain(Counts())),
    "an optimizer's hook": Program(
        "", EVERY, chain, prepare=lambda trainer: trainer.optimizer.register_step_post_hook(clamp)
    ),
    "a norm that is frozen": Program("", EVERY, lambda: chain(nn.BatchNorm1d(6).eval())),
    "clip_norm": Program("", EVERY, chain, options=CLIPPED),
    "compiled": Program(
        "", ("dp", "ZeRO-1"), lambda: torch.compile(chain(nn.Dropout(0.0)), backend="eager")
    ),
}


# ── all of them ──

TABLES = {
    "losses": LOSSES,
    "tensor": TENSOR,
    "time": TIME,
    "pipeline": PIPELINE,
    "optimizers": OPTIMIZERS,
    "statistics": STATISTICS,
    "hidden": HIDDEN,
    "equal": EQUAL,
}


class Precision(NamedTuple):
    dtype: torch.dtype
    autocast: torch.dtype | None
    close: float  # losses of a few steps

    def batch(self, program: Program) -> Batch:
        x, y = (t.to(self.dtype) if t.is_floating_point() else t for t in program.batch)
        return x, y


PRECISIONS = {
    "float64": Precision(torch.float64, None, 1e-10),
    "float32": Precision(torch.float32, None, 1e-5),
    "bfloat16": Precision(torch.bfloat16, None, 0.05),
    "autocast": Precision(torch.float32, torch.bfloat16, 0.05),
}


class Case(NamedTuple):
    table: str
    name: str
    layout: str
    precision: str

    def wrong(self) -> str:
        """On this rank: what is not as the table says."""
        program, precision = TABLES[self.table][self.name], PRECISIONS[self.precision]
        trainer, batch = program.trainer(self.layout, precision), precision.batch(program)
        if program.says:
            return not_refused(trainer, batch, program.says)
        found = [
            trainer.evaluate([batch]),
            *(trainer.step(*trainer.share(batch)) for _ in range(2)),
        ]
        expected = program.one_process(precision)
        if program.random:
            del found[1:], expected[1:]
        return (
            ""
            if found == pytest.approx(expected, rel=precision.close)
            else f"{found}, not {expected}"
        )


def not_refused(trainer: Any, batch: Batch, says: str) -> str:
    before = trainer.state_dict()
    try:
        trainer.step(*trainer.share(batch))
    except p101.NotEqualError as error:
        after = trainer.state_dict()
        changed = [name for name, t in before.items() if not torch.equal(t, after[name])]
        return (
            f"{changed} changed" if changed else "" if says in str(error) else f"it says: {error}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def cases_of(table: str, world_size: int) -> list[Case]:
    """In turn, a program gets one of the meshes that it asks for, and of many layouts every other
    one; and if it must be equal, each of its layouts another precision.
    """
    found = []
    for i, (name, program) in enumerate(TABLES[table].items()):
        meshes = [layout for layout in program.layouts if layout in MESHES]
        chosen = [layout for layout in program.layouts if layout not in MESHES] + meshes[
            i % (len(meshes) or 1) :
        ][:1]
        for k, layout in enumerate(chosen):
            if len(chosen) > 3 and (i + k) % 2:
                continue
            precision = list(PRECISIONS)[(i + k // 2) % 4] if table == "equal" else "float64"
            found += (
                [Case(table, name, layout, precision)] if LAYOUTS[layout][0] == world_size else []
            )
    return found


def wrong_in(cases: list[Case]) -> list[tuple[Case, str]]:
    return [(case, wrong) for case in cases if (wrong := case.wrong())]


@pytest.mark.parametrize("table", TABLES)
def test_it_is_equal_or_refused_with_what_differs(table, capfd):
    for world_size in (1, 2, 4):
        if cases := cases_of(table, world_size):
            run = p101.launch(wrong_in, cases, world_size=world_size, backend="sim")
            assert run.results == [[]] * world_size
    assert "not verified" not in capfd.readouterr().out


# ── the rest ──


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def locked() -> nn.Module:
    model = chain()
    model.lock = threading.Lock()
    return model


def refused_later() -> int:
    """The step that is refused, of batches in which −100 is absent before the fourth."""
    trainer = p101.DataParallelTrainer(chain(), F.cross_entropy, adamw)
    for step in range(4):
        target = torch.tensor([1, 2, 3, 4, 5, -100 if step >= 3 else 0])
        share = trainer.share((randn(step, 6, 6), target))
        if step < 3:
            trainer.step(*share)
            continue
        with pytest.raises(p101.NotEqualError, match=NO_MEAN):
            trainer.step(*share)
        return trainer.steps + 1


def test_a_loss_that_is_no_mean_only_later_is_refused_in_a_later_step():
    assert p101.launch(refused_later, world_size=2, backend="sim").results == [4, 4]


class Late(nn.Module):
    """From its sixth forward on, it mixes samples."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x if self.forwards < 6 else x - x.mean(0)


def test_what_changes_later_is_found_in_as_many_steps():
    def train(steps: int) -> bool:
        trainer = p101.DataParallelTrainer(chain(Late()), F.mse_loss, adamw, verify=steps)
        try:
            return trainer.verify(*trainer.share(ROWS)).equal
        except p101.NotEqualError as error:
            return error.report.wrong[0].step != 6

    found = p101.launch(lambda: [train(3), train(6)], world_size=2, backend="sim").results
    assert found == [[True, False]] * 2


def test_a_hook_that_reads_a_cut_weight_is_refused():
    def train() -> None:
        model = chain()
        model.average = torch.zeros(8, 6, dtype=torch.float64)
        trainer = p101.TensorParallelTrainer(model, F.mse_loss, adamw, plan=PLAN)

        def average(module: nn.Module, *_: object) -> None:
            model.average.lerp_(module.weight.detach(), 0.1)

        model[0].register_forward_hook(average)
        with pytest.raises(p101.NotEqualError, match="a moving average"):
            trainer.step(*ROWS)

    p101.launch(train, world_size=2, backend="sim")


def test_a_model_that_returns_something_else_in_evaluation_is_trained(capfd):
    def train() -> bool:
        model = chain(Function(lambda x: x if model.training else {"boxes": x}))
        model.append(model.pop(3)), model.append(model.pop(3))
        trainer = p101.DataParallelTrainer(model, F.mse_loss, adamw)
        trainer.step(*trainer.share(ROWS))
        return trainer.verify(*trainer.share(ROWS)).equal

    assert p101.launch(train, world_size=2, backend="sim").results == [True, True]
    assert "evaluation isn't compared: in one process it raises" in capfd.readouterr().out


def drifted() -> int:
    """The step that is refused, of an embedding that shortens the rows that its samples use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 6, max_norm=0.1), nn.Linear(6, 6)).double()
    trainer = p101.DataParallelTrainer(model, F.mse_loss, adamw)
    rows = torch.arange(12)
    trainer.step(*trainer.share((rows.repeat(2), randn(2, 24, 6))))  # each rank uses all of them
    with pytest.raises(ValueError, match=r"no longer equal: '0\.weight'"):
        trainer.step(*trainer.share((rows, randn(2, 12, 6))))
    return trainer.steps + 1


def test_copies_that_no_longer_are_equal_are_refused_in_a_later_step():
    assert p101.launch(drifted, world_size=2, backend="sim").results == [2, 2]


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


SINGLE: Batch = ROWS[0].float(), ROWS[1].float()
FAR: Batch = SINGLE[0] + 300, SINGLE[1]
COMPARED: dict[str, tuple[Callable[[], nn.Module], Batch, dict[str, Any]]] = {
    "noise": (lambda: chain(Noise()), TIMES, {}),
    "a lock": (locked, TIMES, {}),
    "a shorter last share": (chain, TIMES, {}),
    "inputs that change in place": (
        lambda: model_of(Function(lambda x: x.mul_(2)), *chain()),
        ROWS,
        {},
    ),
    "an orthogonal matrix": (partial(begun_alike, parametrizations.orthogonal), ROWS, CLIPPED),
    "a gradient": (lambda: chain(Function(with_its_gradient)), ROWS, CLIPPED),
    "complex weights": (lambda: chain(Turned()), ROWS, CLIPPED),
    "autocast inside": (lambda: chain(InBfloat16(6, 6)).float(), SINGLE, {}),
    "a synchronized norm of inputs far from zero": (
        lambda: chain(nn.BatchNorm1d(6)).float(),
        FAR,
        {"sync_batch_norm": True},
    ),
}


def test_verify_finds_it_equal():
    def not_equal() -> list[str]:
        wrong = []
        for name, (build, batch, options) in COMPARED.items():
            trainer = p101.DataParallelTrainer(build(), F.mse_loss, adamw, **options)
            shorter = trainer.position * ("shorter" in name)
            share = [t[:, : t.shape[1] - shorter] for t in trainer.share(batch)]
            for _ in range(2):
                trainer.step(*(t.clone() for t in share))
            wrong += [] if trainer.verify(*(t.clone() for t in share)).equal else [name]
        return wrong

    assert p101.launch(not_equal, world_size=2, backend="sim").results == [[], []]


def test_a_weight_that_needs_a_gradient_is_refused():
    def train() -> None:
        trainer = p101.DataParallelTrainer(
            chain(), lambda y, t: (F.mse_loss(y, t), y.square().sum()), adamw
        )
        with pytest.raises((ValueError, p101.NotEqualError), match="weight of the loss needs a"):
            trainer.step(*trainer.share(ROWS))

    p101.launch(train, world_size=2, backend="sim")


def test_sparse_gradients_are_refused_with_their_name():
    def build() -> nn.Module:
        model = chain(Function(lambda x: x + model[3].table((x[:, 0] > 0).long())))
        model[3].table = nn.Embedding(5, 6, sparse=True).double()
        return model

    def train() -> None:
        for stage in range(4):
            options = {"mesh": Axes(None, {"dp": 2}), "zero_stage": stage}
            trainer = p101.HybridTrainer(build(), F.mse_loss, adamw, **options)
            with pytest.raises(p101.NotEqualError, match=r"of '3\.table\.weight' is sparse"):
                trainer.step(*trainer.share(ROWS))

    p101.launch(train, world_size=2, backend="sim")


def test_rounding_hides_no_loss_that_mixes_samples():
    names = ("root mean square", "relative L2", "InfoNCE", "a sum")
    cases = [Case("losses", n, "dp", p) for n in names for p in ("bfloat16", "autocast")]
    assert p101.launch(wrong_in, cases, world_size=2, backend="sim").results == [[], []]


def test_a_refusal_is_pickled_with_its_report():
    def pickled() -> bytes:
        trainer = LOSSES["a sum"].trainer("dp", PRECISIONS["float64"])
        with pytest.raises(p101.NotEqualError) as refused:
            trainer.step(*trainer.share(ROWS))
        return pickle.dumps(refused.value)

    first, second = map(pickle.loads, p101.launch(pickled, world_size=2, backend="sim").results)
    assert str(first) == str(second)
    assert first.report == second.report
    assert not first.report.equal
    assert first.report.worst.ratio > 1
    assert "not equal to one process" in str(first.report)
    assert first.report.cause in str(first)


def test_verify_needs_the_copy_that_verify_false_leaves_out():
    trainer = p101.DataParallelTrainer(chain(), F.mse_loss, adamw, verify=False)
    with pytest.raises(
        ValueError,
        match=(
            "built with verify=False and keeps no copy of the whole model: build it with "
            "verify=True"
        ),
    ):
        trainer.verify(*ROWS)


def test_it_can_be_asked_for_at_any_time():
    """Of a converged model, and of an optimizer that has learnt something."""

    def ratios() -> list[float]:
        found = []
        with torch.no_grad():
            learnt = ROWS[0], chain()(ROWS[0]) + 1e-10
        for layout in ("dp", "ZeRO-3", "tp", "pp"):
            for batch, optimizer in (
                (learnt, "AdamW"),
                (ROWS, "AdamW"),
                *([(ROWS, "one's own")] if layout == "dp" else []),
            ):
                trainer = Program("", (), chain, optimizer=ELEMENTWISE[optimizer]).trainer(
                    layout, PRECISIONS["float64"]
                )
                share = trainer.share(batch)
                losses = [trainer.step(*share) for _ in range(1 if batch is learnt else 3)]
                assert batch is not learnt or losses[0] < 1e-19
                found.append(trainer.verify(*share).worst.ratio)
        return found

    assert max(p101.launch(ratios, world_size=2, backend="sim").results[0]) <= 1
