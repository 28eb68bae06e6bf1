"""Carries out torch's own collectives on the sim: the bytes they move, and the time they take.

A collective starts when the last rank has called it, and takes as long as a ring algorithm. p is
the number of ranks and V the total number of bytes (the largest that any rank puts in or gets out).
α and β are the latency and the seconds per byte of the slowest hop between neighbours in the
group's order:

    all_reduce               2(p−1)α + 2(p−1)/p·V·β    (Thakur, Rabenseifner, Gropp 2005)
    all_gather, reduce_scatter, gather, scatter, all_to_all
                             (p−1)α + (p−1)/p·V·β
    broadcast, reduce        (p−1)α + V·β              (a chain, pipelined in very small pieces)
    barrier                  2(p−1)α                   (an all_reduce of zero bytes)

It is `ring_cost` of cost/closed_forms.py, and ignores other traffic on the links. To see a
collective contend for links, write it with isend and irecv, or use parallel101's own collectives,
which are written that way. A hop between nodes has the speed of one of their rails. (NCCL runs
several rings at once, and they use all.) How ranks wait for each other in a collective is in
group.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from parallel101.cost.closed_forms import ring_cost
from parallel101.laboratory.record.signatures import COLLECTIVES, flat, layout
from parallel101.laboratory.record.units import listed
from parallel101.laboratory.sim.network import Router


class Buffers(NamedTuple):
    """The inputs and outputs of one rank's call, piece by piece, each flat: see `whole`.

    A coalesced collective has several of these.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


# ── The buffers of a call


def buffers_of(method: str, args: Sequence[Any], p: int) -> list[Buffers]:
    """Return the buffers of one rank's call of the process group's `method`."""
    spec = COLLECTIVES[method]
    kind = spec.kind
    if kind == "barrier":
        return []
    if len(spec.depths) == 1:  # in place
        return [Buffers([whole(tensor)], [whole(tensor)]) for tensor in args[0]]
    calls: Iterable[tuple[Any, Any]]
    if spec.depths == (0, 0) or kind == "all_to_all":
        calls = [(args[0], args[1])]
    elif kind in ("gather", "scatter"):  # on ranks other than the root, a list may be empty
        calls = [(flat(args[0]), flat(args[1]))]
    elif method == "allgather_coalesced":  # the outputs are ordered by rank, then by tensor
        outputs, inputs = args[:2]
        calls = [([row[i] for row in outputs if i < len(row)], x) for i, x in enumerate(inputs)]
    else:  # one, or several coalesced
        calls = zip(*args[:2], strict=True)
    out_rows, in_rows = args[2:4] if spec.splits else ((), ())
    spread = _SPREAD[kind]

    def side(name: str, tensors: Any, rows: Sequence[int]) -> list[torch.Tensor]:
        if isinstance(tensors, torch.Tensor) and name in spread:
            return pieces(tensors, p, rows)
        return [whole(tensor) for tensor in flat(tensors)]

    return [Buffers(side("inputs", x, in_rows), side("outputs", y, out_rows)) for y, x in calls]


# what torch's backends take (ProcessGroupGloo.cpp, GENERATE_ALL_TYPES; NCCL.cpp, ncclDataType)
GLOO_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64, torch.complex128}
)
NCCL_DTYPES = GLOO_DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}


def check_dtypes(kind: str, tensors: Iterable[torch.Tensor], taken: frozenset[torch.dtype]) -> None:
    """Raise RuntimeError, as torch's backends do, for a dtype that they do not take."""
    for tensor in tensors:
        if tensor.dtype not in taken and not tensor.is_meta:
            raise RuntimeError(
                f"{kind} of {tensor.dtype}, but torch's collectives take only "
                f"{listed(sorted(map(str, taken)))}: convert the tensor"
            )


def check_buffers(kind: str, buffers: Sequence[Buffers], p: int, at_root: bool) -> None:
    """Raise RuntimeError, as gloo does, for tensors that aren't one of one size for each rank.

    (What an all-to-all gives and expects may differ: the ranks compare it.)
    """
    for given in buffers:
        for side in _SPREAD.get(kind, ()):
            count = len(getattr(given, side))
            if count != p and (at_root or kind not in ("gather", "scatter")):
                raise RuntimeError(
                    f"{kind}'s list of {side} has {count} tensor{'s' * (count != 1)}, and the "
                    f"group has {p} rank{'s' * (p != 1)}: pass one tensor for each rank"
                )
        tensors = (*given.inputs, *given.outputs)
        facts = {"dtypes": {str(t.dtype) for t in tensors}}
        if kind != "all_to_all":
            facts["sizes"] = {str(t.numel()) for t in tensors}
        for what, different in facts.items():
            if len(different) > 1:
                raise RuntimeError(
                    f"{kind}'s tensors have different {what}: {listed(sorted(different))}. Pass "
                    "tensors of one dtype, and of one size for all ranks"
                )


