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

Sources: Touvron et al., "Llama 2" (arXiv 2307.09288), section 2.2; "The Llama 3 Herd of Models"
(2407.21783), section 3.2; Zhang and Sennrich, "Root Mean Square Layer Normalization" (1910.07467);
Su et al., "RoFormer" (2104.09864), section 3.2.2; Ainslie et al., "GQA" (2305.13245); Shazeer,
"GLU Variants Improve Transformer" (2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.models.gpt import AttentionCore, check_text
from parallel101.models.seeding import seed_weights


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama, and how it computes.

    Attributes:
        heads, kv_heads: of queries, and of keys and values: each of these serves heads / kv_heads
            heads of queries.
        hidden: features inside the MLP.
        tied: the head and the embedding share one matrix.
        rope_theta: θ of the rotary positions. Llama 2 has 10,000, Llama 3 has 500,000.
        norm_eps: ε of the norms.
        attention: "fused" or "unfused"; see `GPTConfig`.
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
        for name in ("vocabulary", "context", "layers", "heads", "kv_heads", "width", "hidden"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(
                    f"LlamaConfig({name}={value!r}): expected a whole number, 1 or more"
                )
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
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f'LlamaConfig(attention={self.attention!r}): expected "fused" or "unfused"'
            )


def rotations(positions: Tensor, features: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return exp(i · position · θ^(−2j / features)) for pair j of a head's features.

    Complex numbers of absolute value 1: (time,) → (1, time, features / 2), and (batch, time) →
    (batch, 1, time, features / 2). Their real and imaginary parts are of `dtype`.
    """
    exponents = torch.arange(0, features, 2, dtype=dtype, device=positions.device) / -features
    angles = positions[..., None, :, None] * theta**exponents
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Rotate features 2j and 2j + 1 of each head, as the parts of a complex number.

    x is (batch, heads, time, features), `by` as `rotations` returns it.
    """
    pairs = torch.view_as_complex(x.to(by.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    (batch, time, width) → the same shape. For `positions` see `Llama`.
    """

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


class FeedForward(nn.Module):
    """SwiGLU: two linear layers side by side, one of which gates the other, and one back.

    It acts on each position alone.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each with norm and residual connection."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
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
        seed: of the weights; see seeding.py.
        dtype, device: of the weights. Default: torch's.

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
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
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
