"""Homework 2: reducing.

Write these functions using only dist.send, dist.recv, dist.isend and dist.irecv.

n is the number of ranks, dist.get_world_size(). Every rank calls the same function, with tensors of
the same shape and dtype. The tensors that you get may be transposed or strided, but a message needs
a contiguous one: x.contiguous(). Do not change the tensors that you get. Floating-point numbers
may be added in any order.

In one step, a rank sends at most one message and receives at most one. The steps given here are the
fewest possible. A solution that takes a few more, such as one with blocking sends in a safe order,
keeps its points, and `check` says so.
"""

import torch
import torch.distributed as dist


def reduce(x: torch.Tensor, root: int, op: str) -> torch.Tensor | None:
    """Add up the x of all ranks on the root.

        rank 0 [a]    rank 1 [b]    rank 2 [c]   ──▶   root  [a + b + c]

    Args:
        x: this rank's tensor, of any shape and dtype. It must stay as it is.
        root: any rank from 0 to n − 1, the same on all ranks.
        op: "sum", or "mean": the sum divided by n. The mean is asked for with floating-point
            numbers only.

    Returns:
        On the root, a new tensor of x's shape and dtype. None on the other ranks.

    Every other rank sends S bytes, where x has S, and the root sends nothing. It takes at most
    n − 1 steps.

    Points: 40 % value, 30 % bytes, 30 % steps.
    """
    raise NotImplementedError("reduce is not written yet")


def ring_all_gather(x: torch.Tensor) -> torch.Tensor:
    """Collect the x of all ranks on every rank. Each rank talks only to its two neighbours.

        step 1    rank 0 ──a──▶ rank 1 ──b──▶ rank 2 ──c──▶ rank 0
        step 2    rank 0 ──c──▶ rank 1 ──a──▶ rank 2 ──b──▶ rank 0    pass on what arrived last

    Args:
        x: this rank's tensor, of any dtype and at least one dim. It must stay as it is.

    Returns:
        On every rank, a new tensor: the x of ranks 0, 1, …, n − 1, in this order, joined along
        dim 0.

    Every rank sends (n − 1)·S bytes, where x has S: that is (n − 1)/n of the result. It takes n − 1
    steps.

    Points: 20 % value, 20 % bytes, 50 % peers, 10 % steps.
    """
    raise NotImplementedError("ring_all_gather is not written yet")


def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Add up the x of all ranks and give each rank its own rows of the sum.

    The partial sums travel round the ring.

        rank 0  [a0 | a1 | a2]        [a0 + b0 + c0]
        rank 1  [b0 | b1 | b2]   ──▶  [a1 + b1 + c1]
        rank 2  [c0 | c1 | c2]        [a2 + b2 + c2]

    Args:
        x: this rank's tensor, of any dtype and at least one dim. It must stay as it is.

    Returns:
        A new tensor: torch.tensor_split(total, n)[rank], where total is the sum of all x. (If n
        doesn't divide the rows, the first ranks get one more row; if there are fewer rows than
        ranks, the last ranks get none.)

    Every rank sends about (n − 1)·S/n bytes, where x has S: every chunk but one, once. It takes
    n − 1 steps.

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("ring_reduce_scatter is not written yet")


def ring_all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
    """Add up the x of all ranks, on every rank: a reduce-scatter, then an all-gather.

        rank 0  [a0 a1 a2]        [Σ0 .  . ]        [Σ0 Σ1 Σ2]
        rank 1  [b0 b1 b2]   ──▶  [.  Σ1 . ]   ──▶  [Σ0 Σ1 Σ2]
        rank 2  [c0 c1 c2]        [.  .  Σ2]        [Σ0 Σ1 Σ2]

    Args:
        x: this rank's tensor, of any shape and dtype, with any number of elements. It must stay as
            it is.
        op: "sum", or "mean": the sum divided by n. The mean is asked for with floating-point
            numbers only.

    Returns:
        On every rank, a new tensor of x's shape and dtype.

    Every rank sends about 2·(n − 1)·S/n bytes, where x has S, and no rank sends more. It takes
    2·(n − 1) steps. The chunks are made of elements, not of rows:
    torch.tensor_split(x.flatten(), n).

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("ring_all_reduce is not written yet")


def doubling_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Add up the x of all ranks, on every rank, in few steps.

    In each step, exchange your partial sum with a partner, at distance 1, 2, 4, …

        step 1    0 ◀─▶ 1    2 ◀─▶ 3        each has the sum of 2
        step 2    0 ◀─▶ 2    1 ◀─▶ 3        each has the sum of 4

    If n isn't a power of two, let m be the largest power of two below n. Each of the last n − m
    ranks first sends its x to a rank below m, which adds it to its own. At the end it gets the
    result back.

    Args:
        x: this rank's tensor, of any shape and dtype. It must stay as it is.

    Returns:
        On every rank, a new tensor: the sum of all x.

    If n is a power of two, every rank sends log₂(n)·S bytes, where x has S, in log₂ n steps.
    Otherwise no rank sends more than (⌊log₂ n⌋ + 1)·S, and it takes ⌊log₂ n⌋ + 2 steps.

    Points: 30 % value, 20 % bytes, 50 % steps.
    """
    raise NotImplementedError("doubling_all_reduce is not written yet")


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Send each rank its own row of x. The table of rows is transposed.

        rank 0  [a0 a1 a2]        [a0 b0 c0]
        rank 1  [b0 b1 b2]   ──▶  [a1 b1 c1]
        rank 2  [c0 c1 c2]        [a2 b2 c2]

    Args:
        x: this rank's tensor of shape (n, …), of any dtype. Row j, x[j], is for rank j. It must
            stay as it is.

    Returns:
        A new tensor of the same shape. Row i came from rank i: it is row `rank` of that rank's x.

    Every rank sends (n − 1)·S/n bytes, where x has S. It takes at most n − 1 steps.

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("all_to_all is not written yet")


