"""The checks of every collective before its first message: a wrong call is an error on every rank.

    all_gather(x, dim=3) of a matrix     a ValueError on all ranks, instead of one rank that stops
                                         and others that wait for it
    "sum" on rank 0, "max" on rank 1     `compare`: only a checked run sees this, since asking the
                                         others would cost a message

`prepare` is the first call of every collective but all_to_all and barrier, which have arguments of
their own. Whether an algorithm exists is checked in auto.py, and whether an op fits a dtype in
reductions.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.collectives.auto import check_algorithm, choose, present_name
from parallel101.collectives.blocks import row_of, shaped
from parallel101.collectives.comm import Comm, comm_of
from parallel101.collectives.reductions import reduction_of
from parallel101.collectives.segments import check_segment_bytes
from parallel101.mesh import Group, GroupLike, group_of, split_sizes
from parallel101.spans import recorder

_PLAIN = (
    "Call x.to_dense() on a sparse tensor, x.to_local() on a DTensor, x.wait() on the result of a "
    "functional collective, x.unbind() on a nested tensor."
)
_thread = threading.local()
Sizes = Sequence[int] | None  # along a dim, by position


class Prepared(NamedTuple):
    """A collective whose arguments are checked, on a rank that takes part in it."""

    x: Tensor  # without its graph
    comm: Comm
    run: Callable[..., Any]  # the function of the chosen algorithm
    reduction: Any  # a Reduction, if the operation has op=
    dim: int  # counted from the front
    sizes: Sequence[int]  # of each position's block or shard along dim
    elements: Sequence[int]  # of each block or shard

    def shaped(self, flat: Tensor, size: int) -> Tensor:
        """Return values in one row as a tensor of x's shape, but of this size along `dim`."""
        shape = self.x.shape
        return shaped(flat, [*shape[: self.dim], size, *shape[self.dim + 1 :]], self.dim)


def prepare(
    operation: str,
    x: Tensor,
    arguments: dict[str, Any],
    algorithms: Mapping[str, Callable[..., Any]],
    on_a_mesh: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    *,
    group: GroupLike = None,
    algorithm: str = "auto",
    segment_bytes: int | None = None,
) -> Prepared | None:
    """Check a call of a collective and choose its algorithm. Returns None on an idle rank.

    Args:
        arguments: the operation's own: op, src, dst, dim, and `blocks` for a sizes= by which x is
            split, or `shards` for a sizes= of what is joined.
        algorithms, on_a_mesh: the operation's algorithms for any group, and for a mesh only.
        group, algorithm, segment_bytes: as the program passed them.

    Raises ValueError or TypeError for wrong arguments, MisuseError in a checked run if the ranks'
    arguments differ.
    """
    x = tensor_of(x)
    reduction = reduction_of(arguments["op"], x) if "op" in arguments else None
    members, algorithm = group_of(group), present_name(algorithm, algorithms)
    check_algorithm(operation, algorithm, members, algorithms, on_a_mesh)
    for root in arguments.keys() & {"src", "dst"}:
        root_of(members, arguments[root], root)
    check_segment_bytes(segment_bytes, algorithm, x.element_size())
    dim, sizes, uneven, nbytes = 0, None, None, x.nbytes
    if "dim" in arguments:
        dim = arguments["dim"] = dim_of(x, arguments["dim"])
    if "shards" in arguments:
        sizes, uneven = shard_sizes(x, dim, arguments.pop("shards"), members), dim
        nbytes = sum(sizes) * row_of(x, dim) * x.element_size()
    if members.position is None:
        return None
    if "blocks" in arguments:
        sizes = block_sizes(x, dim, arguments.pop("blocks"), members)
    arguments["algorithm"] = algorithm
    if "pipelined_chain" in algorithms:
        arguments["segment_bytes"] = segment_bytes
    comm = begin(operation, members, x, uneven=uneven, sizes=sizes, **arguments)
    run = choose(operation, algorithm, {**algorithms, **on_a_mesh}, nbytes, comm.size)
    if segment_bytes is not None:
        run = functools.partial(run, segment_bytes=segment_bytes)
    row = row_of(x, dim)
    elements = [size * row for size in sizes or ()]
    return Prepared(x, comm, run, reduction, dim, sizes or (), elements)


def begin(
    operation: str,
    group: Group,
    x: Tensor,
    *,
    uneven: int | None = None,
    sizes: Any = None,
    **arguments: Any,
) -> Comm:
    """Return the Comm for a collective on x. Call it after the collective's own checks.

    In a checked run it compares what must be the same on all ranks: these arguments, x's dtype, and
    its shape except along the dim `uneven`. Raises ValueError if the group's backend cannot send
    from x's device.
    """
    comm = comm_of(group, x.device, operation)
    if comm.collective is not None:
        arguments["dtype"] = x.dtype
        if uneven is None:
            arguments["shape"] = tuple(x.shape)
        else:
            arguments["shape in the other dims"] = (*x.shape[:uneven], *x.shape[uneven + 1 :])
        if sizes is not None:
            arguments["sizes"] = sizes
        compare(operation, group, **arguments)
    return comm


