"""What the GPT, the GPT of experts and the Llama have in common, and what only the GPT has.

They have the same weights however they are built, whole or in parts.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from parallel101.models.experts import MixtureOfExperts
from parallel101.models.gpt import (
    GPT,
    Block,
    BlockOfExperts,
    GPTConfig,
    balanced_next_token_loss,
    next_token_loss,
)
from parallel101.models.llama import Llama, LlamaBlock, LlamaConfig
from parallel101.models.mlp import MLP
from parallel101.models.seeding import initial_weight, seed_weights

SMALL = GPTConfig(vocabulary=17, context=8, layers=2, heads=2, width=12)
EXPERTS = GPTConfig(17, 8, 2, 2, 12, experts=3)
LLAMA = LlamaConfig(17, 8, 2, 2, 1, 12, 10)
MODELS = {
    "gpt": (partial(GPT, SMALL), Block(SMALL)),
    "untied": (partial(GPT, GPTConfig(17, 8, 2, 2, 12, tied=False)), Block(SMALL)),
    "experts": (partial(GPT, EXPERTS), BlockOfExperts(EXPERTS)),
    "llama": (partial(Llama, LLAMA), LlamaBlock(LLAMA)),
}
TOKENS = torch.arange(16).view(2, 8)


def logits_of(model, *args):
    found = model(*args)
    return found if isinstance(found, torch.Tensor) else found[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_position_sees_what_came_before_and_nothing_else(name):
    model, changed = MODELS[name][0](dtype=torch.float64), TOKENS.clone()
    logits = logits_of(model, TOKENS)
    assert logits.shape == (2, 8, 17)
    changed[:, 5] = 16
    same = torch.isclose(logits_of(model, changed), logits, rtol=0, atol=1e-12)
    assert same.all(dim=-1).all(dim=0).tolist() == [True] * 5 + [False] * 3
    assert (model.head.weight is model.embedding.token.weight) == model.config.tied
    assert ("head.weight" in dict(model.named_parameters())) == (not model.config.tied)
    assert logits_of(model, TOKENS[:, :3]).shape == (2, 3, 17), "a shorter text will do"


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_model_has_the_weights_of_the_whole(name):
    build, part = MODELS[name]
    whole = build()
    seed_weights(part, prefix="blocks.1.")
    assert all(map(torch.equal, part.parameters(), whole.blocks[1].parameters()))
    weight_name, weight = next((n, w) for n, w in whole.named_parameters() if w.dim() > 1)
    columns = initial_weight(weight_name, weight.shape)[:, 3:7]
    assert torch.equal(columns.float(), weight[:, 3:7])


@pytest.mark.parametrize("name", MODELS)
def test_positions_say_where_in_the_text_the_tokens_are(name):
    model = MODELS[name][0](dtype=torch.float64)
    logits = logits_of(model, TOKENS)
    torch.testing.assert_close(logits_of(model, TOKENS, torch.arange(8)), logits)
    assert not torch.allclose(logits_of(model, TOKENS, torch.arange(8).flip(0)), logits)
    for tokens, positions, message in (
        (TOKENS, torch.arange(1, 9), "positions from 1 to 8: expected 0 to 7, because context=8"),
        (TOKENS, torch.arange(8) - 1, "positions from -1 to 6: expected 0 to 7"),
        (TOKENS, torch.arange(7), "positions of shape (7,) for tokens of shape (2, 8)"),
        (TOKENS[:, [*range(8), 0]], None, "tokens of shape (2, 9): expected (batch,"),
        (TOKENS[0], None, "tokens of shape (8,): expected (batch,"),
        (TOKENS[None], None, "tokens of shape (1, 2, 8): expected (batch,"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            model(tokens, positions)


def test_a_longer_text_will_do_if_its_positions_are_in_the_context():
    gpt, order = GPT(SMALL), torch.tensor([0, 1, 6, 7])
    assert torch.equal(gpt.embedding(TOKENS[:, order], order), gpt.embedding(TOKENS)[:, order])
    longer = torch.zeros(2, 9, dtype=torch.int64)
    assert gpt.embedding(longer, torch.arange(9) % 8).shape[1] == 9


@pytest.mark.parametrize("experts", [0, 3])
def test_the_loss_is_a_mean_over_samples_and_adds_the_balance_of_experts(experts):
    gpt = GPT(GPTConfig(17, 8, 2, 2, 12, experts=experts), dtype=torch.float64)
    tokens = torch.arange(40).view(5, 8) % 17
    loss_fn, balance = next_token_loss, 0.0
    if experts:
        loss_fn, (_, balances) = partial(balanced_next_token_loss, weight=0.5), gpt(tokens)
        balance = 0.5 * balances.mean()
    loss = loss_fn(gpt(tokens), tokens)
    torch.testing.assert_close(loss, next_token_loss(logits_of(gpt, tokens), tokens) + balance)
    parts = [loss_fn(gpt(part), part) * len(part) / 5 for part in tokens.split([2, 3])]
    torch.testing.assert_close(sum(parts), loss, rtol=1e-12, atol=0)
    start = next_token_loss(logits_of(gpt, tokens), torch.randint(17, (5, 8))).item()
    assert 2.0 < start < 5.0, "near ln 17 = 2.83: outputs are neither large nor nothing at first"


WHOLE = "expected a whole number"
NOT_WHOLE = [("vocabulary", 0), ("context", -1), ("layers", 1.5), ("heads", 0), ("width", "8")]
NOT_WHOLE += [("experts", -1), ("experts", 2.0)]
UNFIT = 'attention=\'flash\'): expected "fused" or "unfused"'
ROUTING = [  # of two experts
    ({"top_k": 3}, "top_k=3: expected the number of experts that a token uses"),
    ({"top_k": 0}, "1 to experts=2"),
    ({"capacity": 0}, "capacity=0: expected None, or a number above 0"),
    ({"capacity": "1"}, "capacity='1'"),
]
WRONG = [
    (GPTConfig, {"heads": 4, "width": 10}, "width=10 isn't a multiple of heads=4"),
    *((GPTConfig, {n: v}, f"GPTConfig({n}={v!r}): {WHOLE}") for n, v in NOT_WHOLE),
    (GPTConfig, {"dropout": 1.0}, "dropout=1.0): expected the part that is dropped, 0 or more"),
    (GPTConfig, {"dropout": "much"}, "dropout='much'"),
    (GPTConfig, {"attention": "flash"}, UNFIT),
    (LlamaConfig, {"attention": "flash"}, UNFIT),
    *((GPTConfig, {"experts": 2, **wrong}, message) for wrong, message in ROUTING),
    *((partial(MixtureOfExperts, 4, 8, 2), wrong, message) for wrong, message in ROUTING),
    (LlamaConfig, {"vocabulary": 0}, f"LlamaConfig(vocabulary=0): {WHOLE}, 1 or more"),
    (LlamaConfig, {"hidden": 2.5}, f"LlamaConfig(hidden=2.5): {WHOLE}"),
    (LlamaConfig, {"kv_heads": None}, f"LlamaConfig(kv_heads=None): {WHOLE}"),
    (LlamaConfig, {"width": 12}, "width=12 isn't a multiple of 2 · heads=8: expected an even"),
    (LlamaConfig, {"kv_heads": 3}, "heads=4 isn't a multiple of kv_heads=3: expected as many"),
    (LlamaConfig, {"rope_theta": 0}, "LlamaConfig(rope_theta=0): expected a number above 0"),
    (LlamaConfig, {"norm_eps": "small"}, "LlamaConfig(norm_eps='small'): expected a number"),
    (MLP, {"sizes": [3]}, "two sizes or more"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), WRONG, ids=range(len(WRONG)))
def test_what_a_model_can_be_made_of(kind, wrong, message):
    sizes = {"vocabulary": 17} if kind in (GPTConfig, LlamaConfig) else {}
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**{**sizes, **wrong})


def test_an_mlp_is_its_layers_with_gelu_between_them():
    mlp = MLP([3, 5, 5, 2], dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    a, b, c = mlp.layers
    torch.testing.assert_close(mlp(x), c(F.gelu(b(F.gelu(a(x))))))
    wide = MLP([1024] * 3, bias=False, device="meta")
    assert sum(p.numel() for p in wide.parameters()) == 2 * 1024**2


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = GPT(SMALL), GPT(SMALL), GPT(SMALL, seed=1)
    for (name, p), q, r in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(p, q), name
        assert p.dim() < 2 or not torch.equal(p, r), name
    matrices = [p for p in first.parameters() if p.dim() == 2]
    assert len({p.flatten()[0].item() for p in matrices}) == len(matrices), "no two matrices alike"


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
