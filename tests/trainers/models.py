"""Models that people bring, small and in float64, and the tasks in which the tests train them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models import LLAMA_PLAN
from parallel101.models.experts import Experts
from parallel101.models.gpt import GPT, GPTConfig, balanced_next_token_loss, next_token_loss
from parallel101.models.llama import Llama, LlamaConfig
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    CUT_HEAD,
    TASKS,
    WITHOUT_HEAD,
    Task,
    gpt,
    randn,
    rows,
    seeded,
    text,
)

TIME = {"sequence_parallel": True}


def dense(seed: int = 0, width: int = 4) -> MLP:
    return MLP([width, width], seed=seed, dtype=torch.float64)


# ── cut along tp ──


class FusedAttention(nn.Module):
    """Twelve heads of two features, their query, key and value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 72), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class ChangesInPlace(nn.Module):
    """In an evaluation it changes its input between two layers that take it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        x = x + 1 if torch.is_grad_enabled() else x.add_(1)
        return self.down(up * self.gate(x))


class Chain(nn.Module):
    """A module of the name `sequence` tells no order."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(7, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 3)
        self.sequence = nn.Sequential(nn.Linear(4, 7), nn.GELU(), *last)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequence(x)


def fused() -> nn.Module:
    middle = FusedAttention(), ChangesInPlace(), nn.LayerNorm(8), FusedAttention()
    return seeded(nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8)))


def with_embedding() -> nn.Module:
    layers = nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6), nn.Linear(6, 13)
    return seeded(nn.Sequential(nn.Embedding(13, 6, padding_idx=4), *layers))


def checkpointed() -> nn.Module:
    """The model itself computes each block again in backward."""
    model = gpt()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def llama(tied: bool = False, **options) -> nn.Module:
    sizes = {"context": 7, "layers": 2, "heads": 8, "kv_heads": 4, "width": 32, "hidden": 20}
    return seeded(Llama(LlamaConfig(13, **{**sizes, **options}, tied=tied)))


def features(step: int) -> tuple[Tensor, Tensor]:
    return randn(step, 5, 6, 8), randn(100 + step, 5, 6, 8)


def ignoring_4(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=4)


FUSED = {"*.qkv": p101.column(parts=3, heads=12), "*.out": "row"}
FUSED |= {"2.up": "column", "2.gate": "column", "2.down": "row"}
CHAIN = {f"sequence.{i}": style for i, style in ((0, "column"), (2, "row"), (3, "column"))}
EMBEDDING = {"0": "vocabulary", "2": "column", "4": "row", "5": "vocabulary"}
LLAMA_BODY = {n: s for n, s in LLAMA_PLAN.items() if s != "vocabulary"}
IGNORING = partial(p101.vocabulary_cross_entropy, ignore_index=4)
TASKS |= {
    "pairs": Task(lambda: seeded(MLP([4, 7, 6, 5, 3])), F.mse_loss, rows(4, 3)),
    "gathered": Task(
        TASKS["mlp"].build, F.mse_loss, rows(4, 3), {"plan": {"layers.*": "column_gather"}}
    ),
    "chain": Task(
        lambda: seeded(Chain()), F.mse_loss, rows(4, 3), {"plan": CHAIN | {"sequence.4": "row"}}
    ),
    "fused": Task(fused, F.mse_loss, features, {"plan": FUSED}),
    "embedding": Task(with_embedding, next_token_loss, text, {**CUT_HEAD, "plan": EMBEDDING}),
    "whole head": Task(partial(gpt, tied=False), next_token_loss, text, {"plan": WITHOUT_HEAD}),
    "ignored targets": Task(gpt, ignoring_4, text, {"loss_fn": IGNORING}),
    "checkpointed": Task(checkpointed, next_token_loss, text, CUT_HEAD),
    "llama": Task(llama, next_token_loss, text, CUT_HEAD),
    "tied llama": Task(partial(llama, tied=True), next_token_loss, text, CUT_HEAD),
    "llama, whole head": Task(llama, next_token_loss, text, {"plan": LLAMA_BODY}),
}

