"""Ring attention and Ulysses compute what torch's attention computes on one process, and send what
they say.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import parallel101 as p101
from parallel101.cost import AttentionShape, ring_attention_bytes, ulysses_bytes
from parallel101.laboratory.sim.network import Network
from parallel101.trainers.context.time_layout import local_positions, time_sizes, visible
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
                    block[seen.rows, seen.columns] = True
                    block = block.tril() if seen.diagonal else block
                    assert seen.pairs == block.sum()
                assert torch.equal(block, ~later if causal else torch.ones_like(later))


def here(x, layout, n, position):
    """A rank's part of the time, in the memory order of a model's (batch, time, heads, d)."""
    part = x[:, :, local_positions(x.shape[2], n, position, layout, x.device)]
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
        for time in sorted({4 * n, 4 * n + 3, 2 * n - 1, n} if n < 8 else {2 * n + 3}):
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


@on_backends(sim=[1, 8], gloo=[3])
def test_equal_to_one_process(backend, world_size):
    run = p101.launch(errors_of_all_cases, world_size=world_size, backend=backend)
    assert run.results == [{}] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_under_nccl_rules(world_size):
    run = p101.launch(errors_of_all_cases, world_size=world_size, backend="sim", rules="nccl")
    assert run.results == [{}] * world_size


def test_contiguous_parts_of_any_length():
    """As torch.chunk cuts 7 positions over 3 ranks, and others."""

    def program(attention, sizes):
        inputs, expected = one_process(7, 6, 3, True)
        *qkv, g = (x.split(sizes, 2)[dist.get_rank()] for x in inputs)
        leaves = [x.clone().requires_grad_() for x in qkv]
        y = ATTENTIONS[attention](*leaves)
        y.backward(g)
        pairs = zip([y.detach(), *(x.grad for x in leaves)], expected)
        return max(
            float((mine - whole.split(sizes, 2)[dist.get_rank()]).abs().max())
            for mine, whole in pairs
        )

    for attention, sizes in product(ATTENTIONS, ([3, 3, 1], [1, 4, 2])):
        run = p101.launch(program, attention, sizes, world_size=3, backend="sim")
        assert max(run.results) <= 1e-12


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


def one_step(attention, time, heads, kv_heads, layout, causal, known, dtype):
    """Forward and backward, each in its span."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    sizes = time_sizes(time, n, layout)
    q, k, v = (
        torch.randn(1, number, sizes[rank], 4, dtype=dtype, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    )
    with p101.span("forward"):
        y = ATTENTIONS[attention](
            q, k, v, causal=causal, layout=layout, sizes=sizes if known else None
        )
    p101.compute(0.5)  # so that the two spans have no moment in common
    with p101.span("backward"):
        y.backward(y.detach())


def sent(trace, name):
    """The sends inside of a span, by rank."""
    spans = {span.rank: span for span in trace.spans(name)}
    events = [[] for _ in spans]
    for event in trace.events:
        if event.kind == "send" and (
            spans[event.rank].start <= event.posted <= spans[event.rank].end
        ):
            events[event.rank].append(event)
    return events


def test_exchanges_of_ring_attention():
    """n − 1 forward, and n − 1 + n backward; to the next rank, whatever the mask leaves."""
    n = 3
    for layout in LAYOUTS:
        trace = p101.launch(
            *(one_step, "ring", 8, 2, 1, layout, True, True, torch.float64),
            world_size=n,
            backend="sim",
            network=Network(latency=1.0),
        ).trace
        sizes = time_sizes(8, n, layout)
        for rank, (forward, backward) in enumerate(
            zip(sent(trace, "forward"), sent(trace, "backward"))
        ):
            assert {event.peer for event in forward + backward} == {(rank + 1) % n}
            # k and v of 1 head, of width 4: those of this rank first, then those of the one before
            kv = [2 * sizes[rank - step] * 4 * 8 for step in range(n)]
            assert [event.nbytes for event in forward] == kv[:-1]
            assert Counter(event.nbytes for event in backward) == Counter(kv[:-1] + kv)


def test_lengths_are_told_only_if_they_are_not_known():
    for attention, known in product(ATTENTIONS, (True, False)):
        trace = p101.launch(
            *(one_step, attention, 8, 4, 4, "contiguous", True, known, torch.float64),
            world_size=4,
            backend="sim",
        ).trace
        lengths = [
            [event for event in events if event.nbytes <= 16] for events in sent(trace, "forward")
        ]
        assert all(bool(events) != known for events in lengths)
        assert all(sum(event.nbytes for event in events) in (0, 24) for events in lengths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(1, 2, 2), (2, 2, 2), (4, 4, 4), (4, 16, 4)])
