"""A small Llama: GPT's blocks with four changes, all in use since Llama 2.

    tokens ─▶ embedding
           ─▶ [ x + attention(norm(x)) ─▶ x + mlp(norm(x)) ] × layers
           ─▶ norm ─▶ head ─▶ logits of the next token

    norm        RMSNorm: x / √(mean x² + ε) · weight. No mean is subtracted, and there is no bias.
    positions   rotary: queries and keys are rotated by angles that grow with the position, so that
                their product depends on their distance. There is no table of positions.
    attention   grouped-query: several heads of queries share one head of keys and values.
    MLP         SwiGLU: down(silu(gate(x)) · up(x)), three matrices instead of two.

No linear layer has a bias, and there is no dropout. Angles are computed where they are used: they
are neither parameters nor buffers, so no trainer has to place them.

Sources: "Llama 2" (arXiv 2307.09288), section 2.2; "The Llama 3 Herd of Models" (2407.21783), 3.2;
Zhang and Sennrich, RMSNorm (1910.07467); Su et al., RoFormer (2104.09864), 3.2.2; Ainslie et al.,
GQA (2305.13245); Shazeer, "GLU Variants Improve Transformer" (2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.models.gpt import AttentionCore, check_sizes, check_text
from parallel101.models.seeding import seed_weights


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama, and how it computes.

    Attributes:
        heads, kv_heads: of queries, and of keys and values: each of these serves heads / kv_heads
            heads of queries.
        hidden: features inside the MLP.
        rope_theta: θ of the rotary positions. Llama 2 has 10,000, Llama 3 has 500,000.
        norm_eps: ε of the norms.
        tied, attention: see `GPTConfig`.
    """

    vocabulary: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 128
    hidden: int = 352
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: str = "fused"

    def __post_init__(self) -> None:
        names = "vocabulary", "context", "layers", "heads", "kv_heads", "width", "hidden"
        check_sizes(self, names)
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} isn't a multiple of 2 · heads={2 * self.heads}: expected an "
                "even number of features for every head, which rotary positions rotate in pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} isn't a multiple of kv_heads={self.kv_heads}: expected as "
                "many heads of queries for every head of keys and values"
            )
        for name in ("rope_theta", "norm_eps"):
            if not isinstance(value := getattr(self, name), int | float) or not value > 0:
                raise ValueError(f"LlamaConfig({name}={value!r}): expected a number above 0")


def rotations(positions: Tensor, features: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return exp(i · position · θ^(−2j / features)) for pair j of a head's features.

    (…, time) whole numbers → (…, 1, time, features / 2) complex ones, whose parts are of `dtype`.
    """
    exponents = torch.arange(0, features, 2, dtype=dtype, device=positions.device) / -features
    angles = positions[..., None, :, None] * theta**exponents
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Multiply features 2j and 2j + 1 of x (…, time, features), taken as one complex number."""
    pairs = torch.view_as_complex(x.to(by.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2).to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions: (batch, time, width) → the same."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_width = config.width // config.heads
        self.rope_theta = config.rope_theta
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.core = AttentionCore(config.attention)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)  # bfloat16 can't count past 256
        by = rotations(positions, self.head_width, self.rope_theta, wide)
        mixed = self.core(rotate(q, by), rotate(k, by), v)  # (batch, heads, time, head_width)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Two linear layers side by side, one of which gates the other, and one back."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """One layer: attention and feed-forward, each with norm and residual connection."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class TokenEmbedding(nn.Module):
    """A vector for each token: (batch, time) whole numbers → (batch, time, width)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.context = config.context

    def forward(self, tokens: Tensor) -> Tensor:
        check_text(tokens, None, self.context)
        return self.token(tokens)


class Llama(nn.Module):
    """A model of (batch, time) token numbers → (batch, time, vocabulary) logits of the next token.

    Args:
        config: see LlamaConfig; `time` is at most config.context, a longer text a ValueError.
        seed, dtype, device: of the weights, as of a GPT's.

    Args of the forward:
        positions: (time,) or (batch, time) whole numbers below config.context: where in the text
            each of these tokens is. Default: 0, 1, 2, … Every block takes them, too, so that a
            trainer that cuts time can tell each stage of a pipeline which positions it has.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.token.weight
        self.to(dtype=dtype, device=device)
        seed_weights(self, seed)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        check_text(tokens, positions, self.config.context)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))

    def sequence(self) -> list[nn.Module]:
        """Return the modules whose composition is the forward: embedding, blocks, norm, head."""
        return [self.embedding, *self.blocks, self.norm, self.head]
