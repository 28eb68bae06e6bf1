"""Homework 3: the backward of collectives.

A collective F takes the x of all ranks and gives each rank a y. It is linear. The loss is the sum
of the losses of all ranks. In backward, each rank has g, the gradient of its own y. F*, the adjoint
of F, turns the g of all ranks into the gradient of each rank's x:

    ⟨Fx, g⟩ = ⟨x, F*g⟩        for every x and g

⟨a, b⟩ is the sum of a·b over all elements of all ranks.

x and g are contiguous and float64, and they must stay as they are. n is the number of ranks.

9a to 9c give 5 points each, and 9d to 9f give 10 each: half for the values, half for the bytes.
9g to 9k are optional practice, without points.
"""

import torch
import torch.distributed as dist

# ---- 9a to 9c: F is given, and you write F* ----
# You may use everything in torch.distributed: dist.send and dist.recv, and the collectives
# (dist.all_reduce, dist.reduce, dist.broadcast, dist.all_gather, dist.gather, dist.scatter,
# dist.all_to_all_single, …). Blocks are cut along dim 0 and are equally large. S is the number of
# bytes of the largest tensor in the drawing.


def broadcast_backward(x: torch.Tensor, g: torch.Tensor, root: int) -> torch.Tensor:
    """Return the gradient of x for a broadcast: y is the root's x on every rank.

        root    x ─┬─▶ y = x        g₀
        rank 1  x  ├─▶ y = x        g₁        its own x is not used
        rank 2  x  └─▶ y = x        g₂

    Args:
        x: this rank's x. Every rank has one of the same shape; only its shape and dtype matter
            here.
        g: the gradient of this rank's y, of the same shape.
        root: the rank whose x was broadcast.

    Returns:
        The gradient of this rank's x, on every rank, including those whose x was not used.

    The ranks send at most (n − 1)·S bytes in total.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("broadcast_backward is not written yet")


def gather_backward(x: torch.Tensor, g: torch.Tensor | None, root: int) -> torch.Tensor:
    """Return the gradient of x for a gather: the root's y has the x of all ranks, in rank order.

    The other ranks have no y.

        root    a ─┬─▶ y = [ a b c ]        g
        rank 1  b ─┤
        rank 2  c ─┘

    Args:
        x: (k, …), this rank's x. Only its shape and dtype matter here.
        g: on the root, (n·k, …), the gradient of y; None on the other ranks.
        root: the rank that gathered.

    Returns:
        The gradient of this rank's x.

    The ranks send at most (n − 1)/n·S bytes in total.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("gather_backward is not written yet")


def all_to_all_backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x for an all-to-all: block j of rank i's x is block i of rank j's y.

        rank 0  [ a₀ a₁ a₂ ] ──▶ y = [ a₀ b₀ c₀ ]        g₀
        rank 1  [ b₀ b₁ b₂ ] ──▶ y = [ a₁ b₁ c₁ ]        g₁
        rank 2  [ c₀ c₁ c₂ ] ──▶ y = [ a₂ b₂ c₂ ]        g₂

    Args:
        x: (n·k, …), this rank's x. Only its shape and dtype matter here.
        g: (n·k, …), the gradient of this rank's y.

    Returns:
        The gradient of this rank's x.

    The ranks send at most (n − 1)·S bytes in total.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("all_to_all_backward is not written yet")


# ---- 9d to 9f: you write F and F* ----
# Each function returns a new y through which autograd can differentiate: write a
# torch.autograd.Function, as lesson 03 does, and return what its apply(…) returns. Backward gets
# this rank's g, of the shape of y. It returns the gradient of this rank's x, and None for each
# further argument of forward. `check` compares y with that of one process, and calls y.backward(g)
# on every rank. Use only dist.send, dist.recv, dist.isend and dist.irecv.


