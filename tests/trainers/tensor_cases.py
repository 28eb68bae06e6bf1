"""What the tests of tensor parallelism share: models in float64, one forward and backward of
each, whole and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN
from parallel101.models.seeding import initial_weight
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.plan import resolve


class FusedAttention(nn.Module):
    """Twelve heads of two features, their query, key and value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 72), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 2)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


def seeded(model: nn.Module) -> nn.Module:
    """In float64; every number of every parameter differs from the others, biases and norms too."""
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                initial_weight(name + " matrix", (1, *p.shape))[0] * (1 if p.dim() > 1 else 0.3)
            ).add_(0 if p.dim() > 1 else 0.5)
    return model


def randn(salt: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def tokens(salt: int, time: int) -> Tensor:
    return torch.randint(13, (3, time), generator=torch.Generator().manual_seed(salt))


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    plan: Any
    loss_fn: Callable[..., Tensor]  # of the model that is cut
    inputs: Tensor
    targets: Tensor
    whole_loss: Callable[[Tensor, Tensor], Tensor]


def gpt(tied: bool = True, heads: int = 12) -> GPT:
    return GPT(GPTConfig(vocabulary=13, context=7, layers=2, heads=heads, width=24, tied=tied))


CHAIN = {"0": "column", "2": "row", "3": "column", "4": "row"}
TEXT = tokens(1, 5), tokens(2, 5)
CUT_HEAD = (p101.vocabulary_cross_entropy, *TEXT, next_token_loss)
WHOLE_HEAD = (next_token_loss, *TEXT, next_token_loss)
WITHOUT_HEAD = {name: style for name, style in GPT_PLAN.items() if style != "vocabulary"}
ROWS = (F.mse_loss, randn(1, 6, 4), randn(2, 6, 3), F.mse_loss)
TIMES = (F.mse_loss, randn(1, 3, 5, 4), randn(2, 3, 5, 3), F.mse_loss)
FEATURES = (F.mse_loss, randn(1, 3, 5, 8), randn(2, 3, 5, 8), F.mse_loss)


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 3)
    )


def fused() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), FusedAttention(), nn.LayerNorm(8), FusedAttention(), nn.Linear(8, 8)
    )


def with_embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(13, 6, padding_idx=4),
        nn.LayerNorm(6),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 6),
        nn.Linear(6, 13),
    )


FUSED_PLAN = {"*.qkv": p101.column(parts=3, heads=12), "*.out": "row"}
CASES = {
    "chain": Case(chain, CHAIN, *ROWS),
    "mlp, auto": Case(lambda: MLP([4, 7, 6, 5, 3]), "auto", *ROWS),
    "mlp, last layer alone": Case(lambda: MLP([4, 7, 6, 3]), "auto", *ROWS),
    "lecture": Case(lambda: MLP([4, 7, 3]), {"layers.*": "column_gather"}, *ROWS),
    "gpt, tied": Case(gpt, GPT_PLAN, *CUT_HEAD),
    "gpt, auto": Case(lambda: gpt(tied=False), "auto", *CUT_HEAD),
    "gpt, whole head": Case(gpt, WITHOUT_HEAD, *WHOLE_HEAD),
    "fused": Case(fused, FUSED_PLAN, *FEATURES),
    "embedding": Case(
        with_embedding, {"0": "vocabulary", "2": "column", "4": "row", "5": "vocabulary"}, *CUT_HEAD
    ),
}
IN_TIME = {
    "chain": Case(chain, CHAIN, *TIMES),
    "mlp, last layer alone": Case(lambda: MLP([4, 7, 6, 3]), "auto", *TIMES),
    **{
        name: CASES[name]
        for name in ("gpt, tied", "gpt, auto", "gpt, whole head", "fused", "embedding")
    },
}


class Outcome(NamedTuple):
    loss: float
    inputs: Tensor | None  # gradient of the inputs, where they have one
    gradients: dict[str, Tensor]


def one_backward(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Tensor, targets: Tensor
) -> Outcome:
    inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return Outcome(loss.item(), inputs.grad, {name: p.grad for name, p in model.named_parameters()})


def whole(case: Case) -> Outcome:
    return one_backward(seeded(case.build()), case.whole_loss, case.inputs, case.targets)


def cut(
    case: Case,
    sequence_parallel: bool = False,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    algorithm: Mapping[str, str] | None = None,
) -> Outcome:
    """On one rank, with its blocks of the gradients."""
    model, n = seeded(case.build()), dist.get_world_size()
    resolved = resolve(case.plan, model, case.loss_fn, n, sequence_parallel, algorithm)
    resolved.apply(model, None)
    prepare(model)
    with p101.span("forward and backward"):
        found = one_backward(model, case.loss_fn, case.inputs, case.targets)
    for name in sorted(resolved.partial):
        found.gradients[name] = p101.all_reduce(found.gradients[name])
    return found


def joined(blocks: list[Tensor], shard: Shard | None) -> Tensor:
    """The whole of what is cut; of what is not, the ranks' common value."""
    if shard is None:
        assert all(torch.equal(block, blocks[0]) for block in blocks), "replicated values differ"
        return blocks[0]
    parts = [block.chunk(shard.parts, shard.dim) for block in blocks]
    return torch.cat([part[i] for i in range(shard.parts) for part in parts], shard.dim)


def differences(case: Case, results: list[Outcome], close: float = 1e-10) -> list[str]:
    """Where the ranks together differ from one process."""
    expected = whole(case)
    placements = resolve(case.plan, seeded(case.build()), case.loss_fn, len(results)).placements
    found: Mapping[str, Tensor] = {
        name: joined([result.gradients[name] for result in results], placements.get(name))
        for name in expected.gradients
    }
    wrong = [
        f"loss {r.loss}, not {expected.loss}"
        for r in results
        if abs(r.loss - expected.loss) > close * abs(expected.loss)
    ]
    wrong += [
        name
        for name, g in expected.gradients.items()
        if not (found[name] - g).norm() <= close * g.norm()
    ]
    if expected.inputs is not None:
        wrong += [
            f"inputs on rank {i}"
            for i, r in enumerate(results)
            if not (r.inputs - expected.inputs).norm() <= close * expected.inputs.norm()
        ]
    return wrong
