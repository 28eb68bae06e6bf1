"""A small GPT: embeddings, blocks of attention and MLP with their norms, and an output layer.

    tokens ─▶ embedding + position
           ─▶ [ x + attention(norm(x)) ─▶ x + mlp(norm(x)) ] × layers      + dropout, if any
           ─▶ norm ─▶ head ─▶ logits of the next token

The output layer is called the head, which is unrelated to attention heads.

With experts, each MLP is a mixture of experts, see experts.py. Its balancing loss travels with the
activations, as one more feature of every position: so each module takes one tensor and returns one,
and a pipeline can send it on.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.models.experts import MixtureOfExperts, check_routing
from parallel101.models.seeding import seed_weights


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT, and how it computes.

    Attributes:
        tied: the head and the embedding share one matrix.
        dropout: the part of the activations that is dropped in training: of the embedding, of what
            attention and MLP add to x, and of the attention weights.
        attention: "fused": one operation of torch's, which keeps no (time, time) matrix (with
            dropout on a CPU, torch's keeps them, too). "unfused": one operation after the other, as
            in a textbook, which keeps several.
        experts: of each block's mixture of experts; 0: an MLP instead. Then the model returns two
            tensors, see GPT.
        top_k, capacity: which of the experts a token uses; see MixtureOfExperts.
    """

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = True
    dropout: float = 0.0
    attention: str = "fused"
    experts: int = 0
    top_k: int = 2
    capacity: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, ("vocabulary", "context", "layers", "heads", "width"))
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} isn't a multiple of heads={self.heads}: expected as many "
                "features for every head"
            )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"GPTConfig(dropout={self.dropout!r}): expected the part that is dropped, 0 or "
                "more and below 1"
            )
        if not isinstance(self.experts, int) or self.experts < 0:
            raise ValueError(
                f"GPTConfig(experts={self.experts!r}): expected a whole number, 0 for none"
            )
        if self.experts:
            check_routing(self.experts, self.top_k, self.capacity)


class AttentionCore(nn.Module):
    """softmax(Q Kᵀ / √d) V, in which each position attends to itself and those before it.

    Queries (batch, heads, time, d), keys and values (batch, kv heads, time, d) → a tensor like the
    queries. Each head of keys and values serves heads / kv heads of queries, which are neighbours:
    the GPT has one for each. This module has no parameters.

    Args:
        kind: "fused" or "unfused"; see `GPTConfig`, attention.
        dropout: the part of the attention weights that is dropped in training.
    """

    def __init__(self, kind: str, dropout: float = 0.0):
        super().__init__()
        self.fused, self.dropout = kind == "fused", nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = q.shape[1] // k.shape[1]
        if self.fused:
            dropped = self.dropout.p if self.training else 0.0
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropped, is_causal=True, enable_gqa=each > 1
            )
        if each > 1:
            k, v = (x.repeat_interleave(each, 1) for x in (k, v))
        time, d = q.shape[-2:]
        scores = (q * d**-0.5) @ k.transpose(-2, -1)
        later = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.dropout(weights) @ v


class Attention(nn.Module):
    """Causal self-attention, in which each position attends to those before it.

    (batch, time, width) → the same shape.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        # a key's bias would add the same number to all scores of a query, which softmax ignores
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width)
        self.core = AttentionCore(config.attention, config.dropout)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = self.core(q, k, v)  # (batch, heads, time, head_width)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """A linear layer to four times the width, GELU, and a linear layer back.

    It acts on each position alone.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One layer of the GPT: attention and feed-forward, each with norm and residual connection."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class BlockOfExperts(Block):
    """A layer with a mixture of experts: (batch, time, width + 1) → the same shape.

    The last feature is the sum of the balancing losses of this layer and those before it.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mlp = MixtureOfExperts(  # type: ignore[assignment]  # in the place of the MLP
            config.width, 4 * config.width, config.experts, config.top_k, config.capacity
        )

    def forward(self, x: Tensor) -> Tensor:
        x, balance = x[..., :-1], x[..., -1:]
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y, more = self.mlp(self.mlp_norm(x))
        return torch.cat([x + self.dropout(y), balance + more], -1)


class NormBesideBalance(nn.LayerNorm):
    """A LayerNorm of all features but the last."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x[..., :-1]), x[..., -1:]], -1)


