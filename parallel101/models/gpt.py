"""A small GPT: embeddings, blocks of attention and MLP with their norms, and an output layer.

    tokens ─▶ embedding + position
           ─▶ [ x + attention(norm(x)) ─▶ x + mlp(norm(x)) ] × layers      + dropout, if any
           ─▶ norm ─▶ head ─▶ logits of the next token

The output layer is called the head, which is unrelated to attention heads.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    """

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = True
    dropout: float = 0.0
    attention: str = "fused"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"GPTConfig({name}={value!r}): expected a whole number, 1 or more")
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
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f'GPTConfig(attention={self.attention!r}): expected "fused" or "unfused"'
            )


class AttentionCore(nn.Module):
    """softmax(Q Kᵀ / √d) V, in which each position attends to itself and those before it.

    Queries, keys and values (batch, heads, time, d) → the same shape. It has no parameters.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fused, self.dropout = config.attention == "fused", nn.Dropout(config.dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            dropped = self.dropout.p if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
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
        self.core = AttentionCore(config)
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


class Embedding(nn.Module):
    """The sum of a token's vector and its position's.

    (batch, time) whole numbers → (batch, time, width).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GPT(nn.Module):
    """A model of (batch, time) token numbers → (batch, time, vocabulary) logits of the next token.

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
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.token.weight
        self.to(dtype=dtype, device=device)
        seed_weights(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.config.context:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: expected (batch, time), of time at "
                f"most context={self.config.context}"
            )
        x = tokens
        for module in self.sequence():
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
