"""Describes how c10d calls its collectives: the arguments of each method, on any backend.

    g.allreduce(x)               ──▶  g.allreduce([x], AllreduceOptions())   torch's default: sum
    g.gather([a, b], x, root=1)  ──▶  g.gather([[a, b]], [x], opts)
        ──▶  kind gather, payload x, shape (4,), dtype float32, root 1

`COLLECTIVES` is the only place that knows these signatures, which are those of
torch/csrc/distributed/c10d/init.cpp. torch 2.13 renamed some methods (all_gather_single was
_allgather_base), and ProcessGroup has both names, the gloo of 2.13 the old ones only, so an entry
lists all of them. `with_collectives` makes them all one method of a process group in Python. Also
here: which tensors can be sent as they are, and whether one has changed since.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array, c_char
from datetime import timedelta
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import AllgatherOptions

from parallel101.laboratory.record.calls import Call, rank_at

# a sent tensor of up to this many bytes is copied and compared as a whole; of a larger one only
WHOLE = 1 << 20
SAMPLES, SAMPLE = 64, 64  # this many samples, of this many bytes each
# what may be passed instead of options, and its name in them
OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
TENSORS = re.compile(r"^(tensor|output|input)(?!\w*split_sizes$).*")
TORCHS_LIMITS = default_pg_timeout, default_pg_nccl_timeout
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# with as many bytes on all ranks: gloo waits for ever for those that are missing
SAME_BYTES = frozenset({"broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter"})


class CollectiveSpec(NamedTuple):
    """The arguments of a collective's methods, which all of its names share."""

    kind: str
    names: tuple[str, ...]
    options: type
    # how deep the lists of tensors are nested: of the outputs, then of the inputs; one number if
    # the tensors are both
    depths: tuple[int, ...]
    instead: tuple[str, ...] = ()  # what may be passed instead of options
    splits: bool = False  # whether the tensors are followed by two lists of split sizes

    def inputs(self, args: tuple) -> list[torch.Tensor]:
        """Return the tensors that the collective reads."""
        return flat(args[len(self.depths) - 1]) if self.depths else []

    def outputs(self, args: tuple) -> list[torch.Tensor]:
        """Return the tensors that it writes, if they aren't its inputs."""
        return flat(args[0]) if len(self.depths) == 2 else []

    def own_tensors(self, args: tuple) -> list[torch.Tensor]:
        """Return the inputs; on a rank without inputs, the outputs."""
        return self.inputs(args) or self.outputs(args)

    def with_arguments(self, call: Call, args: tuple, ranks: Sequence[int]) -> Call:
        """Return a rank's call with the facts that the ranks compare, which its arguments have.

        `ranks`: of the group.
        """
        inputs, outputs, options = self.inputs(args), self.outputs(args), args[-1] if args else None
        op = getattr(options, "reduceOp", None)
        position = getattr(options, "rootRank", None) if self.kind in ROOTED else None
        to_all = self.kind == "all_to_all"
        gives, takes = bytes_by_rank(args, ranks) if to_all else (None, None)
        compared = outputs if self.kind == "scatter" else inputs
        if to_all and len(inputs) > 1:  # each has its own shape
            compared = []
        some = next(iter(compared or inputs or outputs), None)
        return call._replace(
            nbytes=max(sum(map(size, inputs)), sum(map(size, outputs))),
            shape=tuple(compared[0].shape) if compared else (),
            dtype="" if some is None else str(some.dtype).removeprefix("torch."),
            layout="" if some is None else layout(some) or "",
            op=None if op is None else op_name(op),
            root=None if position is None else rank_at(call.rank, self.kind, position, ranks),
            gives=gives,
            takes=takes,
        )

    def operation(self, args: tuple) -> str:
        """Return what all ranks of a collective must call: "all_reduce of 8 bytes"."""
        if self.kind not in SAME_BYTES:
            return self.kind
        tensors = flat(args[1 if self.kind == "reduce_scatter" else 0])
        if any(tensor.is_sparse for tensor in tensors):
            return self.kind
        return f"{self.kind} of {sum(tensor.nbytes for tensor in tensors)} bytes"

    def unwritten_inputs(self, args: tuple, at_root: bool) -> list[torch.Tensor]:
        """Return the inputs that an asynchronous call only reads.

        They must not change until its wait(). Inputs that share memory with outputs may change.
        """
        if not getattr(args[-1], "asyncOp", True):
            return []
        if len(self.depths) < 2:
            return self.inputs(args) if self.kind == "broadcast" and at_root else []
        written = {id(tensor.untyped_storage()) for tensor in self.outputs(args)}
        return [t for t in self.inputs(args) if id(t.untyped_storage()) not in written]

    def unfit(self, args: tuple, what: str) -> str | None:
        """Return why these arguments must not be passed to a collective, or None if they may."""
        sums = self.kind == "all_reduce" and op_name(args[-1].reduceOp) == "sum"
        tensors = flat(args)
        for tensor in tensors:
            if problem := unfit(tensor, what, permuted=True, sparse=sums):
                return problem
        if len(self.depths) < 2 or len({layout(tensor) for tensor in tensors}) < 2:
            return None
        strides = sorted({f"{t.stride()} for shape {tuple(t.shape)}" for t in tensors})
        return (
            f"tensors whose dims have different orders in memory to {what}: their strides are "
            f"{' and '.join(strides)}, and values are copied in the order of the memory. Pass "
            "x.contiguous(), and receive into contiguous tensors"
        )