# ── cut along pp ──


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = dense(7)
        self.register_buffer("factor", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def activated() -> nn.Module:
    tail = nn.ReLU(), dense(2), dense(3), nn.Tanh(), Scaled()
    return nn.Sequential(dense(0), nn.Tanh(), nn.LeakyReLU(0.1), dense(1), *tail)


def in_place(model: nn.Module) -> None:
    """One process could not do that: tanh needs its output in backward."""
    model[2].inplace = model[4].inplace = True


def frozen(number: int) -> nn.Module:
    model = activated()
    model[number].requires_grad_(False)
    return model


DEEP = partial(MLP, [4, 7, 5, 6, 5, 7, 5, 6, 3], dtype=torch.float64)
TASKS |= {
    "deep": Task(DEEP, F.mse_loss, rows(4, 3)),
    "activated": Task(activated, F.mse_loss, rows(4, 4)),
    **{f"{i} frozen": Task(partial(frozen, i), F.mse_loss, rows(4, 4)) for i in (0, 3, 8)},
}

# ── experts ──


def mixture(experts: int = 4, **options) -> nn.Module:
    sizes = {"vocabulary": 13, "context": 7, "layers": 2, "heads": 4, "width": 8}
    return seeded(GPT(GPTConfig(**sizes, experts=experts, **options)))


class Loop(nn.Module):
    """As in Mixtral: a loop over the experts that have rows. Without rows the result has no graph,
    and an expert without rows has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 4, 4))

    def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert, weight in enumerate(self.weight):
            chosen = (choice == expert).nonzero()[:, 0]
            if len(chosen):
                out = out.index_add(0, chosen, rows[chosen] @ weight)
        return out


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Loop()

    def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
        return self.experts(rows, choice)


class OwnExperts(nn.Module):
    """Some samples take a way of their own behind the experts; `value` is ignored by the loss."""

    def __init__(self, experts) -> None:
        super().__init__()
        self.first, self.experts, self.value = nn.Linear(4, 4), experts(), nn.Linear(4, 1)
        self.out, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        special, h = (x[:, 0] > 0).nonzero()[:, 0], self.first(x)
        h = h + self.experts(h, (x[:, 1] > 0).long())
        y = self.out(h)
        if len(special):
            y = y.index_add(0, special, self.sometimes(h[special]))
        return y, self.value(h)


def for_experts(step: int) -> tuple[Tensor, Tensor]:
    """In step 1 all rows are for expert 0, and only the first rank's samples are special."""
    x = randn(step, 11, 4)
    x[:, 0] = -1
    x[1, 0] = 1
    if step == 1:
        x[:, 1] = -1
    return x, randn(100 + step, 11, 2)


def first_output(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], targets)


def one_sample(step: int) -> tuple[Tensor, Tensor]:
    """So all ranks but one have none, and still compute for the others."""
    tokens, targets = text(step)
    return tokens[:1], targets[:1]


BALANCED = partial(balanced_next_token_loss, weight=0.5)
UNBALANCED = partial(balanced_next_token_loss, weight=0.0)  # so that time may be cut
FIVE = partial(mixture, 5, top_k=1)  # which two ranks can't share evenly
HEADS = dict.fromkeys(("*.query", "*.key", "*.value"), p101.column(heads=4))
PLAN = {"plan": {**HEADS, "*.out": "row", "*.mlp.experts": "experts"}}
OWN = {"loop": Loop, "nested": Nested, "stacked": partial(Experts, 2, 4, 5)}
TASKS |= {
    "dropping": Task(partial(mixture, capacity=1.0), BALANCED, text, PLAN),
    "five": Task(FIVE, BALANCED, text),
    "one sample": Task(FIVE, BALANCED, one_sample),
    "unbalanced": Task(mixture, UNBALANCED, text, PLAN),
    **{
        name: Task(lambda kind=kind: seeded(OwnExperts(kind)), first_output, for_experts)
        for name, kind in OWN.items()
    },
}

# ── models that aren't a row of layers ──


