"""Brings each way to call a process group's own methods to the one that torch.distributed uses.

    g.allreduce(x)               ──▶  g.allreduce([x], AllreduceOptions())   torch's default: sum
    g.broadcast(x, 2)            ──▶  g.broadcast([x], opts)                 opts.rootRank is 2
    g.gather([a, b], x, root=1)  ──▶  g.gather([[a, b]], [x], opts)

The ways are those of torch/csrc/distributed/c10d/init.cpp. What each argument means is in
signatures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import AllgatherOptions

# what may be passed instead of options, and its name in them
OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def own_limit(timeout: timedelta | None) -> float | None:
    """A program's own time limit, in seconds.

    None for torch's defaults, and for what torch takes as no limit (zero and less).
    """
    if (
        timeout is None
        or timeout <= timedelta(0)
        or timeout in (default_pg_timeout, default_pg_nccl_timeout)
    ):
        return None
    return timeout.total_seconds()


class Signature(NamedTuple):
    """How a method is called.

    It names the class of its options, how deep each of its lists of tensors is nested, and what may
    be passed instead of options.
    """

    options: type
    depths: tuple[int, ...]
    instead: tuple[str, ...] = ("timeout",)
    splits: bool = False  # whether the tensors are followed by two lists of split sizes


def _signatures() -> dict[str, Signature]:
    gather, scatter, to_all = AllgatherOptions, dist.ReduceScatterOptions, dist.AllToAllOptions
    methods = {
        "broadcast": Signature(dist.BroadcastOptions, (1,), ("root", "timeout")),
        "allreduce": Signature(dist.AllreduceOptions, (1,), ("op", "timeout")),
        "allreduce_coalesced": Signature(dist.AllreduceCoalescedOptions, (1,), ()),
        "reduce": Signature(dist.ReduceOptions, (1,), ("root", "op", "timeout")),
        "allgather": Signature(gather, (2, 1)),
        "allgather_coalesced": Signature(gather, (2, 1), ()),
        "gather": Signature(dist.GatherOptions, (2, 1), ("root", "timeout")),
        "gather_single": Signature(dist.GatherOptions, (0, 0), ()),
        "scatter": Signature(dist.ScatterOptions, (1, 2), ("root", "timeout")),
        "reduce_scatter": Signature(scatter, (1, 2), ("op", "timeout")),
        "alltoall": Signature(to_all, (1, 1), ()),
        "barrier": Signature(dist.BarrierOptions, ()),
    }
    methods |= dict.fromkeys(
        ("all_gather_single", "_allgather_base"), Signature(gather, (0, 0), ())
    )
    methods |= dict.fromkeys(
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        Signature(gather, (1, 1), ()),
    )
    methods |= dict.fromkeys(
        ("reduce_scatter_single", "_reduce_scatter_base"), Signature(scatter, (0, 0), ())
    )
    methods |= dict.fromkeys(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        Signature(scatter, (1, 1), ()),
    )
    methods |= dict.fromkeys(
        ("all_to_all_single", "alltoall_base"), Signature(to_all, (0, 0), splits=True)
    )
    return methods


SIGNATURES = _signatures()


def as_torch_calls_it(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """The arguments of a group's method, in the form in which torch.distributed passes them.

    Tensors are in nested lists; split sizes and options follow.

    Raises TypeError for arguments that the method does not take.
    """
    signature = SIGNATURES[method]
    if not kwargs and args and isinstance(args[-1], signature.options):
        return tuple(args)
    tensors = (
        ["tensors"]
        if len(signature.depths) == 1
        else ["outputs", "inputs"][: len(signature.depths)]
    )
    names = [*tensors, *(["output_split_sizes", "input_split_sizes"] if signature.splits else [])]
    rest = list(args[len(names) :])
    given = dict(zip(names, args))
    if rest and isinstance(rest[0], signature.options):
        given["opts"] = rest.pop(0)
    given |= dict(zip(signature.instead, rest))
    named = {_plain_name(name): value for name, value in kwargs.items()}
    allowed = {*names, "opts", *signature.instead}
    if (
        len(rest) > len(signature.instead)
        or given.keys() & named
        or not {*named} <= allowed
        or not {*names} <= {*given, *named}
    ):
        raise TypeError(
            f"{method}() of a process group takes {', '.join([*names, 'opts'])}"
            + (
                f", or {' and '.join(signature.instead)} instead of opts"
                if signature.instead
                else ""
            )
            + f"; got {len(args)} arguments"
            + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    given |= named
    options = given.get("opts") or signature.options()
    for name in signature.instead:
        if given.get(name) is not None:
            setattr(options, OPTIONS[name], given[name])
    nested = [_nested(given[name], depth) for name, depth in zip(tensors, signature.depths)]
    return (*nested, *(given[name] for name in names[len(tensors) :]), options)


def _plain_name(name: str) -> str:
    """torch's keywords for tensors are many: output_tensors, output, outputTensor, …"""
    if name.endswith("split_sizes"):
        return name
    return next(
        (plain for plain in ("tensors", "outputs", "inputs") if name.startswith(plain[:-1])), name
    )


def _nested(tensors: Any, depth: int) -> Any:
    """The tensors in lists of the given depth.

    A single tensor, or the one list, is put into a list of its own.
    """
    found, first = 0, tensors
    while isinstance(first, list | tuple):
        found, first = found + 1, next(iter(first), None)
    if first is None:  # empty lists, as ranks other than the root pass them
        return tensors
    for _ in range(depth - found):
        tensors = [tensors]
    return tensors