def _specs() -> list[CollectiveSpec]:
    spec, gather, scatter = CollectiveSpec, AllgatherOptions, dist.ReduceScatterOptions
    to_all, barrier, limit = dist.AllToAllOptions, dist.BarrierOptions, ("timeout",)
    coalesced = dist.AllreduceCoalescedOptions
    rooted, reduced = ("root", *limit), ("op", *limit)
    gather_names = ("all_gather_single", "_allgather_base")
    gather_many = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    scatter_names = ("reduce_scatter_single", "_reduce_scatter_base")
    scatter_many = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return [
        spec("broadcast", ("broadcast",), dist.BroadcastOptions, (1,), rooted),
        spec("all_reduce", ("allreduce",), dist.AllreduceOptions, (1,), reduced),
        spec("all_reduce", ("allreduce_coalesced",), coalesced, (1,)),
        spec("reduce", ("reduce",), dist.ReduceOptions, (1,), ("root", *reduced)),
        spec("all_gather", ("allgather",), gather, (2, 1), limit),
        spec("all_gather", ("allgather_coalesced",), gather, (2, 1)),
        spec("all_gather", gather_names, gather, (0, 0)),
        spec("all_gather", gather_many, gather, (1, 1)),
        spec("gather", ("gather",), dist.GatherOptions, (2, 1), rooted),
        spec("gather", ("gather_single",), dist.GatherOptions, (0, 0)),  # from torch 2.14 on
        spec("scatter", ("scatter",), dist.ScatterOptions, (1, 2), rooted),
        spec("reduce_scatter", ("reduce_scatter",), scatter, (1, 2), reduced),
        spec("reduce_scatter", scatter_names, scatter, (0, 0)),
        spec("reduce_scatter", scatter_many, scatter, (1, 1)),
        spec("all_to_all", ("alltoall",), to_all, (1, 1)),
        spec("all_to_all", ("all_to_all_single", "alltoall_base"), to_all, (0, 0), limit, True),
        spec("barrier", ("barrier",), barrier, (), limit),
        spec("barrier", ("monitored_barrier",), barrier, ()),
    ]


COLLECTIVES: dict[str, CollectiveSpec] = {name: spec for spec in _specs() for name in spec.names}
"""By c10d's name of the method, old names and new ones."""

Group = TypeVar("Group", bound=type)