class Layers(nn.Module):
    """Layers a, b and c; c is layer a, and b's matrix a's too, under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = dense(1), dense(2)
        self.c = self.a
        self.b.layers[0].weight = self.a.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class OutOfOrder(Layers):
    """Layers that run in another order than they were made, one of them again in backward; a
    frozen layer and a frozen bias; buffers that nobody changes, that every forward changes alike,
    and that no checkpoint keeps; outputs in a dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.frozen, self.c = nn.Parameter(randn(5, 4)), dense(4), dense(3)
        self.frozen.requires_grad_(False)
        self.b.layers[0].bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64).eval()
        self.register_buffer("factor", torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("ones", torch.ones(4, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count += 1
        x = torch.tanh(self.frozen(torch.tanh(self.c(x * self.scale * self.factor))))
        x = checkpoint(lambda x: torch.tanh(self.b(x)), x, use_reentrant=False)
        return {"y": self.norm(self.a(x)) * self.ones, "not used": x.sum()}


class Unordered(Layers):
    """Weights that lie column by column, in a list without forward, in complex numbers, without
    elements, without dims, and in an LSTM, which uses them at every step of a sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 4, batch_first=True, dtype=torch.float64)
        self.columns = nn.Parameter(randn(5, 4, 4).t())
        self.listed = nn.ParameterList([randn(6, 4, 4), randn(7, 4, 4)])
        self.turned = nn.Parameter(torch.complex(randn(8, 4, 4), randn(9, 4, 4)))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.one = nn.Parameter(randn(9, 1)[0])

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.columns, *self.listed):
            x = torch.tanh(x @ weight)
        x = (x.to(torch.complex128) @ self.turned).abs()
        x = self.lstm(torch.stack([x, x * x], dim=1))[0][:, -1]
        return super().forward(x) * self.one + self.nothing.sum()


class Skipped(nn.Linear):
    """A layer that in every other forward returns its input as it is."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x if self.count % 2 else x + super().forward(x)


def skipping() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)
    return nn.Sequential(*first, Skipped(), nn.Linear(4, 5)).double()


class WithReLU(nn.BatchNorm1d):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Norms(nn.Module):
    """BatchNorms of images, sequences, volumes and features: with a mean over all batches, with
    statistics of the batch only, without weights, frozen, of a subclass, and computed again.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        image = nn.BatchNorm2d(3, momentum=None), nn.ReLU(), nn.Flatten()
        self.image = nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), *image)
        sequence = nn.Unflatten(1, (3, 4)), nn.BatchNorm1d(3, affine=False), nn.Tanh()
        volume = nn.Unflatten(2, (1, 2, 2)), nn.BatchNorm3d(3), nn.Flatten()
        self.shapes = nn.Sequential(*sequence, *volume, nn.BatchNorm1d(12).eval(), nn.Tanh())
        batch = nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh()
        rest = nn.Linear(5, 4, bias=False), WithReLU(4), nn.Linear(4, 2)
        self.rest = nn.Sequential(nn.Linear(12, 5, bias=False), *batch, *rest)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.shapes(checkpoint(self.image, x, use_reentrant=False)))


def norms_in_order() -> nn.Module:
    norms = Norms()
    return nn.Sequential(*norms.image, *norms.shapes, *norms.rest)


def images(step: int) -> tuple[Tensor, Tensor]:
    """In step 2 as many as three ranks, of which each has one sample: torch's own norm refuses
    one value per channel.
    """
    samples = 3 if step == 2 else 7
    return randn(step, samples, 2, 3, 3), randn(100 + step, samples, 2)


def few(step: int) -> tuple[Tensor, Tensor]:
    """Fewer samples than four ranks."""
    samples = (6, 1, 3)[step]
    return randn(step, samples, 4), randn(100 + step, samples, 5)


def words(step: int) -> tuple[Tensor, Tensor]:
    """Targets of which different ranks count differently many, and one rank none."""
    targets = torch.randint(5, (9,), generator=torch.Generator().manual_seed(step))
    targets[step : step + 3] = -100
    return randn(step, 9, 4), targets


def sum_and_weight(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


FOUR = partial(MLP, [4, 8, 6, 6, 5], dtype=torch.float64)
SYNC = {"sync_batch_norm": True}
GATHERED = {"plan": {"rest.0": "column_gather"}}
TASKS |= {
    "tied": Task(Layers, F.mse_loss, rows(4, 4)),
    "unordered": Task(Unordered, F.mse_loss, rows(4, 4)),
    "out of order": Task(OutOfOrder, lambda y, t: F.mse_loss(y["y"], t), rows(4, 4)),
    "skipped": Task(skipping, F.mse_loss, rows(4, 5)),
    "norms": Task(Norms, F.mse_loss, images, GATHERED, SYNC),
    "norms in order": Task(norms_in_order, F.mse_loss, images, {}, SYNC),
    "few": Task(FOUR, F.mse_loss, few),
    # one process has torch's own mean
    "weighted": Task(FOUR, F.cross_entropy, words, {}, {"loss_fn": sum_and_weight}),
}
