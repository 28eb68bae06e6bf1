"""torch's own collectives on the sim: one event a rank, whose data is moved when the last rank has come and the time has passed.

A collective starts when its last member has posted it and takes what a ring would, p ranks, V bytes in all (the largest of what any
rank puts in or gets out), α and β the latency and seconds a byte of the slowest hop between neighbours in the group's order:

    all_reduce               2(p−1)α + 2(p−1)/p·V·β       (Thakur, Rabenseifner, Gropp 2005)
    all_gather, reduce_scatter, gather, scatter, all_to_all       (p−1)α + (p−1)/p·V·β
    broadcast, reduce        (p−1)α + V·β                 (a chain, pipelined as finely as one likes)
    barrier                  2(p−1)α                      (an all_reduce of nothing)

It is one closed form, without the traffic of others: write a collective over isend and irecv to see it contend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from parallel101.sim.network import Router


class Block(NamedTuple):
    """Contiguous memory of a tensor, or of a piece of one."""

    pointer: int
    nbytes: int
    dtype: torch.dtype

    def values(self) -> torch.Tensor:
        """The memory itself as a flat tensor, free of whatever the rank's own tensor carries (autograd, versions, subclasses)."""
        if not self.nbytes:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.pointer), dtype=self.dtype)


class Part(NamedTuple):
    """What one rank puts in and what it wants out, piece by piece. A coalesced collective has several parts."""

    inputs: list[Block]
    outputs: list[Block]


def whole(tensor: torch.Tensor) -> Block:
    return Block(tensor.data_ptr(), tensor.nbytes, tensor.dtype)