def with_collectives(group: Group) -> Group:
    """Let each method of COLLECTIVES call `_collective(method, args)` of a process group's class.

    It gets the arguments as torch.distributed passes them. The class has its own monitored_barrier.
    """

    def calling(method: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
            return self._collective(method, as_torch_calls_it(method, args, kwargs))

        call.__name__ = method
        return call

    for method in COLLECTIVES.keys() - {"monitored_barrier"}:
        setattr(group, method, calling(method))
    return group


def as_torch_calls_it(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """Return the arguments of a group's method in the form in which torch.distributed passes them.

    Tensors are in nested lists; split sizes and options follow.

    Raises TypeError for arguments that the method does not take.
    """
    spec = COLLECTIVES[method]
    if not kwargs and args and isinstance(args[-1], spec.options):
        return tuple(args)
    tensors = ["tensors"] if len(spec.depths) == 1 else ["outputs", "inputs"][: len(spec.depths)]
    names = [*tensors, *(["output_split_sizes", "input_split_sizes"] if spec.splits else [])]
    # torch has many keywords for tensors: output_tensors, output, outputTensor, …
    named = {TENSORS.sub(r"\1s", name): value for name, value in kwargs.items()}
    if len(args) > len(names) and isinstance(args[len(names)], spec.options):
        args, named = args[: len(names)], {**named, "opts": args[len(names)]}
    either = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(name, either) for name in names]
    parameters += [Parameter(name, either, default=None) for name in spec.instead]
    parameters += [Parameter("opts", Parameter.KEYWORD_ONLY, default=None)]
    try:
        given = Signature(parameters).bind(*args, **named).arguments
    except TypeError as error:
        takes = ", ".join([*names, *spec.instead, "opts"])
        raise TypeError(f"{method}() of a process group takes {takes}: {error}") from None
    options = given.get("opts") or spec.options()
    for name in spec.instead:
        if given.get(name) is not None:
            setattr(options, OPTIONS[name], given[name])
    nested = [_nested(given[name], depth) for name, depth in zip(tensors, spec.depths)]
    return (*nested, *(given[name] for name in names[len(tensors) :]), options)


def _nested(tensors: Any, depth: int) -> Any:
    """Return the tensors in lists of the given depth.

    A single tensor, or the one list, is put into a list of its own.
    """
    nested, first = 0, tensors
    while isinstance(first, list | tuple):
        nested, first = nested + 1, next(iter(first), None)
    if first is None:  # empty lists, as ranks other than the root pass them
        return tensors
    for _ in range(depth - nested):
        tensors = [tensors]
    return tensors


def own_limit(timeout: timedelta | None) -> float | None:
    """Return a program's own time limit, in seconds.

    None for torch's defaults, and for what torch takes as no limit (zero and less).
    """
    if timeout is None or timeout <= timedelta(0) or timeout in TORCHS_LIMITS:
        return None
    return timeout.total_seconds()


_OPS = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def op_name(op: Any) -> str:
    """Return the name of a ReduceOp: "sum", "avg", …"""
    return next((name for known, name in _OPS.items() if op == known), "premul_sum")


def bytes_by_rank(args: tuple, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes that an all-to-all gives to each rank of the group and expects from each."""
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
    """Return the tensors in an argument: a tensor, a list of tensors, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, list | tuple):
        return [tensor for part in tensors for tensor in flat(part)]
    return []


def size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, dense or sparse."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def layout(tensor: torch.Tensor) -> str | None:
    """Describe how a tensor is laid out in memory. None: with gaps, or torch cannot send it.

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
    """Return why a tensor must not be passed to `what`, which reads and writes its raw memory.

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


def values(tensors: Iterable[torch.Tensor]) -> list:
    """Return all numbers in these tensors, flattened, as a record keeps them."""
    return [value for tensor in tensors for value in tensor.detach().reshape(-1).tolist()]


@lru_cache(maxsize=1024)
def memory(nbytes: int) -> type[Array[c_char]]:
    """Return the type whose `from_address(pointer).raw` reads and writes `nbytes` of memory.

    It is twice as fast as string_at and memmove.
    """
    return c_char * nbytes


def snapshot(pointer: int, nbytes: int) -> bytes:
    """Copy the bytes at a place in memory, so that a later change can be noticed.

    If there are more than WHOLE bytes, only samples are copied.
    """
    if nbytes <= WHOLE:
        return memory(nbytes).from_address(pointer).raw
    step = (nbytes - SAMPLE) // (SAMPLES - 1)
    return b"".join(memory(SAMPLE).from_address(pointer + i * step).raw for i in range(SAMPLES))
