"""Homework 8: long sequences, experts, meshes, and programs with a fault.

In exercises 21 and 22, use only dist.send, dist.recv, dist.isend and dist.irecv. n is the number of
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
    """Attend with one new query to the keys and values of all ranks.

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

    Scores may be large: exp(1000) is infinite. Send each other rank at most d + 2 numbers per head,
    however many positions there are.

    Points: 40 % value, 60 % bytes.
    """
    raise NotImplementedError("decode_attention is not written yet")


def ring_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: list[int], attend: Attend
) -> tuple[Tensor, Tensor]:
    """Compute causal attention over a sequence that is cut along time: K and V go round a ring.

                     step 0    step 1    step 2         the block of K and V that a rank holds
        rank 0  q₀     k₀        k₂        k₁           k₁ and k₂ are the future of q₀
        rank 1  q₁     k₁        k₀        k₂
        rank 2  q₂     k₂        k₁        k₀

    Args:
        q, k, v: (heads, time here, d), this rank's positions. Rank 0 has the first ones.
        sizes: how many positions each rank has.
        attend: attend(q, k, v, causal) returns (out, lse) for one block of keys: the result of
            softmax(q·kᵀ / √d)·v, and for each query the log of Σ exp(score), as flash attention
            does. With causal=True, query i of this call sees its keys 0 to i. Call it for each
            block that is needed.

    Returns:
        out: (heads, time here, d), where each query sees all positions up to its own.
        lse: (heads, time here), the log of each query's Σ exp(score) over all these positions. The
            backward pass needs it.

    K and V are exchanged n − 1 times, in one message or in two. A rank never holds more than a few
    blocks of them. The next block is in flight while the current one is computed.

    Points: 20 % value, 10 % bytes, 5 % steps, 15 % memory, 50 % overlap. The overlap counts only if
    no rank holds more than a few blocks.
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
    """Compute the backward pass of ring attention.

    Args:
        dout: (heads, time here, d), the gradient of this rank's out.
        q, k, v, sizes: as in forward.
        out, lse: what forward returned on this rank. The correct tensors are passed in, so you can
            write this exercise before the other.
        attend_backward: attend_backward(dout, q, k, v, out, lse, causal) returns what one block of
            keys adds to the gradients of its q, k and v. It computes the weights as
            exp(score − lse), so out and lse are those of the whole row.

    Returns:
        dq, dk, dv: (heads, time here, d), of this rank's positions.

    No rank sends more than n − 1 blocks of K and V, and n blocks of dK and dV. As in the forward
    pass, no rank holds more than a few blocks.

    Points: 25 % value, 25 % bytes, 50 % memory.
    """
    raise NotImplementedError("ring_attention_backward is not written yet")


# ---- 22: a layer's experts are on different ranks ----