def pieces(tensor: torch.Tensor, p: int, rows: Sequence[int] = ()) -> list[Block]:
    """The tensor cut along dim 0 into p pieces: of so many rows each, or equal ones."""
    if not rows:
        if tensor.numel() % p:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot be cut into {p} pieces of equal size, one a rank")
        sizes = [tensor.nbytes // p] * p
    else:
        length = tensor.shape[0] if tensor.dim() else 1
        if len(rows) != p or sum(rows) != length:
            raise ValueError(f"split sizes {list(rows)} do not fit {p} ranks and a tensor of {length} rows: one a rank, in all {length}")
        sizes = [n * (tensor.nbytes // length if length else 0) for n in rows]
    start, blocks = tensor.data_ptr(), []
    for size in sizes:
        blocks.append(Block(start, size, tensor.dtype))
        start += size
    return blocks


def parts_of(method: str, args: Sequence[Any], p: int) -> list[Part]:
    """The parts of one rank's call of the process group's `method`."""
    if method in ("broadcast", "allreduce", "allreduce_coalesced", "reduce"):
        return [Part([whole(tensor)], [whole(tensor)]) for tensor in args[0]]
    if method == "barrier":
        return []
    if method == "alltoall":
        return [Part([whole(t) for t in args[1]], [whole(t) for t in args[0]])]
    if method in ("all_to_all_single", "alltoall_base"):
        return [Part(pieces(args[1], p, args[3]), pieces(args[0], p, args[2]))]
    if method in ("all_gather_single", "_allgather_base"):
        return [Part([whole(args[1])], pieces(args[0], p))]
    if method in ("reduce_scatter_single", "_reduce_scatter_base"):
        return [Part(pieces(args[1], p), [whole(args[0])])]
    if method in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        return [Part([whole(given)], pieces(wanted, p)) for wanted, given in zip(*args[:2], strict=True)]
    if method in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        return [Part(pieces(given, p), [whole(wanted)]) for wanted, given in zip(*args[:2], strict=True)]
    if method == "allgather":
        return [Part([whole(given)], [whole(t) for t in wanted]) for wanted, given in zip(*args[:2], strict=True)]
    if method == "allgather_coalesced":  #  the outputs stand by rank, then by tensor
        return [Part([whole(given)], [whole(row[i]) for row in args[0]]) for i, given in enumerate(args[1])]
    if method == "gather":
        return [Part([whole(args[1][0])], [whole(t) for wanted in args[0] for t in wanted])]
    if method == "scatter":
        return [Part([whole(t) for given in args[1] for t in given], [whole(args[0][0])])]
    if method == "reduce_scatter":
        return [Part([whole(t) for t in given], [whole(wanted)]) for wanted, given in zip(*args[:2], strict=True)]
    raise NotImplementedError(f"the sim does not have the collective {method}")


Pair = tuple[Block, list[Block]]  #  where to, and what from: one block, or those of all ranks to be reduced


def plan(kind: str, members: Sequence[Part], root: int | None) -> list[tuple[int, Pair]]:
    """Who gets what from where: for each output block its rank and the input blocks that make it."""
    moves: list[tuple[int, Pair]] = []
    for me, part in enumerate(members):
        if kind == "all_reduce" or (kind == "reduce" and me == root):
            moves.append((me, (part.outputs[0], [other.inputs[0] for other in members])))
        elif kind == "broadcast" and root is not None and me != root:
            moves.append((me, (part.outputs[0], [members[root].inputs[0]])))
        elif kind == "scatter" and root is not None:
            moves.append((me, (part.outputs[0], [_piece(members[root].inputs, me)])))
        elif kind == "reduce_scatter":
            moves.append((me, (part.outputs[0], [_piece(other.inputs, me) for other in members])))
        elif kind == "all_gather" or (kind == "gather" and me == root):
            moves += [(me, (_piece(part.outputs, them), [other.inputs[0]])) for them, other in enumerate(members)]
        elif kind == "all_to_all":
            moves += [(me, (_piece(part.outputs, them), [_piece(other.inputs, me)])) for them, other in enumerate(members)]
    return moves


def carry_out(moves: Sequence[tuple[int, Pair]], op: str | None) -> None:
    """Move the bytes, reducing in rank order where there are several. All is computed before anything is written where it reduces."""
    done: dict[tuple[int, ...], torch.Tensor] = {}  #  all ranks of an all-reduce want the same sum
    for _, (_, sources) in moves:
        key = tuple(block.pointer for block in sources)
        if op is not None and key not in done and sources[0].nbytes:
            done[key] = reduced([block.values() for block in sources], op)
    for _, (goal, sources) in moves:
        if goal.nbytes and op is not None:
            ctypes.memmove(goal.pointer, done[tuple(block.pointer for block in sources)].data_ptr(), goal.nbytes)
        elif goal.nbytes:
            ctypes.memmove(goal.pointer, sources[0].pointer, goal.nbytes)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def check_reduction(op: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raises ValueError for a reduction that these tensors do not have."""
    if op not in _STEPS:
        raise ValueError(f"the sim does not have the reduction {op!r}; it has {', '.join(_STEPS)}")
    for tensor in tensors:
        if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"the average of {tensor.dtype} values is no {tensor.dtype} value, and gloo has none either: sum, and divide")


def reduced(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """All ranks' values in one, from rank 0 upwards, in their own dtype."""
    total = values[0].clone()
    for value in values[1:]:
        total = _STEPS[op](total, value)
    return total / len(values) if op == "avg" else total


def duration(kind: str, ranks: Sequence[int], nbytes: int, route: Router) -> float:
    """Seconds the collective takes: the closed forms above."""
    p = len(ranks)
    if p == 1:
        return 0.0
    hops = [route(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
    latency = (p - 1) * max(hop.latency for hop in hops)
    all_bytes = nbytes / min(hop.bandwidth for hop in hops)
    if kind == "all_reduce":
        return 2 * latency + 2 * (p - 1) / p * all_bytes
    if kind == "barrier":
        return 2 * latency
    return latency + (all_bytes if kind in ("broadcast", "reduce") else (p - 1) / p * all_bytes)


def _piece(blocks: Sequence[Block], which: int) -> Block:
    if which >= len(blocks):
        raise ValueError(f"a list of {len(blocks)} tensors has none for position {which} of the group: it needs one a rank")
    return blocks[which]
