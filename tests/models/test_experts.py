"""A mixture of experts is what a loop over tokens and experts says, and each sequence is on its
own.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from parallel101.models.experts import Experts, MixtureOfExperts
from parallel101.models.gpt import (
    GPT,
    Block,
    BlockOfExperts,
    GPTConfig,
)
from parallel101.models.seeding import seed_weights

SMALL = GPTConfig(vocabulary=17, context=8, layers=2, heads=2, width=12, experts=3)


def random(*shape, salt=0):
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mixture(experts=5, top_k=2, capacity=None):
    """Width 6, in float64, with biases that differ."""
    layer = MixtureOfExperts(6, 7, experts, top_k, capacity).double()
    for p in (layer.experts.up_bias, layer.experts.down_bias):
        p.data.copy_(random(*p.shape, salt=3))
    return layer


def one_by_one(layer, x):
    """The same with a loop over sequences, positions and choices, and the Switch loss of each
    sequence.
    """
    e, (experts, top_k) = layer.experts, (len(layer.experts.up), layer.top_k)
    result, losses = [], []
    for sequence in x:
        most = math.inf
        if layer.capacity is not None:
            most = math.ceil(layer.capacity * top_k * len(sequence) / experts)
        taken, chosen, means = [0] * experts, [0] * experts, 0
        for token in sequence:
            p = (layer.router.weight @ token).softmax(0)
            means = means + p / len(sequence)
            y = torch.zeros_like(token)
            for i in sorted(range(experts), key=lambda i: -p[i].item())[:top_k]:
                chosen[i] += 1
                if taken[i] < most:
                    taken[i] += 1
                    hidden = F.gelu(token @ e.up[i] + e.up_bias[i])
                    y = y + p[i] * (hidden @ e.down[i] + e.down_bias[i])
            result.append(y)
        f = [count / sum(chosen) for count in chosen]
        losses.append(experts * sum(part * mean for part, mean in zip(f, means)))
    return torch.stack(result).view_as(x), torch.stack(losses)


@pytest.mark.parametrize("capacity", [None, 0.4, 1.0, 1.25])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_it_equals_a_loop_over_tokens_and_experts_forward_and_backward(top_k, capacity):
    layer, x = mixture(5, top_k, capacity), random(3, 9, 6).requires_grad_()
    weight = random(3, 9, 6, salt=1)
    found = []
    for both in (layer, lambda x: one_by_one(layer, x)):
        y, balance = both(x)
        losses = balance.mean(1).flatten() if balance.dim() == 3 else balance
        loss = (y * weight).sum() + 3 * losses.sum()
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        found.append([y, losses, *gradients])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_balance_is_one_where_all_is_even_and_experts_over_top_k_where_it_is_not():
    layer, x = mixture(6, 2), random(4, 10, 6).abs()
    layer.router.weight.data.zero_()
    assert layer(x)[1].mean().item() == pytest.approx(1.0)
    layer.router.weight.data[1:3] = 50.0
    assert layer(x)[1].mean().item() == pytest.approx(6 / 2)


def test_an_expert_without_rows_has_a_gradient_of_zeros_and_a_batch_may_be_empty():
    experts = Experts(3, 4, 5)
    experts(torch.randn(6, 4), torch.tensor([2, 0, 0, 2, 2, 0])).sum().backward()
    for p in experts.parameters():
        assert p.grad[1].eq(0).all()
        assert not p.grad[0].eq(0).all()
    gpt = GPT(SMALL)
    logits, balance = gpt(torch.zeros(0, 8, dtype=torch.int64))
    assert logits.shape == (0, 8, 17)
    (logits.sum() + balance.sum()).backward()
    for name, p in gpt.named_parameters():
        assert p.grad is not None, name
        assert p.grad.eq(0).all(), name


# ── in the GPT ──


def test_the_balances_of_all_layers_travel_with_the_activations():
    gpt, tokens = GPT(SMALL, dtype=torch.float64), torch.arange(16).view(2, 8)
    added = []
    for block in gpt.blocks:
        block.mlp.register_forward_hook(lambda _, args, results: added.append(results[1]))
    logits, balance = gpt(tokens)
    assert logits.shape == (2, 8, 17)
    torch.testing.assert_close(balance, sum(added).squeeze(-1))
    x = tokens
    for module in gpt.sequence():
        assert x.shape[2:] in ((), (13,)), "one tensor between any two modules"
        x = module(x)
    assert torch.equal(x[0], logits)
    assert torch.equal(x[1], balance)


def test_with_experts_that_are_alike_and_all_used_it_is_the_dense_gpt():
    dense = GPT(GPTConfig(17, 8, 2, 2, 12), dtype=torch.float64)
    gpt = GPT(GPTConfig(17, 8, 2, 2, 12, experts=3, top_k=3), dtype=torch.float64)
    other = dense.state_dict()
    same = {name for name in other if ".mlp." not in name}
    assert same == {name for name in gpt.state_dict() if ".mlp." not in name}
    gpt.load_state_dict({name: other[name] for name in same}, strict=False)
    for mine, theirs in zip(gpt.blocks, dense.blocks):
        for name in ("up", "down"):
            linear, experts = getattr(theirs.mlp, name), mine.mlp.experts
            getattr(experts, name).data.copy_(linear.weight.t().expand(3, -1, -1))
            getattr(experts, f"{name}_bias").data.copy_(linear.bias.expand(3, -1))
    tokens = torch.arange(16).view(2, 8)
    logits, balance = gpt(tokens)
    torch.testing.assert_close(logits, dense(tokens))
    torch.testing.assert_close(balance, torch.full_like(balance, 2.0))


def test_weights_by_name_are_as_large_as_those_of_linear_layers_and_biases_are_zeros():
    config = GPTConfig(17, 8, 3, 2, 32, experts=3)
    part = BlockOfExperts(config)
    seed_weights(part, prefix="blocks.1.")
    experts = part.mlp.experts
    assert experts.up.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert experts.down.std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert experts.up_bias.eq(0).all()
    assert not torch.equal(experts.up[0], experts.up[1])
    dense, shared = Block(config), ("attention", "mlp_norm")
    seed_weights(dense, prefix="blocks.1.")
    for name, p in dense.named_parameters():
        assert not name.startswith(shared) or torch.equal(p, part.get_parameter(name)), name
