"""Homework 8: beyond."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


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
        "missing call": it left out a call, and the line is that of the call;
        "different order": it made two calls in the other order, and the line is that of the first;
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
