"""Homework 1: moving data.

Write these functions using only dist.send, dist.recv, dist.isend and dist.irecv.

n is the number of ranks, dist.get_world_size(). Every rank calls the same function, with tensors of
the same shape and dtype. The tensors that you get may be transposed or strided, but a message needs
a contiguous one: x.contiguous(). Do not change the tensors that you get.

In one step, a rank sends at most one message and receives at most one. The steps given here are the
fewest possible. A solution that takes a few more, such as one with blocking sends in a safe order,
keeps its points, and `check` says so.
"""

import torch
import torch.distributed as dist


def ring_shift(x: torch.Tensor) -> torch.Tensor:
    """Pass x to the next rank, and return what comes from the rank before.

        rank 0 ──x──▶ rank 1 ──x──▶ rank 2 ──x──▶ rank 0

    Args:
        x: this rank's tensor, of any shape and dtype. It must stay as it is.

    Returns:
        A new tensor: the x of rank (rank − 1) mod n. With one rank, this is a copy of its own x.

    Every rank sends x once, and all messages are in flight at the same time: one step for any n.

    Points: 40 % value, 30 % bytes, 30 % steps.
    """
    raise NotImplementedError("ring_shift is not written yet")


def flat_broadcast(x: torch.Tensor, root: int) -> torch.Tensor:
    """Send the root's x to every rank. The root sends it to the other ranks one after the other.

              ┌──x──▶ rank 0
        root ─┼──x──▶ rank 1        n − 1 messages, all from the root
              └──x──▶ rank 3

    Args:
        x: on the root, the tensor to send, of any shape and dtype. On other ranks it has the same
            shape and dtype, but its values are meaningless. It must stay as it is on every rank.
        root: any rank from 0 to n − 1, the same on all ranks.

    Returns:
        A new tensor with the root's values, on every rank.

    The root sends (n − 1)·S bytes, where x has S, and the other ranks send nothing. It takes n − 1
    steps.

    Points: 40 % value, 30 % bytes, 30 % steps.
    """
    raise NotImplementedError("flat_broadcast is not written yet")


def tree_broadcast(x: torch.Tensor, root: int) -> torch.Tensor:
    """Send the root's x to every rank, along a tree.

    In each step, every rank that has x sends it to one that doesn't.

        step 1    root ──▶ A                        2 ranks have it
        step 2    root ──▶ B    A ──▶ C             4
        step 3    root ──▶ D    A ──▶ E    B …      8, and so on

    The arguments and the result are those of `flat_broadcast`.

    It takes ⌈log₂ n⌉ steps, for any n and any root. No rank sends more than ⌈log₂ n⌉·S bytes,
    where x has S.

    Points: 30 % value, 20 % bytes, 50 % steps.
    """
    raise NotImplementedError("tree_broadcast is not written yet")


def scatter(x: torch.Tensor, root: int) -> torch.Tensor:
    """Send each rank its own rows of the root's x.

        root  [a a | b b | c c]   ──▶   rank 0 [a a]    rank 1 [b b]    rank 2 [c c]

    Args:
        x: on the root, the tensor to cut along dim 0, of any dtype and at least one dim. On other
            ranks it has the same shape and dtype, but its values are meaningless. It must stay as
            it is on every rank.
        root: any rank from 0 to n − 1, the same on all ranks.

    Returns:
        A new tensor: the rows that torch.tensor_split(x, n)[rank] has on the root. (If n doesn't
        divide the rows, the first ranks get one more row; if there are fewer rows than ranks, the
        last ranks get none.)

    No rank sends more than about (n − 1)·S/n bytes, where x has S: no row goes to a rank that does
    not need it. It takes at most n − 1 steps.

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("scatter is not written yet")


def gather(x: torch.Tensor, root: int) -> torch.Tensor | None:
    """Collect the x of all ranks on the root.

        rank 0 [a a]    rank 1 [b b]    rank 2 [c c]   ──▶   root  [a a | b b | c c]

    Args:
        x: this rank's tensor, of any dtype and at least one dim; the same shape on all ranks. It
            must stay as it is.
        root: any rank from 0 to n − 1, the same on all ranks.

    Returns:
        On the root, a new tensor: the x of ranks 0, 1, …, n − 1, in this order, joined along dim 0.
        None on the other ranks.

    The root receives (n − 1)·S bytes, where x has S. It takes at most n − 1 steps. Some ranks
    are slower than others and may call gather later.

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("gather is not written yet")
