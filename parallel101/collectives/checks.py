"""What every collective checks before its first message, so that a wrong call is an error at once
and on every rank.

    all_gather(x, dim=3) of a matrix        a ValueError on rank 0, 1, 2, …, instead of one rank that stops and others that wait
    "sum" on rank 0, "max" on rank 1        `compare`: only a checked run can see this, since asking the others would cost a message

These functions do not check whether an algorithm exists (auto.py) or an op fits a dtype
(reductions.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.mesh import Group
from parallel101.record.spans import recorder

_PLAIN = (
    "Call x.to_local() on a DTensor, x.wait() on the result of a functional collective, "
    "x.unbind() on a nested tensor."
)
_thread = threading.local()


def compare(operation: str, group: Group, numbered: str = "", **arguments: Any) -> int:
    """In a checked run: compare this rank's call with the call that has the same number on the
    other ranks, which raises a MisuseError.

    Args: operation: its name, the same on all ranks. group: its ranks. Calls are numbered for each
        group, and apart from others if `numbered` names a count of their own. arguments: what must
        be the same on all ranks.

    Returns the number of the call; 0 if nothing is compared, as on an idle rank.
    """
    checker = recorder()
    if (
        checker is None
        or group.position is None
        or group.size < 2
        or getattr(_thread, "uncompared", False)
    ):
        return 0
    process_group = "" if group.process_group is None else group.process_group.group_name
    return checker.agree(operation, group.ranks, f"{process_group} {numbered}", arguments)


@contextlib.contextmanager
def uncompared() -> Iterator[None]:
    """For calls that send nothing, and that ranks may make in any order: `compare` does nothing
    inside.
    """
    _thread.uncompared = True
    try:
        yield
    finally:
        _thread.uncompared = False


def tensor_of(x: Tensor) -> Tensor:
    """x without its graph: these collectives move values, and `parallel101.autograd` adds their
    gradients. Raises TypeError.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x is a {type(x).__name__}: expected a tensor, with the same shape and dtype as "
            "on the other ranks"
        )
    if x.layout != torch.strided:
        raise TypeError(f"x has layout {x.layout}: expected a dense tensor. Call x.to_dense().")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or x.is_nested:
        raise TypeError(
            f"x is a {'nested tensor' if x.is_nested else type(x).__name__}: expected a plain "
            f"tensor. {_PLAIN}"
        )
    try:
        x.data_ptr()
    except RuntimeError as error:
        raise TypeError(
            "x has no memory of its own, as inside torch.vmap: expected a plain tensor"
        ) from error
    # z.conj() is only a mark on z's memory, which a message would not carry
    return x.detach().resolve_conj().resolve_neg()


def dim_of(x: Tensor, dim: int, name: str = "dim") -> int:
    """`dim` counted from the front. Raises TypeError or ValueError if x has no such dim."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}={dim!r}: expected an int")
    if x.dim() == 0:
        raise ValueError(
            f"{name}={dim}: a 0-dim tensor cannot be split or joined. Call x.reshape(1)."
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{name}={dim}: x has shape {tuple(x.shape)}, so expected a dim from {-x.dim()} to "
            f"{x.dim() - 1}"
        )
    return dim % x.dim()


def root_of(group: Group, root: int, name: str) -> int:
    """`root`, if it is a position in the group. An idle rank may not know the group's size."""
    if not isinstance(root, int) or isinstance(root, bool):
        raise TypeError(f"{name}={root!r}: expected an int, the position in the group")
    if root < 0 or (group.ranks and root >= group.size):
        raise ValueError(
            f"{name}={root}: expected a position in the group of ranks {list(group.ranks)}, so "
            f"0 to {group.size - 1}"
        )
    return root


def sizes_of(sizes: Sequence[int], group: Group, name: str = "sizes") -> list[int]:
    """`sizes` as a list, with one size for each rank."""
    if not isinstance(sizes, list | tuple) or not all(
        type(size) is int and size >= 0 for size in sizes
    ):
        raise TypeError(
            f"{name}={sizes!r}: expected a list of sizes, one for each rank, all 0 or more"
        )
    if group.ranks and len(sizes) != group.size:
        raise ValueError(
            f"{name}={list(sizes)} has {len(sizes)} sizes: expected one for each of the "
            f"group's {group.size} ranks"
        )
    return list(sizes)


def cut_sizes(
    x: Tensor, dim: int, sizes: Sequence[int], group: Group, name: str = "sizes"
) -> list[int]:
    """`sizes`, if they split the whole of x along `dim`."""
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
    """The size along `dim` of every rank's shard; x is this rank's.

    Without `sizes` all shards are as large as x.
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
    """The result on a rank that gets no part of it: a zero-volume tensor of shape (0,)."""
    return x.new_empty(0)
