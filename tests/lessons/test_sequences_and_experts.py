"""Lesson 10: attention and experts by hand equal one process, the answers to what the reader writes
are right, and so are the formulas and the numbers in the text and in the exercises.
"""

from __future__ import annotations

import math

import pytest
import torch

import parallel101 as p101
from tests.lessons.lesson import answer, definitions, source

NAME = "10_sequences_and_experts"
LESSON = definitions(NAME)
LESSON["E"] = 4
attend, random, off = LESSON["attend"], LESSON["random"], LESSON["off"]
LESSON["tokens"] = random(4, 64, 32) + 1.5 * random(32, seed=1)
HOT = random(4, 32, seed=2) / math.sqrt(32)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_ring_attention_by_hand_equals_one_process(n):
    q, k, v = random(3, 12 * n, 8, seed=n)
    run = p101.launch(LESSON["cut_and_run"], q, k, v, world_size=n, backend="sim")
    assert off(torch.cat(run.results), attend(q, k, v, causal=True)[0]) < 1e-12
    assert run.trace.messages_sent == [n - 1] * n
    assert run.trace.bytes_sent == [(n - 1) * 2 * 12 * 8 * 8] * n


@pytest.mark.parametrize("parts", [[16, 16], [1, 31], [4, 4, 8, 16]])
def test_the_readers_merge_is_exact_in_any_order(parts):
    my_merge = answer(NAME, "merge-answer", LESSON)
    q, k, v = random(3, 32, 8)
    whole = attend(q, 100 * k, v)  # exponentials of such scores overflow
    blocks = [attend(q, 100 * a, b) for a, b in zip(k.split(parts), v.split(parts))]
    for order in (blocks, blocks[::-1]):
        out, *rest = order
        for block in rest:
            out = my_merge(*out, *block)
        assert all(off(mine, right) < 1e-12 for mine, right in zip(out, whole))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("c", [2, 16])
def test_the_part_of_the_time_that_a_rank_is_busy(n, c):
    LESSON.update(RANKS=n, POSITIONS=c)
    expected = {"contiguous": (n * c + 1) / ((2 * n - 1) * c + 1), "zigzag": 1}
    for layout, busy in expected.items():
        assert LESSON["busy"](LESSON["on_clock"](layout)) == pytest.approx(busy, rel=1e-3)
    assert r"\frac{nc+1}{(2n-1)c+1}" in source(NAME, "triangle-after")


@pytest.mark.parametrize("k", [4, 8, 16])
def test_what_the_ring_and_ulysses_send(k):
    h, n, td = 16, 4, 8 * 4
    ring = LESSON["sends"](p101.ring_attention, k)
    ulysses = LESSON["sends"](p101.ulysses_attention, k)
    assert ring == 4 * (n - 1) * 2 * k * td
    assert ulysses == 4 * (n - 1) / n * (2 * h + 2 * k) * td
    assert (ulysses < ring) is (n > h / k + 1)


def test_what_a_whole_step_sends():
    def program(attention):
        q, kv = (torch.zeros(1, h, 8, 4).requires_grad_() for h in (16, 4))
        attention(q, kv, kv, sizes=[8] * 4).sum().backward()

    for attention, numbers in ((p101.ring_attention, 80), (p101.ulysses_attention, 60)):
        run = p101.launch(program, attention, world_size=4, backend="sim")
        assert run.trace.bytes_sent[0] == 4 * numbers * 8 * 4
        assert rf"{numbers}\,td" in source(NAME, "ulysses-after")


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_the_readers_layer_equals_one_process_even_with_few_tokens(tokens):
    my_layer = answer(NAME, "dispatch-answer", LESSON)
    rows, matrices = LESSON["tokens"][:, :tokens], random(4, 32, 32, seed=3)
    choice = (rows @ HOT.T).argmax(-1)

    def program():
        me = torch.distributed.get_rank()
        return my_layer(rows[me], choice[me], lambda arrived: arrived @ matrices[me])

    right = torch.einsum("rtf,rtfg->rtg", rows, matrices[choice])
    y = torch.stack(p101.launch(program, world_size=4, backend="sim").results)
    assert y.shape == right.shape and torch.allclose(y, right, atol=1e-12)


def test_exercise_3_what_a_capacity_drops():
    counts = torch.stack([choice.bincount(minlength=4) for choice in LESSON["choices"](HOT)])
    kept = counts.clamp(max=20).sum(0).tolist()
    assert kept == [24, 80, 69, 15] and counts.sum() - sum(kept) == 68
    assert "24, 80, 69 and 15 tokens, and 68 skip" in source(NAME, "exercises")