def shift(x: torch.Tensor, k: int, dim: int) -> torch.Tensor:
    """Shift a tensor that is cut over the ranks by k entries along dim, wrapping around.

        the whole tensor      a b c d | e f g h | i j k l        3 ranks, k = 1
        shifted               l a b c | d e f g | h i j k

    Args:
        x: this rank's block. The ranks' blocks, joined along dim, are the whole tensor. All have
            the same shape.
        k: the number of entries to shift by, 0 ≤ k ≤ x.shape[dim].
        dim: the dim that is cut and shifted, 0 ≤ dim < x.dim().

    Returns:
        y: this rank's block of the shifted tensor, a new tensor even on one rank and for k = 0. In
        one process, torch.roll(whole, k, dim) gives the shifted tensor.

    Each rank sends k entries along dim in forward, and k in backward. A single rank sends nothing.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("shift is not written yet")


def all_gather_uneven(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Give every rank the blocks of all ranks. A block may have any number of rows.

        rank 0  [ a ]      ──▶  y = [ a b c ]        g₀        sizes = [1, 0, 2]
        rank 1  [ ]        ──▶  y = [ a b c ]        g₁        a, b and c are rows
        rank 2  [ b c ]    ──▶  y = [ a b c ]        g₂

    Args:
        x: (sizes[rank], …), this rank's block; with 0 rows it is an empty tensor, not None.
        sizes: the number of rows of each rank's block, the same list on every rank. At least one is
            not 0.

    Returns:
        y: (sum(sizes), …), the blocks in rank order, a new tensor even on one rank.

    The losses differ, so each rank has its own g. The gradient of x has the shape of x. If y has S
    bytes, the ranks send at most (n − 1)·S bytes in total in forward, and as many in backward.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("all_gather_uneven is not written yet")


def halo_exchange(x: torch.Tensor, width: int, sizes: list[int]) -> torch.Tensor:
    """Give every rank the rows around its block: `width` rows from each neighbour, the halos.

        rank 0  a b c        ──▶  y = 0 a b c d        width = 1
        rank 1        d e    ──▶  y = c d e f
        rank 2            f  ──▶  y = e f 0

    Convolutions need this when an image is cut over the ranks. Halos beyond the two ends of the
    whole tensor are zeros.

    Args:
        x: (sizes[rank], …), this rank's rows of the whole tensor.
        width: the number of rows of a halo, at least 1.
        sizes: the number of rows of each rank's block, the same list on every rank.

    Returns:
        y: (width + sizes[rank] + width, …), a new tensor even on one rank.

    Raises:
        ValueError: on every rank and before any message, if a block has fewer rows than width. A
            halo therefore never comes from beyond the direct neighbour.

    H is the number of bytes of one halo. The ranks send at most 2·(n − 1)·H bytes in total in
    forward, and as many in backward.

    Points: 50 % value, 50 % bytes.
    """
    raise NotImplementedError("halo_exchange is not written yet")


# ---- 9g to 9k: optional practice, like 9a to 9c ----


def reduce_backward(x: torch.Tensor, g: torch.Tensor | None, root: int) -> torch.Tensor:
    """Return the gradient of x for a reduce: the root's y is the sum of all x.

    The other ranks have no y.

        root    x₀ ─┬─▶ y = x₀ + x₁ + x₂        g
        rank 1  x₁ ─┤
        rank 2  x₂ ─┘

    Args:
        x: this rank's x. Every rank has one of the same shape; only its shape and dtype matter
            here.
        g: on the root, the gradient of y; None on the other ranks.
        root: the rank that has the sum.

    Returns:
        The gradient of this rank's x.

    The ranks send at most (n − 1)·S bytes in total.
    """
    raise NotImplementedError("reduce_backward is not written yet")


def scatter_backward(x: torch.Tensor | None, g: torch.Tensor, root: int) -> torch.Tensor | None:
    """Return the gradient of x for a scatter: rank r's y is block r of the root's x.

    The other ranks have no x.

        root    [ a b c ] ─┬─▶ y = a        g₀
        rank 1             ├─▶ y = b        g₁
        rank 2             └─▶ y = c        g₂

    Args:
        x: on the root, (n·k, …); None on the other ranks. Only its shape and dtype matter here.
        g: (k, …), the gradient of this rank's y.
        root: the rank whose x was scattered.

    Returns:
        On the root, the gradient of x. None on the other ranks.

    The ranks send at most (n − 1)/n·S bytes in total.
    """
    raise NotImplementedError("scatter_backward is not written yet")


def all_gather_backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x for an all-gather: every y has the x of all ranks, in rank order.

        rank 0  a ──▶ y = [ a b c ]        g₀        the ranks go on with y in different ways,
        rank 1  b ──▶ y = [ a b c ]        g₁        so each has its own g
        rank 2  c ──▶ y = [ a b c ]        g₂

    Args:
        x: (k, …), this rank's x. Only its shape and dtype matter here.
        g: (n·k, …), the gradient of this rank's y.

    Returns:
        The gradient of this rank's x.

    The ranks send at most (n − 1)·S bytes in total.
    """
    raise NotImplementedError("all_gather_backward is not written yet")


def reduce_scatter_backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x for a reduce-scatter: rank r's y is block r of the sum of all x.

        rank 0  [ a₀ a₁ a₂ ] ──▶ y = a₀ + b₀ + c₀        g₀
        rank 1  [ b₀ b₁ b₂ ] ──▶ y = a₁ + b₁ + c₁        g₁
        rank 2  [ c₀ c₁ c₂ ] ──▶ y = a₂ + b₂ + c₂        g₂

    Args:
        x: (n·k, …), this rank's x. Only its shape and dtype matter here.
        g: (k, …), the gradient of this rank's y.

    Returns:
        The gradient of this rank's x.

    The ranks send at most (n − 1)·S bytes in total.
    """
    raise NotImplementedError("reduce_scatter_backward is not written yet")


def all_reduce_backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x for an all-reduce: every rank's y is the sum of all x.

        rank 0  x₀ ──▶ y = x₀ + x₁ + x₂        g₀        the ranks go on with y in different ways,
        rank 1  x₁ ──▶ y = x₀ + x₁ + x₂        g₁        so each has its own g
        rank 2  x₂ ──▶ y = x₀ + x₁ + x₂        g₂

    Args:
        x: this rank's x. Every rank has one of the same shape; only its shape and dtype matter
            here.
        g: the gradient of this rank's y, of the same shape.

    Returns:
        The gradient of this rank's x.

    The ranks send at most 2·n·S bytes in total.
    """
    raise NotImplementedError("all_reduce_backward is not written yet")