class HeadBesideBalance(nn.Linear):
    """A linear layer of all features but the last, and beside it the last: (batch, time)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x[..., :-1]), x[..., -1]


class Embedding(nn.Module):
    """The sum of a token's vector and its position's.

    (batch, time) whole numbers → (batch, time, width); with experts one more feature, which is 0.

    Args of the forward:
        positions: (time,) or (batch, time) whole numbers below config.context: where in the text
            each of these tokens is. Default: 0, 1, 2, …
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.context, self.experts = config.context, config.experts

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        check_text(tokens, positions, self.context)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        return F.pad(x, (0, 1)) if self.experts else x


class GPT(nn.Module):
    """A model of (batch, time) token numbers → (batch, time, vocabulary) logits of the next token.

    With experts it returns (logits, balance): balance (batch, time) is what each position adds to
    the balancing loss of all layers, and balanced_next_token_loss takes both.

    Args:
        config: see GPTConfig; `time` is at most config.context, a longer text a ValueError.
        seed: of the weights; see seeding.py.
        dtype, device: of the weights. Default: torch's.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        block, norm, head = Block, nn.LayerNorm, nn.Linear
        if config.experts:
            block, norm, head = BlockOfExperts, NormBesideBalance, HeadBesideBalance
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = norm(config.width)
        self.head = head(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.token.weight
        self.to(dtype=dtype, device=device)
        seed_weights(self, seed)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embedding(tokens, positions)
        for module in self.sequence()[1:]:
            x = module(x)
        return x

    def sequence(self) -> list[nn.Module]:
        """Return the modules whose composition is the forward: embedding, blocks, norm, head."""
        return [self.embedding, *self.blocks, self.norm, self.head]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token.

    Args:
        logits: (batch, time, vocabulary).
        targets: (batch, time) token numbers.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def balanced_next_token_loss(
    outputs: tuple[Tensor, Tensor], targets: Tensor, *, weight: float = 0.01
) -> Tensor:
    """Return the loss of a GPT with experts: `next_token_loss` + weight · the mean of balance.

    Args:
        outputs: logits and balance, as the model returns them.
        targets: (batch, time) token numbers.
        weight: of the balance. 0.01 is that of Switch Transformers, section 2.2.
    """
    logits, balance = outputs
    return next_token_loss(logits, targets) + weight * balance.mean()


def check_sizes(config: Any, names: Sequence[str]) -> None:
    """Raise ValueError unless these attributes are sizes, and `attention` is a kind of it."""
    what = type(config).__name__
    for name in names:
        if not isinstance(value := getattr(config, name), int) or value < 1:
            raise ValueError(f"{what}({name}={value!r}): expected a whole number, 1 or more")
    if config.attention not in ("fused", "unfused"):
        raise ValueError(f'{what}(attention={config.attention!r}): expected "fused" or "unfused"')


def check_text(tokens: Tensor, positions: Tensor | None, context: int) -> None:
    """Raise ValueError unless each token has a position in the context."""
    shape = tuple(tokens.shape)
    if tokens.dim() != 2 or (positions is None and shape[1] > context):
        raise ValueError(
            f"tokens of shape {shape}: expected (batch, time), of time at most context={context}"
        )
    if positions is None:
        return
    if positions.shape not in (shape, shape[1:]):
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} for tokens of shape {shape}: expected "
            "(time,) or (batch, time), a position for each token"
        )
    if positions.is_meta or not positions.numel():
        return
    if not 0 <= positions.min() <= positions.max() < context:
        raise ValueError(
            f"positions from {positions.min()} to {positions.max()}: expected 0 to {context - 1}, "
            f"because context={context}"
        )
