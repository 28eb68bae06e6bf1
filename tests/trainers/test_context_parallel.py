"""Ring attention and Ulysses compute what torch's attention computes on one process, and send what
they say.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import parallel101 as p101
from parallel101.cost import AttentionShape, ring_attention_bytes, ulysses_bytes
from parallel101.trainers.context.time_layout import local_positions, time_sizes, visible
from tests.collectives.cases import on_backends
from tests.trainers.cases import on_ranks, raised, sends_in

LAYOUTS = ("contiguous", "zigzag")
ATTENTIONS = {"ring": p101.ring_attention, "ulysses": p101.ulysses_attention}
SIM = {"backend": "sim"}
INSTANT = {**SIM, "network": p101.Network(latency=0.0, bandwidth=math.inf)}


@functools.cache
def one_process(time, heads, kv_heads, causal=True, dtype=torch.float64, scale=None, exact=False):
    """q, k, v and the gradient of the result; and torch's result and gradients."""
    torch.manual_seed(time)
    counts = heads, kv_heads, kv_heads, heads
    inputs = [torch.randn(2, n, time, 4, dtype=dtype) for n in counts]
    *leaves, g = ((x.double() if exact else x.clone()).requires_grad_() for x in inputs)
    y = scaled_dot_product_attention(
        *leaves, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    )
    y.backward(g.detach())
    return inputs, (y.detach(), *(x.grad for x in leaves))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_sees_is_what_the_positions_say(layout):
    """Every rank has positions, and the block that it computes has no pair too many."""
    for n, causal in product((1, 2, 3, 5), (True, False)):
        for time in range(n, 4 * n + 2):
            sizes = time_sizes(time, n, layout)
            positions = [local_positions(time, n, rank, layout) for rank in range(n)]
            assert torch.cat(positions).sort().values.tolist() == list(range(time))
            assert sizes == [len(of_rank) for of_rank in positions] and min(sizes) > 0
            for me, source in product(range(n), repeat=2):
                later = positions[source][None, :] > positions[me][:, None]
                seen = visible(me, source, sizes, layout, causal)
                block = torch.zeros_like(later)
                if seen:
                    rows, columns, diagonal, pairs = seen
                    block[rows, columns] = True
                    block = block.tril() if diagonal else block
                    assert pairs == block.sum()
                assert torch.equal(block, ~later if causal else torch.ones_like(later))


def here(x, group, layout, sizes=None):
    """A rank's part of the time, in the memory order of a model's (batch, time, heads, d)."""
    n, position = len(group), group.index(dist.get_rank())
    if sizes:
        return x.split(sizes, 2)[position]
    part = x[:, :, local_positions(x.shape[2], n, position, layout, x.device)]
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def computed(attention, group, inputs, layout, parts=None, **options):
    """This rank's result and gradients of q, k and v. Checks that the inputs don't change."""
    *qkv, g = (here(x, group, layout, parts) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in qkv]
    y = ATTENTIONS[attention](*leaves, group=group, layout=layout, **options)
    y.backward(g)
    assert all(torch.equal(x.detach(), before) for x, before in zip(leaves, qkv))
    return y.detach(), *(x.grad for x in leaves)


def largest_error(attention, shape, layout, causal=True, group=None, parts=None, **options):
    """The largest difference from one process, of the result and all gradients, relative to 1."""
    group = group or list(range(dist.get_world_size()))
    inputs, expected = one_process(*shape, causal, scale=options.get("scale"))
    if dist.get_rank() not in group:
        x = inputs[0]
        assert ATTENTIONS[attention](x, x, x, group=group).shape == (0,)
        return 0.0
    found = computed(attention, group, inputs, layout, parts, causal=causal, **options)
    pairs = zip(found, (here(whole, group, layout, parts) for whole in expected))
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def errors_of_all_cases():
    """The cases that are wrong; each launch tries all, one after the other in the same program."""
    n, cases = dist.get_world_size(), []
    for layout, causal in product(LAYOUTS, (True, False)):
        # even; uneven; fewer chunks than 2n for zigzag; one position a rank
        for time in sorted({4 * n, 4 * n + 3, 2 * n - 1, n} if n < 8 else {2 * n + 3}):
            cases.append(("ring", (time, 4, 2), layout, causal, {}))
            cases.append(("ulysses", (time, 2 * n, n), layout, causal, {}))
        known = {"sizes": time_sizes(4 * n + 1, n, layout)}
        cases.append(("ring", (4 * n + 1, 3, 1), layout, causal, known))
        cases.append(("ring", (4 * n, 2, 2), layout, causal, {"scale": 0.3}))
    turned = list(reversed(range(n)))[: max(1, n - 1)]  # another order, and one rank is idle
    cases.append(("ring", (3 * n, 2, 1), "zigzag", True, {"group": turned}))
    if n == 3:  # contiguous parts of any length, as torch.chunk cuts 7 positions, and others
        for attention, parts in product(ATTENTIONS, ([3, 3, 1], [1, 4, 2])):
            cases.append((attention, (7, 6, 3), "contiguous", True, {"parts": parts}))
    return [case for case in cases if not largest_error(*case[:-1], **case[-1]) <= 1e-12]


