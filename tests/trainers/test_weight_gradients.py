"""Weight gradients that are left for later, and computed inside of another backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function

from parallel101.trainers.weight_gradients import WeightGradients
from tests.trainers.cases import randn, seeded


class RunInBackward(Function):
    @staticmethod
    def forward(ctx, x, later):
        ctx.later = later
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.later.run()
        return g, None


def test_each_parameter_gets_the_sum_of_its_gradients_and_its_hooks_run_once():
    """A layer that is used twice, and one with a frozen weight."""
    layer, frozen, x = seeded(nn.Linear(4, 4)), seeded(nn.Linear(4, 4)), randn(1, 2, 3, 4)
    frozen.weight.requires_grad_(False)
    trained = [frozen.bias, layer.weight, layer.bias]
    x.requires_grad_()
    expected = torch.autograd.grad(frozen(layer(layer(x))).square().sum(), [x, *trained])

    later, completed = WeightGradients(split=True), {}
    for p in trained:
        p.register_hook(lambda g: 2 * g)
        p.register_post_accumulate_grad_hook(lambda p: completed.setdefault(p, []).append(1))
    with later.forward():
        loss = frozen(layer(layer(RunInBackward.apply(x, later)))).square().sum()
    loss.backward()
    assert list(map(id, completed)) == list(map(id, trained)) and not later.pending
    assert [*completed.values()] == [[1]] * 3
    for found, gradient in zip([x.grad, *(p.grad / 2 for p in trained)], expected):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=0)
