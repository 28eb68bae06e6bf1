"""What every collective asks before its first message, so that a wrong call is an error at once and on every rank.

    all_gather(x, dim=3) on a matrix  →  ValueError on rank 0, 1, 2, …   rather than one rank that stops and others that wait

What only another rank could know (do the shapes agree?) is for a checked run to say: asking would cost a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel101.mesh import Group

_PLAIN = "x.to_local() of a DTensor, x.wait() of what functional collectives return, x.unbind() of a nested tensor are plain"


def tensor_of(x: Tensor) -> Tensor:
    """x without its graph: the collectives here move values; `parallel101.autograd` gives them their gradients."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: expected a tensor, the same shape and dtype as the other ranks'")
    if x.layout != torch.strided:
        raise TypeError(f"x has layout {x.layout}: expected a dense tensor; x.to_dense() makes one")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or x.is_nested:
        raise TypeError(f"x is a {'nested tensor' if x.is_nested else type(x).__name__}: expected a plain tensor. {_PLAIN}")
    try:
        x.data_ptr()
    except RuntimeError as error:
        raise TypeError(f"x has no memory of its own, as inside torch.vmap: expected a plain tensor. {_PLAIN}") from error
    return x.detach().resolve_conj().resolve_neg()  # z.conj() is a mark on z's memory, which a message would not carry


def dim_of(x: Tensor, dim: int, name: str = "dim") -> int:
    """`dim` counted from the front. Raises ValueError where x has no such dim."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}={dim!r}: expected an int")
    if x.dim() == 0:
        raise ValueError(f"{name}={dim}: a 0-dim tensor has no dim to cut or join along; x.reshape(1) has one")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}={dim}: x has shape {tuple(x.shape)}, so dims {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def root_of(group: Group, root: int, name: str) -> int:
    """`root` if it is a position of the group (an idle rank may not know the group's size)."""
    if not isinstance(root, int) or isinstance(root, bool):
        raise TypeError(f"{name}={root!r}: expected an int, the position in the group")
    if root < 0 or (group.ranks and root >= group.size):
        raise ValueError(f"{name}={root}: expected a position in the group of ranks {list(group.ranks)}, so 0 to {group.size - 1}")
    return root


def sizes_of(sizes: Sequence[int], group: Group, name: str = "sizes") -> list[int]:
    """`sizes` as a list with one size a rank."""
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError(f"{name}={sizes!r}: expected a list of sizes, one a rank, each 0 or more")
    if group.ranks and len(sizes) != group.size:
        raise ValueError(f"{name}={list(sizes)} has {len(sizes)} sizes: expected one for each of the group's {group.size} ranks")
    return list(sizes)


def cut_sizes(x: Tensor, dim: int, sizes: Sequence[int], group: Group, name: str = "sizes") -> list[int]:
    """`sizes` if they cut x along `dim` without a rest."""
    sizes = sizes_of(sizes, group, name)
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"{name}={sizes} sum to {sum(sizes)}, but x has {x.shape[dim]} along dim {dim} (shape {tuple(x.shape)})")
    return sizes


def shard_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, group: Group, name: str = "sizes") -> list[int]:
    """The extent along `dim` of every rank's shard, of which x is mine: all alike unless `sizes` tells."""
    if sizes is None:
        return [x.shape[dim]] * group.size
    sizes = sizes_of(sizes, group, name)
    if group.position is not None and sizes[group.position] != x.shape[dim]:
        raise ValueError(
            f"{name}={sizes}: {sizes[group.position]} along dim {dim} for position {group.position}, but its x has shape {tuple(x.shape)}"
        )
    return sizes


def nothing(x: Tensor) -> Tensor:
    """What a rank gets that gets nothing: a zero-volume tensor of shape (0,)."""
    return x.new_empty(0)
