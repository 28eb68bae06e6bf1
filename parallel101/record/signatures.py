"""What a call of torch's own collectives says: which tensors, how many bytes, which reduction, which root.

The table is the one place that knows how c10d spells its collectives, on gloo, NCCL and sim alike. c10d renames them from time to time
(torch 2.13 has all_gather_single for _allgather_base), so an entry lists the names a backend may know it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

WHOLE = 1 << 20  #  bytes up to which a copy of what is being sent is kept, to see whether it changed; beyond, a sample
SAMPLE = 1024


class Told(NamedTuple):
    """What a collective's arguments say."""

    tensors: list[torch.Tensor]  #  what the ranks put in (for scatter and all-gather's payload: see Spec)
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str | None
    root: int | None  #  position in the group


class Spec(NamedTuple):
    """How a c10d method is called: the positions of the argument that goes in, of the one that comes out, and of the one whose shape must
    be the same on all ranks."""

    kind: str
    names: tuple[str, ...]
    inputs: int | None
    outputs: int | None
    compare: int | None

    def describe(self, args: tuple) -> Told:
        ins = flat(args[self.inputs]) if self.inputs is not None and len(args) > self.inputs else []
        outs = flat(args[self.outputs]) if self.outputs is not None and len(args) > self.outputs else []
        compared = flat(args[self.compare]) if self.compare is not None and len(args) > self.compare else []
        options = args[-1] if args else None
        op = getattr(options, "reduceOp", None)
        nbytes = max(sum(t.nbytes for t in ins), sum(t.nbytes for t in outs))
        some = next(iter(compared or ins or outs), None)
        return Told(
            ins or outs,
            nbytes,
            tuple(compared[0].shape) if compared else (),
            "" if some is None else str(some.dtype).removeprefix("torch."),
            None if op is None else op_name(op),
            getattr(options, "rootRank", None) if self.kind in ROOTED else None,
        )

    def kept(self, args: tuple, at_root: bool) -> list[torch.Tensor]:
        """The tensors that an asynchronous call reads and does not write: what another tensor of the call shares memory with may change."""
        if self.inputs is None or not getattr(args[-1], "asyncOp", True):
            return []
        if self.outputs is None:
            return flat(args[self.inputs]) if self.kind == "broadcast" and at_root else []
        written = {tensor.untyped_storage().data_ptr() for tensor in flat(args[self.outputs])}
        return [tensor for tensor in flat(args[self.inputs]) if tensor.untyped_storage().data_ptr() not in written]


def shares(args: tuple, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Of an all-to-all's arguments: the bytes it gives to each of the group's ranks, and those it expects of each."""
    outs, ins, *splits = args
    if not isinstance(ins, torch.Tensor):
        given, taken = [t.nbytes for t in ins], [t.nbytes for t in outs]
    else:
        given, taken = (
            [n * whole.nbytes // max(1, len(whole)) for n in split] or [whole.nbytes // len(ranks)] * len(ranks)
            for whole, split in ((ins, splits[1]), (outs, splits[0]))
        )
    return dict(zip(ranks, given)), dict(zip(ranks, taken))


ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def _spec(kind: str, *names: str, inputs: int | None = 0, outputs: int | None = None, compare: int | None = 0) -> Spec:
    return Spec(kind, names, inputs, outputs, compare)


_ALL = [
    _spec("broadcast", "broadcast"),
    _spec("all_reduce", "allreduce"),
    _spec("all_reduce", "allreduce_coalesced"),
    _spec("reduce", "reduce"),
    _spec("all_gather", "allgather", inputs=1, outputs=0, compare=1),
    _spec("all_gather", "all_gather_single", "_allgather_base", inputs=1, outputs=0, compare=1),
    _spec("all_gather", "allgather_coalesced", inputs=1, outputs=0, compare=1),
    _spec("all_gather", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", inputs=1, outputs=0, compare=1),
    _spec("gather", "gather", inputs=1, outputs=0, compare=1),
    _spec("scatter", "scatter", inputs=1, outputs=0, compare=0),
    _spec("reduce_scatter", "reduce_scatter", inputs=1, outputs=0, compare=1),
    _spec("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", inputs=1, outputs=0, compare=1),
    _spec("reduce_scatter", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", inputs=1, outputs=0, compare=1),
    _spec("all_to_all", "all_to_all_single", "alltoall_base", inputs=1, outputs=0, compare=None),
    _spec("all_to_all", "alltoall", inputs=1, outputs=0, compare=None),
    _spec("barrier", "barrier", inputs=None, compare=None),
    _spec("barrier", "monitored_barrier", inputs=None, compare=None),
]
COLLECTIVES: dict[str, Spec] = {name: spec for spec in _ALL for name in spec.names}
"""By the name c10d calls it, old names and new."""

_OPS = {getattr(dist.ReduceOp, name): name.lower() for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def op_name(op: Any) -> str:
    """A ReduceOp's name: "sum", "avg", …"""
    for known, name in _OPS.items():
        if op == known:
            return name
    return "premul_sum"


def flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors in an argument: a tensor, a list of them, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, list | tuple):
        return [tensor for part in tensors for tensor in flat(part)]
    return []


def unfit(tensor: torch.Tensor, what: str) -> str | None:
    """Why a tensor must not be passed to `what`, which reads and writes its memory as it lies, in words; None where it may."""
    if not tensor.is_contiguous():
        return (
            f"a strided tensor to {what}: its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}, and gloo reads and writes "
            "its memory as if it were contiguous. Send x.contiguous(), and receive into a tensor that is"
        )
    if tensor.is_neg() or tensor.is_conj():
        return (
            f"a lazily conjugated or negated tensor to {what}: gloo reads and writes its memory, which holds the conjugate or the negative "
            "of its values. Send x.resolve_conj().resolve_neg(), and receive into a tensor of your own"
        )
    return None


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds now: all of it if it is small, else a sample spread over it, enough to see most changes."""
    return tensor.detach().clone() if tensor.nbytes <= WHOLE else _sample(tensor).clone()


def unchanged(tensor: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether a tensor still holds what `snapshot` saw, to the bit."""
    if before is None or not tensor.numel():
        return True
    if tensor.nbytes > WHOLE:
        return torch.equal(_sample(tensor), before)
    return torch.equal(in_bytes(tensor), in_bytes(before))


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in a row, without a copy where it is contiguous. (One element is, whatever stride it has, which view minds.)"""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    values = in_bytes(tensor)
    return values[:: values.nbytes // SAMPLE | 1]  #  odd: every byte of an element gets its turn