def compare(operation: str, group: Group, numbered: str = "", **arguments: Any) -> int:
    """Compare this rank's call with the other ranks' call of the same number, in a checked run.

    Args:
        operation: its name, the same on all ranks.
        group: its ranks.
        numbered: the name of a count of its own, if these calls aren't numbered with the group's
            others.
        arguments: the values that must be the same on all ranks.

    Returns the number of the call; 0 if nothing is compared, as on an idle rank. Raises MisuseError
    if the calls differ.
    """
    checker = recorder()
    alone = group.position is None or group.size < 2
    if checker is None or alone or getattr(_thread, "uncompared", False):
        return 0
    process_group = "" if group.process_group is None else group.process_group.group_name
    return checker.agree(operation, group.ranks, f"{process_group} {numbered}", arguments)


@contextlib.contextmanager
def uncompared() -> Iterator[None]:
    """Turn `compare` off inside, for calls without messages, which may come in any order."""
    _thread.uncompared = True
    try:
        yield
    finally:
        _thread.uncompared = False


def tensor_of(x: Tensor) -> Tensor:
    """Return x without its graph. Raises TypeError unless x is a plain dense tensor.

    These collectives move values; `parallel101.autograd` adds their gradients.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x is a {type(x).__name__}: expected a tensor, with the same shape and dtype as "
            "on the other ranks"
        )
    dispatches = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if x.layout != torch.strided or x.is_nested or dispatches:
        kind = "nested tensor" if x.is_nested else type(x).__name__
        raise TypeError(
            f"x is a {kind} with layout {x.layout}: expected a plain, dense tensor. {_PLAIN}"
        )
    try:
        x.data_ptr()
    except RuntimeError as error:
        raise TypeError(
            "x has no memory of its own, as inside torch.vmap: expected a plain tensor"
        ) from error
    # z.conj() only marks z's memory, and a message would lose the mark
    return x.detach().resolve_conj().resolve_neg()


def dim_of(x: Tensor, dim: int, name: str = "dim") -> int:
    """Return `dim` counted from the front. Raises ValueError if x has no such dim."""
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{name}={dim!r}: x has shape {tuple(x.shape)}, so expected an int from {-x.dim()} to "
            f"{x.dim() - 1}. (A tensor of no dims can't be split or joined: call x.reshape(1).)"
        )
    return dim % x.dim()


def root_of(group: Group, root: int, name: str) -> int:
    """Return `root`. Raises ValueError if it isn't a position in the group.

    An idle rank may not know the group's size.
    """
    if type(root) is not int or root < 0 or (group.ranks and root >= group.size):
        raise ValueError(
            f"{name}={root!r}: expected an int, the position in the group of ranks "
            f"{list(group.ranks)}, so 0 to {group.size - 1}"
        )
    return root


def sizes_of(sizes: Sequence[int], group: Group, name: str = "sizes") -> list[int]:
    """Return `sizes` as a list.

    Raises ValueError unless it has one size for each rank.
    """
    if (
        not isinstance(sizes, list | tuple)
        or not all(type(size) is int and size >= 0 for size in sizes)
        or (group.ranks and len(sizes) != group.size)
    ):
        raise ValueError(
            f"{name}={sizes!r}: expected a list of sizes, all 0 or more, one for each of the "
            f"group's {group.size} ranks"
        )
    return list(sizes)


def block_sizes(
    x: Tensor, dim: int, sizes: Sequence[int] | None, group: Group, name: str = "sizes"
) -> list[int]:
    """Return the size along `dim` of every rank's block of x, by default those of `split_sizes`.

    Raises ValueError if the blocks of `sizes` don't add up to x.
    """
    if sizes is None:
        return split_sizes(x.shape[dim], group.size)
    sizes = sizes_of(sizes, group, name)
    if sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"{name}={sizes} sum to {sum(sizes)}, but x has {x.shape[dim]} along dim {dim} "
            f"(shape {tuple(x.shape)})"
        )
    return sizes


def shard_sizes(
    x: Tensor, dim: int, sizes: Sequence[int] | None, group: Group, name: str = "sizes"
) -> list[int]:
    """Return the size along `dim` of every rank's shard; x is this rank's.

    Without `sizes`, all shards are as large as x. Raises ValueError if x contradicts
    `sizes`.
    """
    if sizes is None:
        return [x.shape[dim]] * group.size
    sizes = sizes_of(sizes, group, name)
    if group.position is not None and sizes[group.position] != x.shape[dim]:
        raise ValueError(
            f"{name}={sizes} gives position {group.position} a shard of "
            f"{sizes[group.position]} along dim {dim}, "
            f"but its x has shape {tuple(x.shape)}"
        )
    return sizes


def nothing(x: Tensor) -> Tensor:
    """Return a zero-volume tensor of shape (0,): the result on a rank that gets no part of it."""
    return x.new_empty(0)