@on_backends(sim=[1, 8], gloo=[3])
def test_equal_to_one_process(backend, world_size):
    run = p101.launch(errors_of_all_cases, world_size=world_size, backend=backend)
    assert run.results == [[]] * world_size


@pytest.mark.parametrize("n", [2, 3, 4])
def test_equal_under_nccl_rules(n):
    run = p101.launch(errors_of_all_cases, world_size=n, rules="nccl", **SIM)
    assert run.results == [[]] * n


def test_16_bit_inputs_are_summed_in_32():
    """So the result is as close to the exact one as torch's on one process."""

    def program(layout):
        arguments, group = (64, 4, 2, True, torch.bfloat16), [0, 1, 2, 3]
        inputs, torchs = one_process(*arguments)
        _, exact = one_process(*arguments, exact=True)
        found = computed("ring", group, inputs, layout)
        assert all(x.dtype == torch.bfloat16 for x in found)
        ours = [float((a - here(b, group, layout)).abs().max()) for a, b in zip(found, exact)]
        return ours, [float((a - b).abs().max()) for a, b in zip(torchs, exact)]

    for layout in LAYOUTS:
        for ring, torchs in on_ranks(4, program, layout):
            assert all(ours < 1.5 * theirs for ours, theirs in zip(ring, torchs, strict=True))