def exchange_rows(x: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
    """Exchange uneven numbers of rows between all ranks, with a backward pass.

        rank 0   a a b             ──▶   a a c             counts = [2, 1]   received = [2, 1]
        rank 1   c d d d           ──▶   b d d d           counts = [1, 3]   received = [1, 3]

    Args:
        x: (rows, width): the rows for rank 0, then those for rank 1, and so on.
        counts: how many rows go to each rank. Some or all may be 0. Only this rank knows them.

    Returns:
        y: (rows, width), the rows sent to this rank: first those of rank 0, then those of rank 1,
            and so on. It is a new tensor with a graph: write a torch.autograd.Function. In the
            backward pass, the gradient of each row returns to the row's own rank and position.
        received: how many rows came from each rank (and from this rank itself).

    Each row travels once, and its gradient once. Every rank calls it, forward and backward, even
    with no rows. Don't change x or the gradients in place.

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
    """Compute a layer with experts: each token goes to the experts that the router chose for it.

        tokens ─ sort ─▶ dispatch ──▶ experts ──▶ combine ─ unsort ─▶ · gate ──▶ y
                         to the ranks that        back to the
                         have the experts         tokens' ranks

    Args:
        x: (tokens, width), this rank's tokens. There may be none.
        choice: (tokens, k), int64: the experts of each token, numbered over all ranks. −1 marks a
            choice that was dropped because its expert was full: it adds nothing to y, and no row
            is sent for it.
        gate: (tokens, k): the weight of each expert's result.
        experts: this rank's experts, in order. Each takes (rows, width) and returns the same shape.
        sizes: how many experts each rank has. Rank 0 has the first ones.

    Returns:
        y: (tokens, width), in the order of x: y[t] = Σ_j gate[t, j] · expert_{choice[t, j]}(x[t]).

    Each rank calls backward() on a loss of its own, and the objective is the sum of these losses.
    x, gate and the parameters of all experts get the same gradients as in one process. An expert
    computes only the rows that chose it. Each row goes to its expert's rank and back, forward and
    backward. You may send up to two more numbers with each row, and a few to each rank.

    Points: 25 % value, 25 % bytes, 50 % memory. Memory means that experts compute only the rows
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
        model: this rank's part. Its forward and backward already send the messages for activations,
            along tp and cp, but none for gradients.
        loss_fn: loss_fn(outputs, targets) is the mean loss of these outputs, a scalar.
        optimizer: updates all parameters of the model.
        batches: for each step, the whole batch (inputs, targets), the same on all ranks. Inputs and
            targets are (samples, time, features). Cut the samples along dp and the time along cp,
            each into equal pieces in rank order. Ranks along tp need the same piece.
        sizes: the number of ranks along each axis, in the order of the axes.
        cut: the names of the parameters that are cut along tp. Each rank along tp has its own part.
            All other parameters are the same on all ranks.
        partial: the names of the replicated parameters that each rank along tp used for only some
            positions, so that their gradient is the sum of the ranks' parts. (Parameters in neither
            set have the same gradient on all ranks along tp.)
        max_norm: if the norm of the whole model's gradient is larger, multiply all gradients by
            max_norm / norm before the step. It may be math.inf.

    Returns:
        For each step, the norm of the whole model's gradient before clipping. It counts each
        parameter once, and is the same on all ranks.

    Every step equals that of one process with the whole model and the whole batch. With G bytes of
    gradients on a rank and n ranks along an axis, the rank sends 2(n−1)/n · G bytes along dp, as
    many along cp (or both at once, over dp·cp ranks), and along tp only what `partial` needs, plus
    a few numbers. You may use all collectives of torch.distributed, and dist.new_group. (All ranks
    must call new_group for all groups, in the same order.)

    Points: 55 % value, 30 % bytes, 15 % memory. Memory means that each rank computes only its
    share. Most of the value is the norm.
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
        repeats: t is the mean over this many calls.

    Returns:
        The bus bandwidth in bytes per second. S is the size of the whole array in bytes, and the
        factor depends on the collective: see doc/PERFORMANCE.md of NVIDIA's nccl-tests.

    The ranks don't start at the same time. Anything that happens only once, such as connecting,
    doesn't count.
    """
    raise NotImplementedError("bus_bandwidth is not written yet")


def find_hang(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out why a run hangs, from its record.

    Every rank ran the same program. One rank deviated in one step, and now all are stuck.

    Args:
        record: for each rank, what it did, in the order of its program. Each entry is a dict:
            "call": "send", "recv" or "all_reduce", or the name of a part that computes;
            "line": of the program; "peer": the other rank of a message; "group": the name of the
            process group; "nbytes"; "posted" and "end": times in seconds. "end" is None for a call
            that has not ended.

    Returns:
        The rank that deviated; the line; the cause, which is one of
        "missing call": it left out a send, or the all-reduce of the loss; the line is that of the
            call;
        "different order": it made the all-reduces of two buckets in the other order, and the line
            is theirs. (The record of a left-out bucket would look the same, so no program has one.)
        "wrong peer": it sent to the wrong rank, and the line is that of the send.
    """
    raise NotImplementedError("find_hang is not written yet")


def find_slow(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out which rank makes a run slow, from its record.

    In every step, one rank does something that slows all of them down. (Another rank was slow once,
    which isn't the fault.)

    Args:
        record: as for `find_hang`. All calls have ended.

    Returns:
        The rank; the line; the cause, which is one of
        "slow compute": a part that computes takes longer than on the other ranks;
        "large message": it sends more bytes than the other ranks;
        "late send": it sends only after it has received, and the line is that of the send.
    """
    raise NotImplementedError("find_slow is not written yet")


def find_wrong(record: list[list[dict[str, Any]]]) -> tuple[int, int, str]:
    """Find out which replica of data parallel training goes wrong first, from the values it logged.

    Args:
        record: for each rank, the values that it logged, in the order of its program. Each
            entry is a dict: "line": of the program; "name": "local gradient" (before the
            all-reduce), "gradient" (after it) or "weights" (after the update); "value": a list of
            numbers.

    Returns:
        The first rank whose gradient or weights are wrong; the line where it logged the first wrong
        value; the cause, which is one of
        "not summed": the gradient is this rank's own;
        "divided twice": the gradient was divided by the number of ranks twice;
        "stale gradient": the gradient is that of the step before;
        "skipped update": the weights were not updated.
    """
    raise NotImplementedError("find_wrong is not written yet")