def test_bytes_equal_the_closed_forms(n, heads, kv_heads, dtype):
    of = AttentionShape(n, 8, heads, kv_heads, 4, itemsize=dtype.itemsize)
    for attention, cost, causal in (
        ("ring", ring_attention_bytes(of), True),
        ("ring", ring_attention_bytes(of), False),
        ("ulysses", ulysses_bytes(of), True),
    ):
        trace = p101.launch(
            *(one_step, attention, 8, heads, kv_heads, "zigzag", causal, True, dtype),
            world_size=n,
            backend="sim",
            network=Network(latency=1.0),
        ).trace
        for name, expected in (("forward", cost.forward), ("backward", cost.backward)):
            counted = [sum(event.nbytes for event in events) for events in sent(trace, name)]
            assert counted == [expected] * n


def test_which_sends_less_forward():
    """Ring attention if n < 1 + h/g, as the closed forms' text says."""
    for n, heads, kv_heads in product((2, 4, 8), (8, 16, 64), (8, 16)):
        if heads % kv_heads == 0:
            of = AttentionShape(n, 64, heads, kv_heads, 16)
            ring, ulysses = ring_attention_bytes(of).forward, ulysses_bytes(of).forward
            assert (ring < ulysses) == (n < 1 + heads / kv_heads)
            assert (ring == ulysses) == (n == 1 + heads / kv_heads)


