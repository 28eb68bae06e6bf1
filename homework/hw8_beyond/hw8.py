"""Homework 8: long sequences, experts, meshes, and programs with a fault.

In exercises 21 and 22 use dist.send, dist.recv, dist.isend and dist.irecv alone. n is the number of
ranks, and all floating-point numbers are float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# ---- 21: the time of one long sequence is cut over the ranks ----

# (q, k, v, causal) → (out, lse), for one block of keys
Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (dout, q, k, v, out, lse, causal) → (dq, dk, dv), for one block of keys
AttendBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def decode_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one new query to the keys and values of all ranks.

    A language model that writes a long text keeps the keys and values of all tokens so far (the KV
    cache). Here each rank has some of them.

        rank 0   q ·  k₀ … k₃  ─┐
                                ├─ a few numbers ──▶ the same result on every rank
        rank 1   q ·  k₄ … k₉  ─┘

    Args:
        q: (heads, d), of the newest token, the same on every rank.
        k, v: (heads, time here, d), of this rank's tokens. Ranks may have different numbers of
            them, and at least one.

    Returns:
        (heads, d): softmax(q·kᵀ / √d)·v over the positions of all ranks, the same on every rank.

    Scores may be large: exp(1000) is infinite. To each other rank go at most d + 2 numbers for each
    head, however many positions there are.

    Points: 40 % value, 60 % bytes.
    """
    raise NotImplementedError("decode_attention is not written yet")


def ring_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: list[int], attend: Attend
) -> tuple[Tensor, Tensor]:
    """Causal attention over a sequence that is cut along time: K and V go round a ring.

                     step 0    step 1    step 2         the block of K and V that a rank holds
        rank 0  q₀     k₀        k₂        k₁           k₁ and k₂ are the future of q₀
        rank 1  q₁     k₁        k₀        k₂
        rank 2  q₂     k₂        k₁        k₀

    Args:
        q, k, v: (heads, time here, d), this rank's positions. Rank 0 has the first ones.
        sizes: how many positions each rank has.
        attend: attend(q, k, v, causal) gives (out, lse) for one block of keys: the result of
            softmax(q·kᵀ / √d)·v, and for each query the log of Σ exp(score), as flash attention
            does. With causal=True, query i of this call sees its keys 0 to i. Call it for each
            block that is needed.

    Returns:
        out: (heads, time here, d), where each query sees all positions up to its own.
        lse: (heads, time here), the log of each query's Σ exp(score) over all these positions. The
            backward pass needs it.

    K and V make n − 1 exchanges, in one message or in two, and then stop. A rank never holds more
    than a few blocks of them. The next block travels while the present one is computed.

    Points: 15 % value, 10 % bytes, 5 % steps, 50 % memory, 20 % overlap.
    """
    raise NotImplementedError("ring_attention_forward is not written yet")