def test_under_autocast_it_computes_as_torchs_does_and_large_scores_do_not_overflow():
    def program():
        group = [0, 1]
        (q, k, v, _), _ = one_process(6, 2, 2, True, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = p101.ring_attention(*(here(x, group, "contiguous") for x in (q, k, v)))
            whole = scaled_dot_product_attention(q, k, v, is_causal=True)
        (q, k, v, g), _ = one_process(8, 1, 1)
        found = computed("ring", group, (1e4 * q, 1e4 * k, v, g), "contiguous")
        assert all(bool(x.isfinite().all()) for x in found)
        return y.dtype, float((y - here(whole, group, "contiguous")).abs().max())

    for dtype, error in on_ranks(2, program):
        assert dtype == torch.bfloat16
        assert error < 0.02


# ── what is sent ──


def passes(steps):
    """Forward and backward of 8 positions in each way, each in its span."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for i, (attention, heads, kv_heads, layout, options) in enumerate(steps):
        options = {"causal": True, "dtype": torch.float64, **options}
        torch.manual_seed(0)
        sizes = time_sizes(8, n, layout)
        q, k, v = (
            torch.randn(1, c, sizes[rank], 4, dtype=options["dtype"], requires_grad=True)
            for c in (heads, kv_heads, kv_heads)
        )
        told = {"sizes": sizes, "causal": options["causal"]}
        p101.compute(0.5)  # so that two spans have no moment in common
        with p101.span(f"forward {i}"):
            y = ATTENTIONS[attention](q, k, v, layout=layout, **told)
        p101.compute(0.5)
        with p101.span(f"backward {i}"):
            y.backward(y.detach())


def sent(n, *steps):
    """Of each step, the sends of forward and of backward, by rank."""
    where = {"world_size": n, "network": p101.Network(latency=1.0), **SIM}
    trace = p101.launch(passes, steps, **where).trace
    names = [(f"forward {i}", f"backward {i}") for i in range(len(steps))]
    return [[sends_in(trace, name) for name in of_step] for of_step in names]


@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(1, 2, 2), (2, 2, 2), (4, 4, 4), (4, 16, 4)])
def test_bytes_equal_the_closed_forms(n, heads, kv_heads):
    ways = ("ring", True), ("ring", False), ("ulysses", True)
    cases = [(*way, dtype) for way in ways for dtype in (torch.float64, torch.bfloat16)]
    steps = [
        (attention, heads, kv_heads, "zigzag", {"causal": causal, "dtype": dtype})
        for attention, causal, dtype in cases
    ]
    for (attention, _, dtype), of_passes in zip(cases, sent(n, *steps)):
        shape = AttentionShape(n, 8, heads, kv_heads, 4, itemsize=dtype.itemsize)
        cost = ring_attention_bytes(shape) if attention == "ring" else ulysses_bytes(shape)
        for of_pass, expected in zip(of_passes, (cost.forward, cost.backward)):
            assert [sum(event.nbytes for event in events) for events in of_pass] == [expected] * n


# ── wrong calls ──


def of_sizes(*sizes):
    """Positions of each rank."""
    return {x: torch.zeros(1, 2, sizes[dist.get_rank()], 4) for x in "qkv"}


WRONG = {  # the error, and what a call with q, k and v of (1, 2, 4, 4) changes
    "TypeError: .*x is a list": lambda: {"k": [1.0]},
    "TypeError: .*float64": lambda: {"v": torch.zeros(1, 2, 4, 4).double()},
    "TypeError: .*int64": lambda: {x: torch.zeros(1, 2, 4, 4).long() for x in "qkv"},
    r"ValueError: .*\(2, 4, 4\)": lambda: {"q": torch.zeros(2, 4, 4)},
    r"ValueError: .*\(1, 2, 3, 4\)": lambda: {x: torch.zeros(1, 2, 3, 4) for x in "kv"},
    r"ValueError: .*\(1, 1, 4, 4\)": lambda: {"k": torch.zeros(1, 1, 4, 4)},
    "ValueError: .*multiple": lambda: {"q": torch.zeros(1, 1, 4, 4)},
    "ValueError: .*striped": lambda: {"layout": "striped"},
    r"TypeError: (.|\n)*masks": lambda: {"causal": torch.ones(4, 4)},
    r"ValueError: .*\[5, 6, 5\]": lambda: {"sizes": [5, 6, 5]},
    "ValueError: .*3 ranks": lambda: {"sizes": [4, 4]},
    r"ValueError: .*\[3, 2, 2\]": lambda: {**of_sizes(3, 3, 1), "layout": "zigzag"},
    "ValueError: .*at least one position on each rank": lambda: of_sizes(2, 1, 0),
    "2 heads.* 3 ranks": lambda: {"attention": "ulysses"},
    "6 heads.* 3 ranks": lambda: {"q": torch.zeros(1, 6, 4, 4), "attention": "ulysses"},
}


def errors_of_wrong_calls():
    """All ranks raise, and can go on with a right call."""
    found, x = {}, torch.zeros(1, 2, 4, 4)
    for words, change in WRONG.items():
        call = {"q": x, "k": x, "v": x, **change()}
        found[words] = raised(ATTENTIONS[call.pop("attention", "ring")], **call)
    return found, p101.ring_attention(x, x, x).shape


def test_wrong_calls_are_errors_on_all_ranks():
    for found, shape in on_ranks(3, errors_of_wrong_calls):
        assert shape == (1, 2, 4, 4)
        for words, error in found.items():
            assert re.search(words, error), error


def test_ranks_that_differ_are_found():
    def program():
        x = torch.zeros(1, 1, 2, 4, requires_grad=dist.get_rank() > 0)
        p101.ring_attention(x, x, x)

    with pytest.raises(p101.MisuseError, match="requires_grad"):
        p101.launch(program, world_size=2, **SIM)


# ── on the clock ──


def timed(n, c, layout, causal=True, attention="ring"):
    """Forward, and forward with backward, of c positions a rank: mean compute / makespan."""

    def program(backward):
        q, k, v = (torch.zeros(2, n, c, 4, requires_grad=True) for _ in range(3))
        options = {"causal": causal, "layout": layout, "sizes": [c] * n}
        y = ATTENTIONS[attention](q, k, v, **options, seconds_per_pair=1.0)
        if backward:
            y.sum().backward()

    efficiencies = []
    for backward in (False, True):
        trace = p101.launch(program, backward, world_size=n, **INSTANT).trace
        pairs = [span.args["pairs"] for span in trace.spans("attention")]
        blocks = [*trace.spans("attention"), *trace.spans("attention backward")]
        compute, time = sum(span.end - span.start for span in blocks), n * c
        every = 2 * n * (time * (time + 1) // 2 if causal else time**2)  # 2 texts, n heads
        assert sum(pairs) == every  # each pair once, on one of the ranks
        assert compute == every * (3.5 if backward else 1)
        efficiencies.append(Fraction(compute) / n / Fraction(trace.makespan))
    return efficiencies


@pytest.mark.parametrize(("n", "c"), [(1, 2), (2, 2), (3, 4), (8, 6)])
def test_zigzag_is_balanced_and_contiguous_parts_leave_half_of_the_ranks_idle(n, c):
    """If all 2n chunks have the same length."""
    assert timed(n, c, "zigzag") == [1, 1]
    assert timed(n, c, "contiguous", False) == [1, 1]
    assert timed(n, c, "contiguous", True, "ulysses") == [1, 1]
    expected = Fraction(n * c + 1, (2 * n - 1) * c + 1)  # 8/15 for 8 ranks and many positions
    assert timed(n, c, "contiguous") == [expected, expected]


@pytest.mark.parametrize("transfer", [0.5, 1, 2])
def test_the_next_block_is_in_flight_while_one_is_computed(transfer):
    """A block's message takes `transfer` times as long as the attention to it."""
    n, c = 4, 4

    def program():
        x = torch.zeros(1, 1, c, 2, dtype=torch.float64)
        p101.ring_attention(x, x, x, causal=False, sizes=[c] * n, seconds_per_pair=1.0)

    block, message = c * c, 2 * c * 2 * 8
    network = p101.Network(latency=0.0, bandwidth=message / (transfer * block))
    trace = p101.launch(program, world_size=n, network=network, **SIM).trace
    assert trace.makespan == (n - 1) * max(1, transfer) * block + block