def test_messages_are_along_the_axis():
    def program():
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        x = torch.ones(1, 2, 2, 4, requires_grad=True)
        for attention in ATTENTIONS.values():
            attention(x, x, x, group=mesh["cp"]).sum().backward()

    trace = p101.launch(program, world_size=4, backend="sim").trace
    assert {
        (event.group.axis, event.group.ranks, event.peer // 2)
        for event in trace.events
        if event.kind == "send"
    } == {("cp", (0, 1), 0), ("cp", (2, 3), 1)}


WRONG = {  # what a call changes, the error, and a fact that it names
    "not a tensor": (lambda q, k, v: {"k": [1.0]}, TypeError, "k is a list"),
    "another dtype": (lambda q, k, v: {"v": v.double()}, TypeError, "float64"),
    "whole numbers": (lambda q, k, v: {x: q.long() for x in "qkv"}, TypeError, "int64"),
    "three dims": (lambda q, k, v: {"q": q[0]}, ValueError, "(2, 4, 4)"),
    "other times": (
        lambda q, k, v: {"k": k[:, :, 1:], "v": v[:, :, 1:]},
        ValueError,
        "(1, 2, 3, 4)",
    ),
    "k unlike v": (lambda q, k, v: {"k": k[:, :1]}, ValueError, "(1, 1, 4, 4)"),
    "heads": (lambda q, k, v: {"q": q[:, :1]}, ValueError, "multiple"),
    "layout": (lambda q, k, v: {"layout": "striped"}, ValueError, "striped"),
    "a mask": (lambda q, k, v: {"causal": torch.ones(4, 4)}, TypeError, "masks"),
    "sizes for q": (lambda q, k, v: {"sizes": [5, 6, 5]}, ValueError, "[5, 6, 5]"),
    "too few sizes": (lambda q, k, v: {"sizes": [4, 4]}, ValueError, "3 ranks"),
    "sizes of torch.chunk": (
        lambda q, k, v: {
            **{x: q[:, :, : [3, 3, 1][dist.get_rank()]] for x in "qkv"},
            "layout": "zigzag",
        },
        ValueError,
        "[3, 2, 2]",
    ),
    "none for the last rank": (
        lambda q, k, v: {x: q[:, :, : [1, 1, 0][dist.get_rank()]] for x in "qkv"},
        ValueError,
        "at least one position",
    ),
}


def errors_of_wrong_calls():
    """All ranks raise, and can go on with a right call."""
    found = {}
    for case, (change, *_) in WRONG.items():
        x = torch.zeros(1, 2, 4, 4)
        call = {"q": x, "k": x, "v": x} | change(x, x, x)
        try:
            p101.ring_attention(**call)
        except (TypeError, ValueError) as error:
            found[case] = type(error), str(error)
    return found, p101.ring_attention(x, x, x).shape


def test_wrong_calls_are_errors_on_all_ranks():
    results = p101.launch(errors_of_wrong_calls, world_size=3, backend="sim").results
    for found, shape in results:
        assert shape == (1, 2, 4, 4)
        assert set(found) == set(WRONG)
        for case, (kind, text) in found.items():
            expected, fact = WRONG[case][1:]
            assert kind is expected and fact in text, (case, text)


def test_ulysses_needs_heads_that_the_ranks_divide():
    def program(heads, kv_heads):
        q, kv = torch.zeros(1, heads, 2, 4), torch.zeros(1, kv_heads, 2, 4)
        try:
            p101.ulysses_attention(q, kv, kv)
        except ValueError as error:
            return str(error)

    for heads, kv_heads in ((3, 3), (4, 1)):
        errors = p101.launch(program, heads, kv_heads, world_size=2, backend="sim").results
        assert len(set(errors)) == 1 and f"{heads} heads" in errors[0] and "2 ranks" in errors[0]


def test_ranks_that_differ_are_found():
    def program():
        x = torch.zeros(1, 1, 2, 4, requires_grad=dist.get_rank() > 0)
        p101.ring_attention(x, x, x)

    with pytest.raises(p101.MisuseError, match="requires_grad"):
        p101.launch(program, world_size=2, backend="sim")


INSTANT = Network(latency=0.0, bandwidth=math.inf)


def timed(n, c, layout, causal, attention="ring"):
    """Forward, and forward with backward, of c positions a rank: mean compute / makespan."""

    def program(backward):
        q, k, v = (torch.zeros(2, n, c, 4, requires_grad=True) for _ in range(3))
        y = ATTENTIONS[attention](
            q, k, v, causal=causal, layout=layout, sizes=[c] * n, seconds_per_pair=1.0
        )
        if backward:
            y.sum().backward()

    efficiencies = []
    for backward in (False, True):
        trace = p101.launch(program, backward, world_size=n, backend="sim", network=INSTANT).trace
        pairs = [span.args["pairs"] for span in trace.spans("attention")]
        blocks = [*trace.spans("attention"), *trace.spans("attention backward")]
        compute = sum(span.end - span.start for span in blocks)
        time = n * c
        every = 2 * n * (time * (time + 1) // 2 if causal else time**2)  # 2 texts, n heads
        assert sum(pairs) == every  # each pair once, on one of the ranks
        assert compute == every * (3.5 if backward else 1)
        efficiencies.append(Fraction(compute) / n / Fraction(trace.makespan))
    return efficiencies


@pytest.mark.parametrize(("n", "c"), [(1, 3), (2, 1), (3, 5), (4, 2), (8, 1), (8, 16)])
def test_causal_attention_of_contiguous_parts_leaves_half_of_the_ranks_idle(n, c):
    expected = Fraction(n * c + 1, (2 * n - 1) * c + 1)  # 8/15 for 8 ranks and many positions
    assert timed(n, c, "contiguous", True) == [expected, expected]


@pytest.mark.parametrize("transfer", [0.5, 1, 2])
def test_the_next_block_is_in_flight_while_one_is_computed(transfer):
    """A block's message takes `transfer` times as long as the attention to it."""
    n, c = 4, 4

    def program():
        x = torch.zeros(1, 1, c, 2, dtype=torch.float64)
        p101.ring_attention(x, x, x, causal=False, sizes=[c] * n, seconds_per_pair=1.0)

    block, message = c * c, 2 * c * 2 * 8
    network = Network(latency=0.0, bandwidth=message / (transfer * block))
    trace = p101.launch(program, world_size=n, backend="sim", network=network).trace
    assert trace.makespan == (n - 1) * max(1, transfer) * block + block


def test_the_picture_says_whose_keys_and_values_a_block_is_about():
    """Rank r computes with the blocks r, r − 1, … 0, and then waits: a triangle."""

    def program():
        x = torch.zeros(1, 1, 8, 4)
        p101.ring_attention(x, x, x, sizes=[8] * 4, seconds_per_pair=1.0)

    run = p101.launch(program, world_size=4, backend="sim", network=INSTANT)
    for scene in (run.timeline(), p101.lanes_scene(run.trace)):
        drawn = scene.svg()
        assert [drawn.count(f"K{i} V{i}</text>") for i in "₀₁₂₃"] == [4, 3, 2, 1]


@pytest.mark.parametrize(("n", "c"), [(1, 2), (2, 2), (3, 4), (8, 6)])
def test_zigzag_is_balanced(n, c):
    """If all 2n chunks have the same length."""
    assert timed(n, c, "zigzag", True) == [1, 1]
    assert timed(n, c, "contiguous", False) == [1, 1]
    assert timed(n, c, "contiguous", True, "ulysses") == [1, 1]
