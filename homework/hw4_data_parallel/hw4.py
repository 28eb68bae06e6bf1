"""Homework 4: data parallel training. Every rank has the whole model and a share of each batch.

Write it with torch.distributed. Besides send and receive, all of its collectives are allowed
(dist.broadcast, dist.all_reduce, …): you know from homework 2 what they do. Don't use
torch.nn.parallel: it is what you are about to write.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def train_naive(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> None:
    """Train the model on this rank's shares of the batches.

    Every step equals that of one process with the whole batch.

        rank 0   share 0 ──▶ backward ──▶ gradients ─┐
        rank 1   share 1 ──▶ backward ──▶ gradients ─┼─ all-reduce ──▶ the same step on all ranks
        rank 2   share 2 ──▶ backward ──▶ gradients ─┘

    Args:
        model: this rank's replica. When you get it, its weights differ from rank to rank. Training
            starts from rank 0's. Two of its layers may have the same parameter (tied weights).
        loss_fn: loss_fn(model(inputs), targets) is the mean loss of these samples, a scalar.
        optimizer: updates this model's parameters. Call optimizer.step() once for each batch.
        batches: for each step, this rank's share (inputs, targets). A share has one or more
            samples. The ranks' shares may differ in length, and a rank knows only its own.

    Returns:
        Nothing. Afterwards the model has the same weights on all ranks.

    At each optimizer.step(), p.grad holds the gradient of the mean loss over all samples of all
    ranks. With G bytes of gradients and n ranks, each rank sends 2(n−1)/n · G bytes per step. The
    initial weights are broadcast: every rank but rank 0 receives them once, and no rank sends them
    more than once. A few extra bytes, such as the number of samples, don't count.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("train_naive is not written yet")


def average_in_buckets(gradients: dict[str, Tensor], cap: int) -> dict[str, Tensor]:
    """Average the gradients over the ranks with few all-reduces.

    Each all-reduce takes a bucket: a flat tensor that holds several gradients, one after another.

        a ▇▇   b ▇▇▇▇▇   c ▇   d ▇▇▇   ──▶   [ a b ] [ c d ]   ──▶   two all-reduces, not four

    Args:
        gradients: this rank's gradients by name, all of one dtype, in the order in which its
            backward computed them. All ranks have the same names and shapes, but their orders may
            differ.
        cap: the most bytes that a bucket may hold. A larger gradient gets a bucket of its own.

    Returns:
        The mean of the ranks' gradients, by name. You may overwrite the given tensors.

    Fill each bucket as long as gradients fit: no two neighbouring buckets would fit into one. With
    G bytes of gradients and n ranks, each rank sends 2(n−1)/n · G bytes.

    Points: 30 % value, 10 % bytes, 50 % steps, 10 % memory.
    """
    raise NotImplementedError("average_in_buckets is not written yet")


def train_overlapped(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[list[tuple[Tensor, Tensor]]],
) -> None:
    """Train as train_naive does, but send gradients while backward still computes others.

        backward     ▇▇ layer 3 ▇▇ layer 2 ▇▇ layer 1 ▇▇ layer 0
        messages               ▬▬ 3      ▬▬ 2       ▬▬ 1       ▬▬ 0

    Only the last messages, those of layer 0, are not hidden behind backward.

    Args:
        model: this rank's replica. The ranks have the same weights already.
        loss_fn: loss_fn(model(inputs), targets) is the mean loss of these samples, a scalar.
        optimizer: updates this model's parameters. Call optimizer.step() once for each step.
        batches: for each step, this rank's share, cut into microbatches (inputs, targets):
            gradients are accumulated over all of them. All microbatches of all ranks have the same
            number of samples.

    Returns:
        Nothing. Afterwards the model has the same weights on all ranks.

    At each optimizer.step(), p.grad holds the gradient of the mean loss over all samples of all
    ranks. Each rank sends 2(n−1)/n · G bytes per step, for any number of microbatches. The first
    message starts before the last gradient is ready, and backward doesn't wait.
    p.register_post_accumulate_grad_hook(f) makes torch call f(p) each time backward has added to
    p.grad.

    Points: 30 % value, 20 % bytes, 50 % overlap.
    """
    raise NotImplementedError("train_overlapped is not written yet")
