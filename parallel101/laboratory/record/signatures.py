"""How c10d calls its collectives: the arguments of each method, on gloo, NCCL and sim alike.

    allreduce([x], options)
        ──▶  kind all_reduce, payload x, shape (4,), dtype float32, reduction sum

`COLLECTIVES` is the only place that knows these signatures. torch 2.13 renamed some methods
(all_gather_single was _allgather_base), and ProcessGroup has both names, the gloo of 2.13 the old
ones only, so an entry lists all of them. Also here: which tensors can be sent as they are, and
whether one has changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# bytes up to which a tensor that is being sent is copied, to see whether it changes; of a larger
# one, a sample
WHOLE = 1 << 20
SAMPLE = 1024
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


class CollectiveArguments(NamedTuple):
    """What a rank passed to a collective."""

    tensors: list[torch.Tensor]  # the inputs; on a rank without inputs, the outputs
    nbytes: int
    shape: tuple[int, ...]  # that must be the same on all ranks
    dtype: str
    layout: str  # of their memory, which must be the same on all ranks: see `layout` below
    op: str | None
    root: int | None  # position in the group


class CollectiveSpec(NamedTuple):
    """How a c10d method is called.

    It has the positions of its inputs, of its outputs, and of the tensors whose shape all ranks
    must share.
    """

    kind: str
    names: tuple[str, ...]
    inputs: int | None = 0
    outputs: int | None = None
    compared: int | None = 0

    def arguments(self, args: tuple) -> CollectiveArguments:
        inputs = (
            flat(args[self.inputs]) if self.inputs is not None and len(args) > self.inputs else []
        )
        outputs = (
            flat(args[self.outputs])
            if self.outputs is not None and len(args) > self.outputs
            else []
        )
        compared = (
            flat(args[self.compared])
            if self.compared is not None and len(args) > self.compared
            else []
        )
        options = args[-1] if args else None
        op = getattr(options, "reduceOp", None)
        some = next(iter(compared or inputs or outputs), None)
        return CollectiveArguments(
            tensors=inputs or outputs,
            nbytes=max(sum(map(size, inputs)), sum(map(size, outputs))),
            shape=tuple(compared[0].shape) if compared else (),
            dtype="" if some is None else str(some.dtype).removeprefix("torch."),
            layout="" if some is None else layout(some) or "",
            op=None if op is None else op_name(op),
            root=getattr(options, "rootRank", None) if self.kind in ROOTED else None,
        )

    def unwritten_inputs(self, args: tuple, at_root: bool) -> list[torch.Tensor]:
        """The inputs that an asynchronous call only reads: they must not change until its wait().

        Inputs that share memory with outputs
        may change."""
        if self.inputs is None or not getattr(args[-1], "asyncOp", True):
            return []
        if self.outputs is None:
            return flat(args[self.inputs]) if self.kind == "broadcast" and at_root else []
        written = {id(tensor.untyped_storage()) for tensor in flat(args[self.outputs])}
        return [
            tensor
            for tensor in flat(args[self.inputs])
            if id(tensor.untyped_storage()) not in written
        ]

    def unfit(self, args: tuple, what: str) -> str | None:
        """Why these arguments must not be passed to a collective. None if they may be passed."""
        sums = self.kind == "all_reduce" and op_name(args[-1].reduceOp) == "sum"
        tensors = flat(args)
        problem = next(
            (text for t in tensors if (text := unfit(t, what, permuted=True, sparse=sums))), None
        )
        if (
            problem is None
            and self.outputs is not None
            and len({layout(tensor) for tensor in tensors}) > 1
        ):
            strides = " and ".join(
                sorted({f"{t.stride()} for shape {tuple(t.shape)}" for t in tensors})
            )
            return (
                f"tensors whose dims have different orders in memory to {what}: their strides "
                f"are {strides}, and values are copied in the order of the memory. Pass "
                "x.contiguous(), and receive into contiguous tensors"
            )
        return problem


_SPECS = [
    CollectiveSpec("broadcast", ("broadcast",)),
    CollectiveSpec("all_reduce", ("allreduce",)),
    CollectiveSpec("all_reduce", ("allreduce_coalesced",)),
    CollectiveSpec("reduce", ("reduce",)),
    CollectiveSpec("all_gather", ("allgather",), inputs=1, outputs=0, compared=1),
    CollectiveSpec(
        "all_gather", ("all_gather_single", "_allgather_base"), inputs=1, outputs=0, compared=1
    ),
    CollectiveSpec("all_gather", ("allgather_coalesced",), inputs=1, outputs=0, compared=1),
    CollectiveSpec(
        "all_gather",
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        inputs=1,
        outputs=0,
        compared=1,
    ),
    CollectiveSpec("gather", ("gather",), inputs=1, outputs=0, compared=1),
    # from torch 2.14 on
    CollectiveSpec("gather", ("gather_single",), inputs=1, outputs=0, compared=1),
    CollectiveSpec("scatter", ("scatter",), inputs=1, outputs=0, compared=0),
    CollectiveSpec("reduce_scatter", ("reduce_scatter",), inputs=1, outputs=0, compared=1),
    CollectiveSpec(
        "reduce_scatter",
        ("reduce_scatter_single", "_reduce_scatter_base"),
        inputs=1,
        outputs=0,
        compared=1,
    ),
    CollectiveSpec(
        "reduce_scatter",
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        inputs=1,
        outputs=0,
        compared=1,
    ),
    CollectiveSpec(
        "all_to_all", ("all_to_all_single", "alltoall_base"), inputs=1, outputs=0, compared=None
    ),
    CollectiveSpec("all_to_all", ("alltoall",), inputs=1, outputs=0, compared=None),
    CollectiveSpec("barrier", ("barrier",), inputs=None, compared=None),
    CollectiveSpec("barrier", ("monitored_barrier",), inputs=None, compared=None),
]
COLLECTIVES: dict[str, CollectiveSpec] = {name: spec for spec in _SPECS for name in spec.names}
"""By c10d's name of the method, old names and new ones."""