def ring_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sizes: list[int],
    attend_backward: AttendBackward,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of ring attention.

    Args:
        dout: (heads, time here, d), the gradient of this rank's out.
        q, k, v, sizes: as in forward.
        out, lse: what forward returned on this rank. They are given here and are right, so you can
            write this exercise before the other.
        attend_backward: attend_backward(dout, q, k, v, out, lse, causal) gives what one block of
            keys adds to the gradients of its q, k and v. It computes the weights as
            exp(score − lse), so out and lse are those of the whole row.

    Returns:
        dq, dk, dv: (heads, time here, d), of this rank's positions.

    No rank sends more than n − 1 blocks of K and V, and n blocks of dK and dV. As in forward, no
    rank holds more than a few blocks.

    Points: 40 % value, 40 % bytes, 20 % memory.
    """
    raise NotImplementedError("ring_attention_backward is not written yet")


# ---- 22: a layer's experts are on different ranks ----


def exchange_rows(x: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
    """An all-to-all of uneven sizes, with its backward.

        rank 0   a a b             ──▶   a a c             counts = [2, 1]   received = [2, 1]
        rank 1   c d d d           ──▶   b d d d           counts = [1, 3]   received = [1, 3]

    Args:
        x: (rows, width). First come the rows for rank 0, then those for rank 1, and so on.
        counts: how many rows go to each rank. Some may be 0, or all. Only this rank knows them.

    Returns:
        y: (rows, width), the rows that the ranks have for this one: first those of rank 0, then
            those of rank 1, and so on. A new tensor, through which autograd can go back: write a
            torch.autograd.Function. In backward, the gradient of each row goes back to the rank and
            the place from which the row came.
        received: how many rows came from each rank (and from this rank itself).

    Each row travels once, and its gradient once. All ranks call the function, forward and backward,
    also if they have no rows. x and the gradients stay as they are.

    Points: 40 % value, 60 % bytes.
    """
    raise NotImplementedError("exchange_rows is not written yet")


def mixture_of_experts(
    x: Tensor,
    choice: Tensor,
    gate: Tensor,
    experts: list[Callable[[Tensor], Tensor]],
    sizes: list[int],
) -> Tensor:
    """A layer with experts: each token is computed by the experts that the router chose for it.

        tokens ─ sort ─▶ dispatch ──▶ experts ──▶ combine ─ unsort ─▶ · gate ──▶ y
                         to the ranks that        back to the
                         have the experts         tokens' ranks

    Args:
        x: (tokens, width), this rank's tokens. There may be none.
        choice: (tokens, k), int64: the experts of each token, numbered over all ranks. −1 is a slot
            that was dropped, because its expert was full: it contributes nothing to y, and its
            row doesn't travel.
        gate: (tokens, k): how much the result of each of them counts.
        experts: this rank's experts, in order. Each takes (rows, width) and returns the same shape.
        sizes: how many experts each rank has. Rank 0 has the first ones.

    Returns:
        y: (tokens, width), in the order of x: y[t] = Σ_j gate[t, j] · expert_{choice[t, j]}(x[t]).

    The caller runs backward from a loss of its own on each rank, and the sum of these losses
    counts. x, gate and the parameters of all experts get the gradients of one process. An expert
    computes only the rows that chose it. Each row goes to its expert's rank and back, forward and
    backward. You may send up to two more numbers with each row, and a few to each rank.

    Points: 25 % value, 25 % bytes, 50 % memory. Memory is here: experts compute only the rows
    that chose them.
    """
    raise NotImplementedError("mixture_of_experts is not written yet")


# ---- 23: gradients and their norm on a mesh of three axes ----


def train_on_mesh(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    sizes: dict[str, int],
    cut: set[str],
    partial: set[str],
    max_norm: float,
) -> list[float]:
    """Train on a mesh of three axes: data ("dp"), context ("cp") and tensor parallel ("tp").

        sizes = {"dp": 2, "cp": 1, "tp": 2}            tp 0     tp 1
                                               dp 0   rank 0   rank 1      neighbours along tp
        The last axis runs fastest.            dp 1   rank 2   rank 3      have adjacent ranks

    Args:
        model: this rank's part. Its forward and backward already send all messages that activations
            need, along tp and cp. No message for gradients is sent yet.
        loss_fn: loss_fn(outputs, targets) is the mean loss of these outputs, a scalar.
        optimizer: has all parameters of the model.
        batches: for each step, the whole batch (inputs, targets), the same on all ranks. Inputs and
            targets are (samples, time, features). Cut the samples along dp and the time along cp,
            each into equal pieces in rank order. Ranks along tp need the same piece.
        sizes: the number of ranks along each axis, in the order of the axes.
        cut: the names of the parameters that are cut along tp. Each rank along tp has its own part.
            All other parameters are the same on all ranks.
        partial: the names of those other parameters whose gradient has several parts along tp: each
            rank along tp used the parameter for a part of the time only, so the gradient is the sum
            of their parts. (Those in neither set have the same gradient on all ranks along tp.)
        max_norm: if the norm of the whole model's gradient is larger, multiply all gradients by
            max_norm / norm before the step. It may be math.inf.

    Returns:
        For each step, the norm of the whole model's gradient before clipping: each number of the
        model counts once. It is the same on all ranks.

    Every step equals one process with the whole model and the whole batch. With G bytes of
    gradients on a rank and n ranks along an axis, the rank sends 2(n−1)/n · G bytes along dp, as
    many along cp (or both at once, over dp·cp ranks), and along tp only what `partial` needs, plus
    a few numbers. You may use all collectives of torch.distributed, and dist.new_group. (All ranks
    must call new_group for all groups, in the same order.)

    Points: 40 % value, 40 % bytes, 20 % memory. Memory is here: each rank computes only its
    share.
    """
    raise NotImplementedError("train_on_mesh is not written yet")


def bus_bandwidth(
    kind: str,
    start: Callable[[], Any],
    given: Tensor,
    result: Tensor,
    clock: Callable[[], float],
    repeats: int,
) -> float:
    """Measure the bus bandwidth of a collective, as nccl-tests defines it.

        bus bandwidth = factor · S / t        comparable with the links' bandwidth, for any n

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "reduce".
        start: start() starts the collective and returns its work. The first call also sets up the
            connections, which takes much longer.
        given: this rank's input.
        result: this rank's output. For all_reduce, broadcast and reduce it is the input's tensor.
        clock: clock() is the time on this rank's clock, in seconds.
        repeats: t is the mean time of so many calls.

    Returns:
        The bus bandwidth in bytes per second. S is the size of the whole array in bytes, and the
        factor depends on the collective: see doc/PERFORMANCE.md of NVIDIA's nccl-tests.

    The ranks don't begin at the same time. What only happens once doesn't count.
    """
    raise NotImplementedError("bus_bandwidth is not written yet")


def find_hang(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out why a run hangs, from its record.

    Every rank ran the same program, one rank did something else in one step, and now all wait.

    Args:
        record: for each rank, what it did, in the order of its program. Each entry is a dict:
            "call": "send", "recv" or "all_reduce", or the name of a part that computes;
            "line": of the program; "peer": the other rank of a message; "group": the name of the
            process group; "nbytes"; "posted" and "end": times in seconds. "end" is None for a call
            that has not ended.

    Returns:
        The rank that did something else; the line; the cause. That is one of
        "missing call": it left out a send, or the all-reduce of the loss; the line is that of the
            call;
        "different order": it made the all-reduces of two buckets in the other order, and the line
            is theirs. (The record of a left-out bucket would look the same: that doesn't occur.)
        "wrong peer": it sent to another rank than it should, and the line is that of the send.
    """
    raise NotImplementedError("find_hang is not written yet")


def find_slow(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out who makes a run slow, from its record.

    One rank does something in every step that slows down all of them. (Another rank was slow once.
    That happens, and is not the fault.)

    Args:
        record: as for `find_hang`. All calls have ended.

    Returns:
        The rank; the line; the cause. That is one of
        "slow compute": a part that computes takes longer than on the other ranks;
        "large message": it sends more bytes than the other ranks;
        "late send": it sends only after it has received, and the line is that of the send.
    """
    raise NotImplementedError("find_slow is not written yet")


def find_wrong(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out which replica of data parallel training goes wrong first, from written values.

    Args:
        record: for each rank, the values that it wrote down, in the order of its program. Each
            entry is a dict: "line": of the program; "name": "local gradient" (before the
            all-reduce), "gradient" (after it) or "weights" (after the update); "value": a list of
            numbers.

    Returns:
        The first rank whose gradient or weights are wrong; the line where it wrote the first wrong
        value; the cause. That is one of
        "not summed": the gradient is this rank's own;
        "divided twice": the gradient was divided by the number of ranks twice;
        "stale gradient": the gradient is that of the step before;
        "skipped update": the weights were not updated.
    """
    raise NotImplementedError("find_wrong is not written yet")
