"""Lesson 06: what is written by hand equals one process on any number of ranks, gradients too.

The answers to the exercises are right.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from tests.lessons.lesson import answer, definitions, read

LESSON = definitions("06_tensor_parallel")
(ANSWERS,) = (
    cell.source for cell in read("06_tensor_parallel").cells if cell.id == "exercises-more"
)
RANKS = [1, 3, 4]
X, W, V, TARGETS = (
    LESSON["random"](*shape, seed=i)
    for i, shape in enumerate([(12, 12), (12, 48), (48, 12), (12, 12)])
)


def on_ranks(n, name, *args):
    return p101.launch(LESSON[name], *args, world_size=n, backend="sim")


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("n", RANKS)
def test_forward_by_hand_equals_one_process(n):
    for name, args, expected in [
        ("by_columns", (X, W), X @ W),
        ("by_rows", (X, W), X @ W),
        ("lecture", (X, [W, V]), F.gelu(F.gelu(X @ W) @ V)),
        ("lecture_pair", (X, W, V), F.gelu(X @ W) @ V),
        ("pair", (X, W, V), F.gelu(X @ W) @ V),
        ("pair_with_bias", (X, W, V, X[0], False), F.gelu(X @ W) @ V + X[0]),
    ]:
        assert all(close(result, expected) for result in on_ranks(n, name, *args).results), name


@pytest.mark.parametrize("n", RANKS)
def test_backward_by_hand_equals_one_process_and_needs_its_message(n):
    right = LESSON["one_gradient"](X, W, V, TARGETS)
    by_hand, by_autograd, alone = (
        LESSON["joined"](on_ranks(n, *call).results)
        for call in [
            ("pair_by_hand", X, W, V, TARGETS, ("dX",)),
            ("pair_by_autograd", X, W, V, TARGETS),
            ("pair_by_hand", X, W, V, TARGETS),
        ]
    )
    assert all(
        close(by_hand[name], right[name]) and close(by_autograd[name], right[name])
        for name in right
    )
    assert [close(alone[name], right[name]) for name in ("dW", "dV", "dX")] == [True, True, n == 1]


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
    assert all(
        torch.equal(rows, W.T[targets])
        for rows in on_ranks(n, "embed", targets, W.T.contiguous()).results
    )


@pytest.mark.parametrize("n", RANKS)
def test_activations_cut_along_time_give_the_same_gradients_with_the_same_bytes(n):
    def cut():
        return LESSON["blocks_on_ranks"](
            LESSON["block_cut_along_time"], LESSON["block"](X, 0), W, V
        )

    whole, parts = (
        on_ranks(n, "blocks_on_ranks", LESSON["block_with_all_reduce"], X, W, V),
        p101.launch(cut, world_size=n, backend="sim"),
    )
    assert close(torch.cat([gradient for gradient, _ in parts.results]), whole.results[0][0])
    assert parts.trace.bytes_sent == whole.trace.bytes_sent
    assert [n * held for _, held in parts.results] == [held for _, held in whole.results]


def test_the_gathered_input_is_kept_whole_for_backward():
    """The lesson says so of sequence parallel by hand."""

    def kept():
        shapes = []

        def pack(tensor):
            shapes.append(tuple(tensor.shape))
            return tensor

        x, w, v = (
            LESSON["block"](X, 0).clone().requires_grad_(),
            *(t.clone().requires_grad_() for t in (W, V)),
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            LESSON["block_cut_along_time"](x, w, v)
        return shapes

    for shapes in p101.launch(kept, world_size=4, backend="sim").results:
        assert (12, 12) in shapes and (3, 12) in shapes


# ── what the reader writes ──


@pytest.mark.parametrize("n", RANKS)
def test_the_answer_for_the_pair_is_right_with_one_all_reduce(n):
    mine = answer("06_tensor_parallel", "pair-answer", LESSON)
    run = p101.launch(mine, X, W, V, world_size=n, backend="sim")
    assert all(close(y, F.gelu(X @ W) @ V) for y in run.results)
    assert run.trace.bytes_sent == on_ranks(n, "pair", X, W, V).trace.bytes_sent
    begun = on_ranks(n, "my_pair", X, W, V).results  # the cell is only a beginning
    assert not any(y.shape == X.shape and close(y, F.gelu(X @ W) @ V) for y in begun)


def test_the_factor_and_the_ratio_of_llama_3():
    text = "".join(cell.source for cell in read("06_tensor_parallel").cells)
    d, hidden, kv, vocabulary = 16384, 53248, 8 * 128, 128_256  # arXiv 2407.21783, table 3
    block = 2 * d * d + 2 * d * kv + 3 * d * hidden
    assert f"{block / 1e9:.1f} billion weights, {2 * block / 1e9:.1f} GB in bfloat16" in text
    assert f"the factor would be {vocabulary // 6:,}" in text
    ratio = 16 * 8192 / (3 * d)  # 12 d² is about a block's weights
    assert f"That gives {ratio:.1f}." in text and block == pytest.approx(12 * d**2, rel=0.02)
    assert 18 < ratio * 8 * (7 / 8) / (127 / 128) < 20 and "about twenty times" in text


@pytest.mark.parametrize("n", RANKS)
def test_exercise_1_the_backward_of_the_lectures_program(n):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    dy = LESSON["random"](12, 48, seed=7)
    F.gelu(x @ w).backward(dy)
    results = p101.launch(
        answer("06_tensor_parallel", "exercises-more", LESSON),
        X,
        W,
        dy,
        world_size=n,
        backend="sim",
    ).results
    assert close(torch.cat([dw for dw, _ in results], dim=1), w.grad)
    assert all(close(dx, x.grad) for _, dx in results)