_OPS = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def op_name(op: Any) -> str:
    """The name of a ReduceOp: "sum", "avg", …"""
    for known, name in _OPS.items():
        if op == known:
            return name
    return "premul_sum"


def bytes_by_rank(args: tuple, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The bytes that an all-to-all gives to each rank of the group and expects from each."""
    outputs, inputs, *splits = args
    if not isinstance(inputs, torch.Tensor):
        gives, takes = [t.nbytes for t in inputs], [t.nbytes for t in outputs]
    else:
        gives, takes = (
            [n * whole.nbytes // max(1, len(whole)) for n in split]
            or [whole.nbytes // len(ranks)] * len(ranks)
            for whole, split in ((inputs, splits[1]), (outputs, splits[0]))
        )
    return dict(zip(ranks, gives)), dict(zip(ranks, takes))


def flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors in an argument: a tensor, a list of tensors, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, list | tuple):
        return [tensor for part in tensors for tensor in flat(part)]
    return []


def size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, dense or sparse."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def layout(tensor: torch.Tensor) -> str | None:
    """How a tensor is laid out in memory. None: with gaps, or in a way that torch cannot send.

    "" contiguous; "sparse"; or its elements fill its memory with the dims in another order, as
    `Tensor.dim_order` gives it (but without dims of size 1): "dim order (0, 2, 3, 1)" of a batch of
    images is channels last.
    """
    if tensor.is_sparse:
        return "sparse"
    if tensor.layout is not torch.strided:
        return None
    if tensor.is_contiguous():
        return ""
    dims = sorted((dim for dim, n in enumerate(tensor.shape) if n > 1), key=tensor.stride)
    filled = 1
    for dim in dims:
        if tensor.stride(dim) != filled:
            return None
        filled *= tensor.shape[dim]
    return f"dim order {tuple(reversed(dims))}"


def unfit(
    tensor: torch.Tensor, what: str, permuted: bool = False, sparse: bool = False
) -> str | None:
    """Why a tensor must not be passed to `what`, which reads and writes its memory as it is.

    None if it may be passed.

    Args:
        permuted: whether it may be dense with its dims in another order (if it is so on all
            ranks).
        sparse: whether it may be sparse.
    """
    if tensor.layout is not torch.strided:
        if tensor.is_sparse and sparse:
            return None
        return (
            f"a sparse tensor to {what}: gloo has only all_reduce with a sum for sparse tensors, "
            "and only for torch.sparse_coo. Pass x.to_dense()"
        )
    if not tensor.is_contiguous() and not (permuted and layout(tensor)):
        return (
            f"a strided tensor to {what}: its shape is {tuple(tensor.shape)}, its strides are "
            f"{tensor.stride()}, and gloo reads and writes its memory as if it were contiguous. "
            "Send x.contiguous(), and receive into a contiguous tensor"
        )
    if tensor.is_neg() or tensor.is_conj():
        return (
            f"a lazily conjugated or negated tensor to {what}: gloo reads and writes its memory, "
            "which holds the conjugate or the negative of its values. Send "
            "x.resolve_conj().resolve_neg(), and receive into a tensor that is neither"
        )
    return None


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds now, to find out later whether it has changed.

    That is all of it if it is small, otherwise a sample of its bytes, which shows most changes.
    """
    return tensor.detach().clone() if tensor.nbytes <= WHOLE else _sample(tensor).clone()


def unchanged(tensor: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether a tensor still holds what `snapshot` saw, bit for bit."""
    if before is None or not tensor.numel():
        return True
    if tensor.nbytes > WHOLE:
        return torch.equal(_sample(tensor), before)
    return torch.equal(in_bytes(tensor), in_bytes(before))


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in one dim. A contiguous tensor is not copied."""
    values = tensor.detach().contiguous()
    # view() alone refuses the odd strides that one element may have
    return values.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    values = in_bytes(tensor)
    # an odd step: so that it meets every byte of an element
    return values[:: values.nbytes // SAMPLE | 1]
