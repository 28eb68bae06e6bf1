"""Lesson 06: what is written by hand equals one process on any number of ranks, gradients too, and
so do the answers to what the reader writes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from tests.lessons.lesson import answer, definitions, prose

NAME = "06_tensor_parallel"
LESSON = definitions(NAME)
LESSON["answer for the pair"] = answer(NAME, "pair-answer", LESSON)
RANKS = [3, 4]
X, W, V, TARGETS = (
    LESSON["random"](*shape, seed=i)
    for i, shape in enumerate([(12, 12), (12, 48), (48, 12), (12, 12)])
)
Y = F.gelu(X @ W) @ V


def on_ranks(n, name, *args):
    return p101.launch(LESSON[name], *args, world_size=n, backend="sim")


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("n", RANKS)
def test_forward_by_hand_equals_one_process(n):
    for name, args, expected in [
        ("by_columns", (X, W), X @ W),
        ("by_rows", (X, W), X @ W),
        ("lecture", (X, [W, V]), F.gelu(Y)),
        ("lecture_pair", (X, W, V), Y),
        ("pair", (X, W, V), Y),
        ("answer for the pair", (X, W, V), Y),
        ("pair_with_bias", (X, W, V, X[0], False), Y + X[0]),
    ]:
        assert all(close(result, expected) for result in on_ranks(n, name, *args).results), name
    assert not any(close(y, Y) for y in on_ranks(n, "my_pair", X, W, V).results)  # as it begins


@pytest.mark.parametrize("n", RANKS)
def test_backward_by_hand_equals_one_process_and_needs_its_message(n):
    right = LESSON["one_gradient"](X, W, V, TARGETS)
    for call, summed in [
        (("pair_by_hand", X, W, V, TARGETS, ("dX",)), True),
        (("pair_by_autograd", X, W, V, TARGETS), True),
        (("pair_by_hand", X, W, V, TARGETS), False),
    ]:
        found = LESSON["joined"](on_ranks(n, *call).results)
        assert {name: close(found[name], right[name]) for name in right} == {
            "dW": True,
            "dV": True,
            "dX": summed,
        }


@pytest.mark.parametrize("shared", [False, True], ids=["three all-reduces", "one"])
@pytest.mark.parametrize("n", RANKS)
def test_attention_by_heads_equals_one_process(n, shared):
    matrices = [LESSON["random"](12, 12, seed=i) for i in range(4)]
    x = X.clone().requires_grad_()
    y = LESSON["attention"](x, *matrices, 12, lambda x: x)
    y.square().sum().backward()
    for result, gradient in on_ranks(n, "attention_on_ranks", X, matrices, 12, shared).results:
        assert close(result, y) and close(gradient, x.grad)


@pytest.mark.parametrize("n", RANKS)
def test_the_embedding_and_the_loss_cut_by_vocabulary_equal_one_process(n):
    logits, targets = (8 * LESSON["random"](9, 24)).requires_grad_(), torch.arange(9) * 2
    F.cross_entropy(logits, targets).backward()
    for name in ("cut_loss", "whole_loss"):
        blocks = on_ranks(n, "loss_on_ranks", LESSON[name], logits.detach(), targets).results
        assert close(torch.cat(blocks, dim=1), logits.grad)
    for rows in on_ranks(n, "embed", targets, W.T.contiguous()).results:
        assert torch.equal(rows, W.T[targets])


@pytest.mark.parametrize("n", RANKS)
def test_activations_cut_along_time_give_the_same_gradients_with_the_same_bytes(n):
    def cut():
        function = LESSON["block_cut_along_time"]
        return LESSON["blocks_on_ranks"](function, LESSON["block"](X, 0), W, V)

    whole = on_ranks(n, "blocks_on_ranks", LESSON["block_with_all_reduce"], X, W, V)
    parts = p101.launch(cut, world_size=n, backend="sim")
    assert close(torch.cat([gradient for gradient, _ in parts.results]), whole.results[0][0])
    assert parts.trace.bytes_sent == whole.trace.bytes_sent
    assert [n * held for _, held in parts.results] == [held for _, held in whole.results]


def test_the_numbers_of_llama_3():
    d, hidden, kv, vocabulary = 16384, 53248, 8 * 128, 128_256  # arXiv 2407.21783, table 3
    block = 2 * d * d + 2 * d * kv + 3 * d * hidden
    ratio = 16 * 8192 / (3 * d)  # 12 d² is about a block's weights
    assert block == pytest.approx(12 * d**2, rel=0.02)
    assert ratio * 8 * (7 / 8) / (127 / 128) == pytest.approx(19, abs=0.5)  # "about twenty times"
    for said in (
        f"{block / 1e9:.1f} billion weights, {2 * block / 1e9:.1f} GB in bfloat16",
        f"the factor would be {vocabulary // 6:,}",
        f"That gives {ratio:.1f}.",
    ):
        assert said in prose(NAME)


@pytest.mark.parametrize("n", RANKS)
def test_exercise_1_the_backward_of_the_lectures_program(n):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    dy = LESSON["random"](12, 48, seed=7)
    F.gelu(x @ w).backward(dy)
    LESSON["exercise 1"] = answer(NAME, "exercises-more", LESSON)
    results = on_ranks(n, "exercise 1", X, W, dy).results
    assert close(torch.cat([dw for dw, _ in results], dim=1), w.grad)
    assert all(close(dx, x.grad) for _, dx in results)
