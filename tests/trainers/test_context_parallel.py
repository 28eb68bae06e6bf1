"""Ring attention and Ulysses compute what torch's attention computes on one process, and send what
they say.
"""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import parallel101 as p101
from parallel101.trainers.context.time_layout import local_positions, time_sizes
from parallel101.trainers.context_parallel import merge
from tests.collectives.cases import on_backends

LAYOUTS = ("contiguous", "zigzag")
ATTENTIONS = {"ring": p101.ring_attention, "ulysses": p101.ulysses_attention}


@functools.cache
def one_process(time, heads, kv_heads, causal, dtype=torch.float64, scale=None, d=4):
    """q, k, v and the gradient of the result; and torch's result and gradients."""
    torch.manual_seed(time)
    q, k, v, g = (
        torch.randn(2, n, time, d, dtype=dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = scaled_dot_product_attention(
        *leaves, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    )
    y.backward(g)
    return (q, k, v, g), (y.detach(), *(x.grad for x in leaves))


def here(x, layout, n, position):
    """A rank's part of the time, in the memory order of a model's (batch, time, heads, d)."""
    part = x[:, :, local_positions(x.shape[2], n, position, layout)]
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def computed(attention, group, inputs, layout, **options):
    """This rank's result and gradients of q, k and v. Checks that the inputs don't change."""
    n, position = len(group), group.index(dist.get_rank())
    *qkv, g = (here(x, layout, n, position) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in qkv]
    y = ATTENTIONS[attention](*leaves, group=group, layout=layout, **options)
    y.backward(g)
    assert all(torch.equal(x.detach(), before) for x, before in zip(leaves, qkv))
    return y.detach(), *(x.grad for x in leaves)


def largest_error(attention, time, heads, kv_heads, layout, causal, *, group=None, **options):
    """The largest difference from one process, of the result and all gradients, relative to 1."""
    n = dist.get_world_size()
    group = group or list(range(n))
    scale = options.get("scale")
    inputs, expected = one_process(time, heads, kv_heads, causal, scale=scale)
    if dist.get_rank() not in group:
        x = inputs[0]
        assert ATTENTIONS[attention](x, x, x, group=group).shape == (0,)
        return 0.0
    position = group.index(dist.get_rank())
    found = computed(attention, group, inputs, layout, causal=causal, **options)
    return max(
        float((mine - here(whole, layout, len(group), position)).abs().max())
        for mine, whole in zip(found, expected)
    )


def errors_of_all_cases():
    """By case; each launch tries all of them, one after the other in the same program."""
    n = dist.get_world_size()
    found = {}
    for layout, causal in product(LAYOUTS, (True, False)):
        # even; uneven; fewer chunks than 2n for zigzag; one position a rank
        for time in sorted({4 * n, 4 * n + 3, 2 * n - 1, n}):
            found[f"ring {layout} {causal} {time}"] = largest_error(
                "ring", time, 4, 2, layout, causal
            )
            found[f"ulysses {layout} {causal} {time}"] = largest_error(
                "ulysses", time, 2 * n, n, layout, causal
            )
        found[f"known sizes {layout} {causal}"] = largest_error(
            "ring", 4 * n + 1, 3, 1, layout, causal, sizes=time_sizes(4 * n + 1, n, layout)
        )
        found[f"scale {layout} {causal}"] = largest_error(
            "ring", 4 * n, 2, 2, layout, causal, scale=0.3
        )
    turned = list(reversed(range(n)))[: max(1, n - 1)]  # another order, and one rank is idle
    found["turned"] = largest_error("ring", 3 * n, 2, 1, "zigzag", True, group=turned)
    return {case: error for case, error in found.items() if not error <= 1e-12}


@on_backends(sim=[1, 2, 3, 4, 8], gloo=[2, 3])
def test_equal_to_one_process(backend, world_size):
    run = p101.launch(errors_of_all_cases, world_size=world_size, backend=backend)
    assert run.results == [{}] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_under_nccl_rules(world_size):
    run = p101.launch(errors_of_all_cases, world_size=world_size, backend="sim", rules="nccl")
    assert run.results == [{}] * world_size


def test_16_bit_inputs_are_summed_in_32():
    """So the result is as close to the exact one as torch's on one process."""

    def program(layout):
        inputs, torchs = one_process(64, 4, 2, True, dtype=torch.bfloat16)
        q, k, v, g = (x.double() for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        y.backward(g)
        found, rank = computed("ring", [0, 1, 2, 3], inputs, layout), dist.get_rank()
        assert all(x.dtype == torch.bfloat16 for x in found)
        exact = [y.detach(), *(x.grad for x in leaves)]
        return [
            [float((mine - here(x, layout, 4, rank)).abs().max()) for mine, x in zip(found, exact)],
            [float((whole - x).abs().max()) for whole, x in zip(torchs, exact)],
        ]

    for layout in LAYOUTS:
        for ring, torchs in p101.launch(program, layout, world_size=4, backend="sim").results:
            assert all(ours < 1.5 * theirs for ours, theirs in zip(ring, torchs, strict=True))


def test_under_autocast_it_computes_as_torchs_does():
    def program():
        (q, k, v, _), _ = one_process(6, 2, 2, True, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            mine = [here(x, "contiguous", 2, dist.get_rank()) for x in (q, k, v)]
            y = p101.ring_attention(*mine)
            whole = scaled_dot_product_attention(q, k, v, is_causal=True)
        expected = here(whole, "contiguous", 2, dist.get_rank())
        return y.dtype, float((y - expected).abs().max())

    for dtype, error in p101.launch(program, world_size=2, backend="sim").results:
        assert dtype == torch.bfloat16
        assert error < 0.02


def test_nothing_unmasked_adds_nothing():
    """Rank 0 computes one block of n. A block of nothing, merged with nothing, is nothing."""
    zeros, none = torch.zeros(2, 3), torch.full((2,), -torch.inf)
    out, lse = zeros.clone(), none.clone()
    merge(out, lse, zeros, none)
    assert torch.equal(out, zeros) and torch.equal(lse, none)
    block, its_lse = torch.randn(2, 3), torch.randn(2)
    merge(out, lse, block, its_lse)
    assert torch.equal(out, block) and torch.equal(lse, its_lse)
    merge(out, lse, zeros, none)
    assert torch.equal(out, block) and torch.equal(lse, its_lse)


def test_large_scores_do_not_overflow():
    def program():
        (q, k, v, g), _ = one_process(8, 1, 1, True)
        found = computed("ring", [0, 1], (1e4 * q, 1e4 * k, v, g), "contiguous")
        return all(bool(x.isfinite().all()) for x in found)

    assert p101.launch(program, world_size=2, backend="sim").results == [True, True]
