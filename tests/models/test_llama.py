"""The Llama computes what the formulas of its papers say, written down here one number at a time.

What is rotated is compared with the rotation matrices of RoFormer, where the model multiplies
complex numbers, as in Meta's code.
"""

from __future__ import annotations

import math

import pytest
import torch

from parallel101.models.llama import Llama, LlamaConfig, rotate, rotations

SIZES = {"vocabulary": 17, "context": 8, "layers": 2, "heads": 4, "width": 24, "hidden": 10}
TOKENS = torch.arange(14).view(2, 7) * 5 % 17


def llama(kv_heads=2, **options):
    """In float64; no weight of a norm is 1."""
    model = Llama(LlamaConfig(**{**SIZES, "kv_heads": kv_heads, **options}), dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.copy_(torch.linspace(0.5, 1.5, len(p)))
    return model


def rotation_matrix(position, d, theta):
    """RoFormer, section 3.2.2: each pair of features is rotated by its own angle."""
    matrix = torch.zeros(d, d, dtype=torch.float64)
    for j in range(d // 2):
        angle = position * theta ** (-2 * j / d)
        matrix[2 * j, 2 * j] = matrix[2 * j + 1, 2 * j + 1] = math.cos(angle)
        matrix[2 * j + 1, 2 * j] = math.sin(angle)
        matrix[2 * j, 2 * j + 1] = -math.sin(angle)
    return matrix


def rms_norm(x, norm, eps):
    """Of one position."""
    return x / math.sqrt(sum(value**2 for value in x.tolist()) / len(x) + eps) * norm.weight


def by_the_formulas(model, tokens, positions):
    """The logits of one sequence."""
    config = model.config
    d, each = config.width // config.heads, config.heads // config.kv_heads
    x = [model.embedding.token.weight[token] for token in tokens]
    for block in model.blocks:
        a, mlp = block.attention, block.mlp
        normed = [rms_norm(row, block.attention_norm, config.norm_eps) for row in x]
        turns = [rotation_matrix(p, d, config.rope_theta) for p in positions]
        q, k, v = (
            [(layer.weight @ row).view(-1, d) for row in normed]
            for layer in (a.query, a.key, a.value)
        )
        for t, row in enumerate(x):
            heads = []
            for h in range(config.heads):
                g = h // each  # the head of keys and values that this head of queries uses
                scores = [
                    (turns[t] @ q[t][h]) @ (turns[s] @ k[s][g]) / math.sqrt(d) for s in range(t + 1)
                ]
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(weight * v[s][g] for s, weight in enumerate(weights)))
            x[t] = row + a.out.weight @ torch.cat(heads)
        for t, row in enumerate(x):
            y = rms_norm(row, block.mlp_norm, config.norm_eps)
            gate = mlp.gate.weight @ y  # SiLU(x) is x · sigmoid(x)
            x[t] = row + mlp.down.weight @ (gate * gate.sigmoid() * (mlp.up.weight @ y))
    return torch.stack([model.head.weight @ rms_norm(r, model.norm, config.norm_eps) for r in x])


@pytest.mark.parametrize("attention", ["fused", "unfused"])
@pytest.mark.parametrize(
    ("kv_heads", "options"),
    [(1, {}), (2, {"tied": True, "rope_theta": 500.0}), (4, {"norm_eps": 0.1})],
    ids=["one head of keys", "tied", "as many heads of keys"],
)
def test_it_is_its_formulas(kv_heads, options, attention):
    model = llama(kv_heads, attention=attention, **options)
    order, later = torch.tensor([0, 1, 4, 5, 7, 2, 3]), torch.arange(1, 8)
    for positions in (None, order, torch.stack([order, later])):
        logits = model(TOKENS, positions)
        numbers = torch.arange(7) if positions is None else positions
        for found, tokens, row in zip(logits, TOKENS, numbers.expand(2, 7).tolist()):
            expected = by_the_formulas(model, tokens, row)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert (model.head.weight is model.embedding.token.weight) == options.get("tied", False)


def test_neighbouring_positions_differ_in_bfloat16_which_cannot_count_them():
    positions = torch.tensor([1000, 1001])
    assert len(positions.bfloat16().unique()) == 1
    x = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
    rotated = rotate(x, rotations(positions, 8, 10_000.0, torch.float32))
    assert rotated.dtype == torch.bfloat16
    assert not torch.equal(rotated[..., 0, :], rotated[..., 1, :])
    exact = rotate(x.double(), rotations(positions, 8, 10_000.0, torch.float64))
    torch.testing.assert_close(rotated.double(), exact, rtol=0, atol=0.01)


def test_a_llama_has_no_biases_and_no_table_of_positions():
    parameters = dict(llama(kv_heads=1).named_parameters())
    assert not any("bias" in name or "position" in name for name in parameters)
    assert not list(llama().buffers())
    h, k, f = 24, 6, 10  # width, features of all keys, hidden
    block = 2 * h * h + 2 * h * k + 3 * h * f + 2 * h
    assert sum(p.numel() for p in parameters.values()) == 2 * block + 2 * 17 * h + h
