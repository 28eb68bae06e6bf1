"""Homework 7: pipeline parallel training.

The model is cut into stages, one per rank (or several), and microbatches flow through them.

    rank 0   F0 F1 F2 F3 ·  ·  ·  ·  B0 B1 B2 B3       F forward, B backward of a microbatch, · idle
    rank 1   ·  F0 F1 F2 F3 ·  ·  B0 B1 B2 B3 ·

Write these functions using only dist.send, dist.recv, dist.isend and dist.irecv. Rank r has stage r
of P stages, where P is the world size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def gpipe_step(
    stage: nn.Module,
    inputs: list[Tensor] | None,
    targets: list[Tensor] | None,
    loss_fn: Loss,
    shape: tuple[int, ...],
    microbatches: int,
) -> Tensor | None:
    """Run one step of GPipe: all forwards, then all backwards.

    Args:
        stage: this rank's part of the model. Call it once for each microbatch: y = stage(x).
        inputs: on rank 0 the M microbatches, in order; None on every other rank.
        targets: on the last rank the M targets, in order; None on every other rank.
        loss_fn: loss_fn(y, target) is the mean loss of one microbatch.
        shape: the shape of each stage's result for one microbatch, except the last stage's. Its
            dtype is float64.
        microbatches: M.

    Returns:
        On the last rank the loss of the whole batch, a tensor of shape (): the mean over the
        microbatches. None on every other rank. Afterwards, .grad of the parameters of `stage`
        holds the gradients of that loss.

    A forward takes one slot, and so does a backward. The step takes 2(M + P − 1) slots. Two
    neighbours exchange M activations forward and M gradients back, and nothing else. With one rank
    there are no messages. M may be less than P.

    Points: 30 % value, 10 % bytes, 60 % steps. Steps are slots here.
    """
    raise NotImplementedError("gpipe_step is not written yet")


def one_f_one_b_step(
    stage: nn.Module,
    inputs: list[Tensor] | None,
    targets: list[Tensor] | None,
    loss_fn: Loss,
    shape: tuple[int, ...],
    microbatches: int,
) -> Tensor | None:
    """Run one step of 1F1B: the same as gpipe_step, in an order that holds fewer activations.

    Rank r begins with a few forwards. Then it does one backward and one forward in turn, and at the
    end the backwards that are left. Arguments, result and gradients are those of gpipe_step, and
    the step takes the same 2(M + P − 1) slots. But rank r never holds the activations of more than
    P − r microbatches: those whose forward it has begun and whose backward it has not finished.

    Points: 20 % value, 10 % bytes, 20 % steps, 50 % memory. Steps are slots. Memory, which is how
    many microbatches are held, counts only within these slots.
    """
    raise NotImplementedError("one_f_one_b_step is not written yet")


def interleaved_schedule(rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Return the order of work of one rank, if each rank has several stages.

    Each rank has chunks = v of them, so there are v·P stages in all. A microbatch passes rank 0, 1,
    …, P − 1, then rank 0 again, and so on, v times in all. Stage s is on rank s mod P.

    Args:
        rank: the rank whose order is returned.
        ranks: P.
        microbatches: M, a multiple of P.
        chunks: v, at least 1.

    Returns:
        v·M forwards and v·M backwards, in order, as text: "4F1" is the forward of microbatch 1
        through stage 4, "4B1" its backward.

    A forward through one chunk takes 1/v of a slot, as does a backward. Your order is then run on P
    ranks, each action as soon as what it needs has arrived. The step takes 2M + 2(P − 1)/v slots:
    the bubble is v times shorter than that of 1F1B. For v > 1, rank r never holds more than
    (v − 1)P + 2(P − r − 1) + 1 activations, one for each stage and microbatch whose forward it has
    begun and whose backward it has not finished; for v = 1, P − r.

    P microbatches pass the first chunk of a rank, then the same P the second, and so on; then the
    next P. Backwards go through the chunks from the last to the first. (Narayanan et al., arXiv
    2104.04473, section 2.2.)

    Points: 20 % value, 40 % steps, 40 % memory. Steps are slots. Memory, which is how many
    activations are held, counts only within these slots.
    """
    raise NotImplementedError("interleaved_schedule is not written yet")


def zero_bubble_step(
    stage,
    inputs: list[Tensor] | None,
    targets: list[Tensor] | None,
    loss_fn: Loss,
    shape: tuple[int, ...],
    microbatches: int,
    optimizer: torch.optim.Optimizer,
) -> Tensor | None:
    """Run one training step of zero-bubble ZB-H1: weight gradients fill the bubble.

    To make this possible, the backward is split in two.

    Args:
        stage: this rank's part of the model, with three methods, each of which takes one slot:
            stage.forward(i, x) -> y: the forward of microbatch i.
            stage.input_gradient(i, dy) -> dx: the first half of its backward. The previous stage
                waits for dx (on rank 0, dx is None).
            stage.weight_gradient(i): the second half. It adds to .grad, and may come any time after
                input_gradient(i).
        inputs, targets, loss_fn, shape, microbatches: as for gpipe_step.
        optimizer: optimizer.step() updates the parameters of `stage`. Call it once, when all
            gradients are complete.

    Returns:
        The loss, as gpipe_step returns it. On the last rank, the gradient of the loss with respect
        to y comes from torch.autograd.grad.

    The step takes 3M + (P − 1) slots if M ≥ P, where 1F1B takes 3M + 3(P − 1). If M < P, it takes
    2M + 2(P − 1) + 1. No rank holds more than P microbatches: those whose forward it has begun and
    whose weight gradient is not finished. It is for you to find out how long each rank puts off
    its weight gradients. (Qi et al., arXiv 2401.10241, section 2.)

    Points: 20 % value, 10 % bytes, 40 % steps, 30 % memory. Steps are slots. Memory, which is how
    many microbatches are held, counts only within these slots.
    """
    raise NotImplementedError("zero_bubble_step is not written yet")
