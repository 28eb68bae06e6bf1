"""The loss of cut logits against torch's loss of the joined ones."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel101 as p101
from parallel101.mesh import split_sizes
from tests.trainers.cases import on_ranks, randn

OPTIONS = [
    (ignored, options)
    for ignored, options in itertools.product(
        (0, 3, 12), ({}, {"ignore_index": 4, "reduction": "sum"})
    )
]


def logits_and_targets(ignored=0, options=None):
    targets = torch.arange(12).view(4, 3) * 7 % 10
    targets.view(-1)[:ignored] = (options or {}).get("ignore_index", -100)
    return randn(1, 4, 3, 10) * 5, targets


def losses_and_gradients(sizes, backward):
    found = []
    for ignored, options in OPTIONS:
        logits, targets = logits_and_targets(ignored, options)
        mine = logits.split(sizes, -1)[dist.get_rank()].clone().requires_grad_()
        loss = p101.vocabulary_cross_entropy(mine, targets, **options)
        if backward:
            (3 * loss).backward()
        found.append((loss.detach(), mine.grad))
    return found


@pytest.mark.parametrize("sizes", [[10], [4, 3, 3], [0, 9, 1], [3, 3, 2, 2]], ids=str)
def test_it_is_torchs_of_the_joined_logits_which_are_not_gathered(sizes):
    n = len(sizes)
    forward, both = (
        p101.launch(losses_and_gradients, sizes, backward, world_size=n, backend="sim")
        for backward in (False, True)
    )
    for i, (ignored, options) in enumerate(OPTIONS):
        logits, targets = logits_and_targets(ignored, options)
        logits.requires_grad_()
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
        (3 * expected).backward()
        for of_rank in both.results:
            torch.testing.assert_close(
                of_rank[i][0], expected.detach(), rtol=1e-13, atol=0, equal_nan=True
            )
        gradient = torch.cat([of_rank[i][1] for of_rank in both.results], -1)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-16)
    assert both.trace.bytes_sent == forward.trace.bytes_sent, "backward sends nothing"
    # a maximum of each sample, a check of the targets, and two sums of each sample
    each = 2 * (n - 1) * 8 * (12 + n + 2 * 12)
    assert sum(forward.trace.bytes_sent) == len(OPTIONS) * each


def extreme_and_wrong():
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = logits_and_targets()
    mine = logits.float().split(split_sizes(10, n), -1)[rank]
    loss = p101.vocabulary_cross_entropy(mine * 1000, targets)
    half = p101.vocabulary_cross_entropy(mine.bfloat16(), targets)
    for wrong, kind, words, options in (
        (targets + 1, IndexError, "the logits have a vocabulary of 10", {}),
        (targets - 1, IndexError, "the logits have a vocabulary of 10", {}),
        (targets[0], ValueError, "expected", {}),
        (targets.double(), ValueError, "expected .*whole numbers", {}),
        (targets, ValueError, "reduction='none': expected", {"reduction": "none"}),
    ):
        with pytest.raises(kind, match=words):
            p101.vocabulary_cross_entropy(mine, wrong, **options)
    return loss.item(), half.item(), half.dtype


def test_extreme_logits_half_precision_and_what_is_refused():
    logits, targets = logits_and_targets()
    flat, targets = logits.float().flatten(0, 1), targets.flatten()
    for loss, half, dtype in on_ranks(3, extreme_and_wrong):
        assert loss == pytest.approx(F.cross_entropy(flat * 1000, targets).item(), rel=1e-6)
        assert half == pytest.approx(F.cross_entropy(flat, targets).item(), rel=0.01)
        assert dtype == torch.float32
