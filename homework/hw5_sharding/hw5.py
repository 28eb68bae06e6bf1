"""Homework 5: sharded training (ZeRO).

Each rank keeps 1/n of the optimizer's state, then of the gradients, then of the weights.

Write it with torch.distributed. Besides send and receive, all of its collectives are allowed.
dist.reduce_scatter_single and dist.all_gather_single are made for this (older programs call them
reduce_scatter_tensor and all_gather_into_tensor). Don't use torch.distributed.fsdp or
torch.distributed.optim: they are what you are about to write.

    a parameter of 7 numbers on 3 ranks     [ 1 2 3 | 4 5 6 | 7 · · ]

A parameter is flattened, padded with zeros to a multiple of n, and cut into n pieces.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def train_zero1(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: list[tuple[Tensor, Tensor]],
    max_norm: float,
) -> None:
    """Train the model with ZeRO-1: each rank keeps 1/n of the optimizer's state.

    Every rank has all weights and gradients.

        gradients ── reduce-scatter ──▶ a piece ──▶ clip ──▶ optimizer.step() on the piece
                  ── all-gather ──▶ weights

    Args:
        model: this rank's replica. The ranks have the same weights already.
        loss_fn: loss_fn(model(inputs), targets) is the mean loss of these samples, a scalar.
        make_optimizer: makes an optimizer for the parameters that you give it: pieces, not whole
            ones. Use no other optimizer.
        batches: for each step, this rank's share (inputs, targets). All shares have the same number
            of samples.
        max_norm: before each step, the gradient of the whole model is multiplied by min(1, max_norm
            / norm), where norm is the 2-norm of that whole gradient: the mean over all ranks. It
            may be infinite.

    Returns:
        Nothing. Afterwards the model has the same weights on all ranks: those of one process with
        the whole batch.

    A rank's optimizer holds 1/n of the state, and at most one parameter more. Which rank has which
    piece is up to you. With S bytes of weights and n ranks, each rank sends 2(n−1)/n · S bytes per
    step: a reduce-scatter and an all-gather. Padding and norms don't count. A parameter may have
    fewer than n numbers.

    Points: 20 % value, 30 % bytes, 50 % memory.
    """
    raise NotImplementedError("train_zero1 is not written yet")


def train_zero2(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: list[tuple[Tensor, Tensor]],
    max_norm: float,
) -> None:
    """Train the model with ZeRO-2: like ZeRO-1, but a rank also keeps only 1/n of the gradients.

        backward     layer 3 ▇▇ ── reduce-scatter, free ──▶ a piece
                     layer 2    ▇▇ ── reduce-scatter, free ──▶ a piece

    The arguments, the result, the optimizer's state and the bytes are those of train_zero1.

    When backward has computed a gradient, it is reduce-scattered, and the whole gradient is freed
    (p.grad = None). Whole gradients of at most two layers are in memory at once, and all of them
    are gone at optimizer.step(). p.register_post_accumulate_grad_hook(f) makes torch call f(p) each
    time backward has added to p.grad.

    Points: 15 % value, 15 % bytes, 70 % memory. Of the memory, the gradients count four times as
    much as the optimizer's state. Gradients that are all-reduced are whole on every rank.
    """
    raise NotImplementedError("train_zero2 is not written yet")


def train_mixed(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: list[list[tuple[Tensor, Tensor]]],
) -> None:
    """Train the model in bfloat16, with ZeRO-1 and master weights.

    Each rank's optimizer updates 1/n of the master weights, a float32 copy of the weights.

        microbatches' bf16 gradients, added up in float32
                  ── reduce-scatter, float32 ──▶ a piece ──▶ optimizer.step() on the master weights
                  ── all-gather, bf16 ──▶ weights

    Args:
        model: this rank's replica, in float32. The ranks have the same weights already. Convert it
            with model.bfloat16(), and leave it in bfloat16 at the end.
        loss_fn: loss_fn(model(inputs), targets) is the mean loss of these samples, a float32
            scalar.
        make_optimizer: makes an optimizer for the parameters that you give it: pieces of the
            master weights. Use no other optimizer.
        batches: for each step, this rank's microbatches (inputs, targets), the inputs in bfloat16.
            All microbatches have the same number of samples, and all ranks have the same number of
            microbatches.

    Returns:
        Nothing. Afterwards the model has the same weights on all ranks: those of one process that
        trains with the mean loss of all ranks' microbatches and never rounds its master weights.

    With N weights and n ranks, each rank sends (n−1)/n · (4 + 2) N bytes per step. Its optimizer
    holds 1/n of the master weights, and at most one parameter more. Which rank has which piece is
    up to you. Padding doesn't count.

    Points: 40 % value, 50 % bytes, 10 % memory. Of the values, the master weights count six times
    as much as the model's.
    """
    raise NotImplementedError("train_mixed is not written yet")


def train_zero3(
    layers: list[nn.Module],
    shards: list[dict[str, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: list[tuple[Tensor, Tensor]],
) -> list[dict[str, Tensor]]:
    """Train a model with ZeRO-3: each rank keeps 1/n of the weights.

    A layer's weights are gathered when that layer computes.

        forward      gather 0, compute, free    gather 1, compute, free    gather 2, …
        backward     gather 2, compute, reduce-scatter its gradients, free    gather 1, …

    Args:
        layers: the model's layers, applied one after the other. Their parameters have shapes but no
            values (device "meta"): call a layer with torch.func.functional_call(layer, weights,
            (x,)), where weights has the whole parameters by name.
        shards: for each layer, this rank's piece of each parameter by name. Rank r has the r-th
            piece of the flat, padded parameter.
        loss_fn: loss_fn(outputs, targets) is the mean loss of these samples, a scalar.
        make_optimizer: makes an optimizer for the parameters that you give it: the pieces. Use no
            other optimizer.
        batches: for each step, this rank's share (inputs, targets). All shares have the same number
            of samples.

    Returns:
        This rank's pieces after training, like `shards`: those of one process with the whole batch.
        Padding stays zero.

    Whole weights of at most two layers are in memory at once. Autograd must not keep them from
    forward to backward either: torch.utils.checkpoint runs a forward again when backward needs it
    (see the warm-up in the notebook). With S bytes of weights and n ranks, each rank sends
    3(n−1)/n · S bytes per step: the weights twice and the gradients once.

    Points: 15 % value, 20 % bytes, 65 % memory. Of the memory, the gathered weights count four
    times as much as the optimizer's state, and only if no whole gradients are sent.
    """
    raise NotImplementedError("train_zero3 is not written yet")


def recompute(block: nn.Module, x: Tensor) -> Tensor:
    """Return block(x), but keep only x: backward runs the block again.

        forward      x ─▶ block ─▶ y                        keeps x
        backward     x ─▶ block, once more ─▶ y ◀─ ∂y       ─▶ ∂x and the weights' gradients

    Args:
        block: a module that takes one tensor. It may use torch's dropout, and its forward and
            backward may send messages.
        x: the block's input; it requires a gradient.

    Returns:
        block(x). Losses and gradients are the same as without recomputation, even if several calls
        go forward before one goes backward, and in later steps, when the weights have changed. The
        second forward drops the same numbers as the first. Afterwards torch draws the same random
        numbers as if there had been no second forward.

    Activations from inside at most one block are in memory at once. The forward's messages are sent
    twice. Don't use torch.utils.checkpoint: it is what you are about to write.

    Points: 30 % value, 10 % bytes, 60 % memory.
    """
    raise NotImplementedError("recompute is not written yet")
