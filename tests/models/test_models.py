"""The models do what they say, and have the same weights however they are built, whole or in
parts.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from parallel101.models.gpt import GPT, Block, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.seeding import initial_weight, seed_weights

SMALL = GPTConfig(vocabulary=17, context=8, layers=2, heads=2, width=12)


def test_an_mlp_is_its_layers_with_gelu_between_them():
    mlp = MLP([3, 5, 5, 2], dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    a, b, c = mlp.layers
    torch.testing.assert_close(mlp(x), c(F.gelu(b(F.gelu(a(x))))))
    assert (
        sum(p.numel() for p in MLP([1024] * 3, bias=False, device="meta").parameters())
        == 2 * 1024**2
    )
    with pytest.raises(ValueError, match="two sizes or more"):
        MLP([3])


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_sees_what_came_before_and_nothing_else(tied):
    gpt = GPT(GPTConfig(17, 8, 2, 2, 12, tied=tied), dtype=torch.float64)
    tokens = torch.arange(16).view(2, 8) % 17
    logits = gpt(tokens)
    assert logits.shape == (2, 8, 17)
    changed = tokens.clone()
    changed[:, 5] = 16
    same = torch.isclose(gpt(changed), logits, rtol=0, atol=1e-12).all(dim=-1).all(dim=0)
    assert same.tolist() == [True] * 5 + [False] * 3
    assert (gpt.head.weight is gpt.embedding.token.weight) == tied
    assert ("head.weight" in dict(gpt.named_parameters())) == (not tied)
    assert gpt(tokens[:, :3]).shape == (2, 3, 17), "a shorter text will do"


def test_the_loss_is_the_mean_over_samples_so_that_shares_weighted_by_count_add_up():
    gpt, tokens = GPT(SMALL, dtype=torch.float64), torch.randint(17, (5, 8))
    whole = next_token_loss(gpt(tokens), tokens)
    parts = sum(next_token_loss(gpt(part), part) * len(part) / 5 for part in tokens.split([2, 3]))
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)
    start = next_token_loss(gpt(tokens), torch.randint(17, (5, 8))).item()
    assert 2.0 < start < 5.0, (
        "near ln 17 = 2.83: outputs are neither large nor nothing at the start"
    )


def test_what_a_gpt_can_be_made_of():
    with pytest.raises(ValueError, match="width=10 isn't a multiple of heads=4"):
        GPTConfig(17, heads=4, width=10)
    for wrong in (
        {"vocabulary": 0},
        {"context": -1},
        {"layers": 1.5},
        {"heads": 0},
        {"width": "8"},
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(
            ValueError, match=re.escape(f"GPTConfig({name}={value!r}): expected a whole number")
        ):
            GPTConfig(**{"vocabulary": 17, **wrong})


@pytest.mark.parametrize("shape", [(2, 9), (8,), (1, 2, 8)])
def test_a_text_that_does_not_fit_into_the_context(shape):
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"tokens of shape {shape}: expected (batch, time), of time at most context=8"
        ),
    ):
        GPT(SMALL)(torch.zeros(shape, dtype=torch.int64))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = GPT(SMALL), GPT(SMALL), GPT(SMALL, seed=1)
    for (name, p), q, r in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(p, q), name
        assert p.dim() < 2 or not torch.equal(p, r), name
    matrices = [p for p in first.parameters() if p.dim() == 2]
    assert len({p.flatten()[0].item() for p in matrices}) == len(matrices), "no two matrices alike"


def test_a_part_of_a_model_has_the_weights_of_the_whole():
    whole = GPT(SMALL)
    part = Block(SMALL)
    seed_weights(part, prefix="blocks.1.")
    for p, q in zip(part.parameters(), whole.blocks[1].parameters()):
        assert torch.equal(p, q)
    name, weight = "blocks.0.mlp.up.weight", whole.blocks[0].mlp.up.weight
    columns = initial_weight(name, weight.shape)[:, 3:7]
    assert torch.equal(columns.float(), weight[:, 3:7])


def test_float32_and_bfloat16_weights_are_the_float64_ones_rounded():
    for dtype in (torch.float32, torch.bfloat16):
        for p, q in zip(
            GPT(SMALL, dtype=dtype).parameters(), GPT(SMALL, dtype=torch.float64).parameters()
        ):
            assert p.dtype == dtype
            torch.testing.assert_close(p, q.to(dtype))


def test_bfloat16_autocast_computes_in_bfloat16_and_keeps_the_weights():
    gpt, tokens = GPT(SMALL), torch.randint(17, (2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gpt(tokens)
        next_token_loss(logits, tokens).backward()
    assert logits.dtype == torch.bfloat16
    assert {p.grad.dtype for p in gpt.parameters()} == {torch.float32}
    exact = gpt(tokens)
    # of all values: one alone differs more, by another kernel for each processor
    assert 0 < (logits - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_unfused_attention_computes_the_same_as_the_fused_one(dropout):
    fused, unfused = (
        GPT(GPTConfig(17, 8, 2, 2, 12, attention=kind, dropout=dropout), dtype=torch.float64)
        for kind in ("fused", "unfused")
    )
    assert list(fused.state_dict()) == list(GPT(SMALL).state_dict()), "no new names"
    tokens = torch.arange(16).view(2, 8) % 17
    for model in (fused, unfused):
        model.train(not dropout)
        model(tokens).square().mean().backward()
    torch.testing.assert_close(fused(tokens), unfused(tokens))
    for p, q in zip(fused.parameters(), unfused.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("kind", ["fused", "unfused"])
def test_dropout_is_for_training_and_drops_what_gpt_2_drops(kind):
    gpt = GPT(GPTConfig(17, 8, 2, 2, 12, attention=kind, dropout=0.4), dtype=torch.float64)
    tokens = torch.arange(16).view(2, 8) % 17
    assert not torch.equal(gpt(tokens), gpt(tokens))
    gpt.eval()
    assert torch.equal(gpt(tokens), gpt(tokens))
    zeros = []
    gpt.train()
    for place in (gpt.embedding.dropout, gpt.blocks[1].dropout):
        place.register_forward_hook(lambda _, args, y: zeros.append((y == 0).double().mean()))
    for _ in range(20):
        gpt(tokens)
    assert torch.stack(zeros).mean() == pytest.approx(0.4, abs=0.05)
    x = torch.ones(64, 2, 4, 4, dtype=torch.float64)
    core = gpt.blocks[0].attention.core
    first = core(x, x, x)[..., 0, 0]  # of one weight only, which is dropped or scaled up
    assert sorted(set(first.flatten().tolist())) == pytest.approx([0.0, 1 / 0.6])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dropout": 1.0}, r"dropout=1\.0.: expected the part that is dropped, 0 or more"),
        ({"dropout": "much"}, "dropout='much'"),
        ({"attention": "flash"}, 'attention=\'flash\'.: expected "fused" or "unfused"'),
    ],
    ids=["all", "a word", "another attention"],
)
def test_what_dropout_and_attention_can_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(17, **wrong)
