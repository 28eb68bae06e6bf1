"""A small GPT: embeddings, blocks of attention and MLP with their norms, and a head that names the
next token.

    tokens ─▶ embedding + position ─▶ [ x + attention(norm(x)) ─▶ x + mlp(norm(x)) ] × layers ─▶ norm ─▶ head ─▶ logits

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
    """What there is to choose. `tied`: the head's matrix is the embedding's."""

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"GPTConfig({name}={value!r}): expected a whole number, 1 or more")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is no multiple of heads={self.heads}: expected as many "
                "features for every head"
            )


class Attention(nn.Module):
    """Causal self-attention: each head mixes what came before. (batch, time, width) → the same."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        #  a key's bias would add the same to all scores of a query, and softmax is blind to that
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        # (batch, heads, time, head_width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Four times as wide, GELU, and back: each position on its own."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """What a token is, and where it stands. (batch, time) whole numbers → (batch, time, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


class GPT(nn.Module):
    """(batch, time) token numbers → (batch, time, vocabulary) logits of the token that comes next.

    Args:
        config: see GPTConfig; `time` is at most config.context, a longer text a ValueError.
        seed: of the weights; see seeding.py.
        dtype, device: of the weights, torch's defaults unless said.
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
        """The modules whose composition is the forward, in order: the embedding, every block,
        the norm, the head.
        """
        return [self.embedding, *self.blocks, self.norm, self.head]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token: logits (batch, time, vocabulary), targets (batch,
    time).
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