# the sides of a call that have a piece for each rank
_SPREAD = {
    "all_gather": ("outputs",),
    "gather": ("outputs",),
    "scatter": ("inputs",),
    "reduce_scatter": ("inputs",),
    "all_to_all": ("inputs", "outputs"),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in the order of its memory, which they share.

    It lacks the tensor's autograd history and version counter.
    """
    return tensor.data.as_strided((tensor.numel(),), (1,))


def pieces(tensor: torch.Tensor, p: int, rows: Sequence[int] = ()) -> list[torch.Tensor]:
    """Split a tensor along dim 0 into p pieces, equally or with the given numbers of rows."""
    if layout(tensor) and not str(layout(tensor)).startswith("dim order (0,"):
        raise RuntimeError("Tensors must be contiguous, as they are split along dim 0")
    if not rows:
        if tensor.numel() % p:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be split into {p} equal pieces, "
                "one for each rank"
            )
        sizes = [tensor.numel() // p] * p
    else:
        length = tensor.shape[0] if tensor.dim() else 1
        if len(rows) != p or sum(rows) != length:
            raise RuntimeError(
                f"split sizes {list(rows)} do not fit {p} ranks and a tensor of {length} rows: "
                f"pass one size for each rank, {length} in total"
            )
        sizes = [n * (tensor.numel() // max(length, 1)) for n in rows]
    return [*whole(tensor).split(sizes)]


# ── The data movement


class Move(NamedTuple):
    """One output buffer, and the input buffers that make it.

    There is one to copy, or those of all ranks to reduce.
    """

    position: int  # of the rank that gets it, in the group
    output: torch.Tensor
    inputs: list[torch.Tensor]


def moves_of(kind: str, ranks: Sequence[Buffers], root: int | None) -> list[Move]:
    """Return the moves of a collective: which rank gets what from which ranks."""
    moves: list[Move] = []
    senders = ranks if root is None or kind not in ("broadcast", "scatter") else [ranks[root]]
    for me, own in enumerate(ranks):
        if (kind in ("reduce", "gather") and me != root) or (kind == "broadcast" and me == root):
            continue
        piece = me if "inputs" in _SPREAD.get(kind, ()) else 0
        inputs = [sender.inputs[piece] for sender in senders]
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            moves.append(Move(me, own.outputs[0], inputs))
        else:
            moves += [Move(me, y, [x]) for y, x in zip(own.outputs, inputs, strict=True)]
    return moves


def execute(moves: Sequence[Move], op: str | None) -> None:
    """Move the bytes.

    A reduction goes in rank order, and all sums are computed before any is written.
    """
    moves = [move for move in moves if move.output.numel() and not move.output.is_meta]
    sums: dict[tuple[int, ...], torch.Tensor] = {}  # all ranks of an all-reduce share one
    for move in moves if op is not None else ():
        key = tuple(given.data_ptr() for given in move.inputs)
        sums[key] = sums[key] if key in sums else reduced(move.inputs, str(op))
    # a tensor that was made in inference mode can be written only there
    with torch.inference_mode(any(move.output.is_inference() for move in moves)):
        for _, output, inputs in moves:
            given = sums[tuple(given.data_ptr() for given in inputs)] if sums else inputs[0]
            output.view(torch.uint8).copy_(given.view(torch.uint8))


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


_BITWISE = ("band", "bor", "bxor")


def sum_sparse(ranks: Sequence[Sequence[torch.Tensor]]) -> None:
    """All-reduce sparse tensors: each rank's becomes the sum, coalesced, as on gloo."""
    for tensors in zip(*ranks, strict=True):
        first, *others = (tensor.detach().coalesce() for tensor in tensors)
        total = sum(others, start=first).coalesce()
        for tensor in tensors:
            tensor.copy_(total)


def check_reduction(
    op: str, tensors: Iterable[torch.Tensor], averages_integers: bool = False
) -> None:
    """Raise RuntimeError, as gloo does, for a reduction that these tensors do not have.

    Args:
        averages_integers: as NCCL does (ncclDevSumPostDiv in its src/enqueue.cc).
    """
    if op not in _REDUCTIONS:
        raise RuntimeError(
            f"the sim backend does not have the reduction {op!r}; it has {', '.join(_REDUCTIONS)}"
        )
    for tensor in tensors:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if op == "avg" and whole and (tensor.dtype == torch.bool or not averages_integers):
            raise RuntimeError(
                f"the average of {tensor.dtype} values is not defined on sim, nor on gloo: use a "
                "sum, and divide it"
            )
        if op in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
            raise RuntimeError(
                f"the reduction {op!r} works on the bits of whole numbers, and these are "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )


def reduced(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of all ranks' values, from rank 0 upwards, in their own dtype."""
    total = values[0].clone()
    for value in values[1:]:
        total = _REDUCTIONS[op](total, value)
    if op != "avg":
        return total
    if not (total.is_floating_point() or total.is_complex()):  # towards zero, as NCCL rounds
        return total.div(len(values), rounding_mode="trunc")
    return total / len(values)


# ── The time


def duration(kind: str, ranks: Sequence[int], nbytes: int, route: Router) -> float:
    """Return the seconds that the collective takes, by the closed forms above."""
    p = len(ranks)
    if p == 1:
        return 0.0
    hops = [route(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
    latency, bandwidth = max(hop.latency for hop in hops), min(hop.bandwidth for hop in hops)
    return ring_cost(kind, p, nbytes).seconds(latency, bandwidth)