def chain_broadcast(x: torch.Tensor, root: int, m: int) -> torch.Tensor:
    """Send the root's x to every rank along a chain of ranks, in m segments.

        step 1    root ──a──▶ root + 1
        step 2    root ──b──▶ root + 1 ──a──▶ root + 2
        step 3    root ──c──▶ root + 1 ──b──▶ root + 2 ──a──▶ root + 3

    While a rank passes one segment on, it receives the next.

    Args:
        x: on the root, the tensor to send, of any shape and dtype. On other ranks it has the same
            shape and dtype, but its values are meaningless. It must stay as it is on every rank.
        root: any rank from 0 to n − 1, the same on all ranks.
        m: the number of segments, from 1 to the number of elements of x, the same on all ranks. The
            segments are made of elements, not of rows: torch.tensor_split(x.flatten(), m).

    Returns:
        A new tensor with the root's values, on every rank.

    No rank sends more than S bytes, where x has S, and the last one sends nothing. It takes
    n − 2 + m steps of S/m bytes. Here a rank that alternates between sending and receiving is too
    slow. The steps count only along a chain, whose last rank sends nothing.

    Points: 30 % value, 20 % bytes, 50 % steps.
    """
    raise NotImplementedError("chain_broadcast is not written yet")


def two_level_all_reduce(x: torch.Tensor, k: int) -> torch.Tensor:
    """Add up the x of all ranks, on every rank, on two levels: within nodes and between nodes.

    A node has k ranks: ranks 0 to k − 1 are in the first node, k to 2k − 1 in the second, and so
    on. The i-th rank of every node sends to other nodes on rail i.

        node 0   rank 0  [a0 a1]          [a0+b0]                   [Σ0]          [Σ0 Σ1]
                 rank 1  [b0 b1]  inside  [a1+b1]  between nodes,   [Σ1]  inside  [Σ0 Σ1]
        node 1   rank 2  [c0 c1]   ──▶    [c0+d0]   on each rail    [Σ0]   ──▶    [Σ0 Σ1]
                 rank 3  [d0 d1]          [c1+d1]       ──▶         [Σ1]          [Σ0 Σ1]

    Args:
        x: this rank's tensor, of any shape and dtype, with any number of elements. It must stay as
            it is.
        k: the number of ranks in a node, the same on all ranks. It divides n.

    Returns:
        On every rank, a new tensor of x's shape and dtype: the sum of all x.

    With N = n/k nodes and S bytes in x, every rank sends about 2·(k − 1)·S/k bytes inside its node,
    and about 2·(N − 1)/N·S/k bytes to other nodes. It takes 2·(k − 1) + 2·(N − 1) steps.

    Points: 30 % value, 50 % bytes, 20 % steps.
    """
    raise NotImplementedError("two_level_all_reduce is not written yet")


def choose_broadcast(n: int, nbytes: int, latency: float, bandwidth: float) -> tuple[str, int]:
    """Choose how n ranks broadcast an array in the least time.

    This function sends nothing. The grader runs the broadcast that you choose, on virtual ranks
    with these links, and measures its time.

        "binomial"              a tree
        "scatter_all_gather"    a scatter along a tree, then an all-gather in a ring
        "pipelined_chain"       a chain, in segments

    Args:
        n: the number of ranks, 2 or more.
        nbytes: the size of the array in bytes.
        latency: α, the seconds that a message takes in addition to the transfer of its bytes.
        bandwidth: 1/β, the bytes per second of a link.

    Returns:
        The name of the algorithm, and the number of segments, a whole number of 1 or more. Only
        "pipelined_chain" uses that number.

    Your choice may take up to 5 % longer than the best one. Lesson 02 has a table of what these
    algorithms cost.

    Points: 20 % value, 80 % steps.
    """
    raise NotImplementedError("choose_broadcast is not written yet")
