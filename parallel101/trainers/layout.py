"""The layout of every parameter: its whole shape, and how each axis of the mesh places it.

Only `gather` and `norm` send messages.

    weight (8, 4)     pp: on stage 1           only some stages have it
                      tp: Shard(dim 0)         rank 0 has rows 0 … 3, rank 1 rows 4 … 7
                      ep: Shard(dim 0)         the same, of experts
                      dp: Pieces               of its 4 × 4 numbers, rank 0 has the first 8

The axes cut in this order, the outermost first; an axis that is not named replicates. All that
concerns the whole model follows from the layout: `state_dict`, gradients, checkpoints, and the
norm, in which each element counts once. It does not decide who holds what: the plans and the
gradient synchronizations do, and say so here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather, gather
from parallel101.mesh import Group, GroupLike, along, group_of

ORDER = ("pp", "tp", "ep", "dp")  # in which the axes cut a parameter, the outermost first
DATA = ("dp", "cp", "ep")  # each rank along these has other tokens: gradients are summed over them
SAMPLES = ("dp", "ep")  # and along these, other samples
Coordinates = Mapping[str, int]  # a rank's position on each axis


class Stages(NamedTuple):
    """Present on these positions of the axis only, on each of them whole.

    Several positions: a tied weight.
    """

    positions: tuple[int, ...]


class Shard(NamedTuple):
    """Cut along `dim`: position i of the axis holds `sizes[i]` of it.

    `parts`: the dim is that many equal segments, such as query, key and value side by side, and
    each is cut in the same way.
    """

    dim: int
    sizes: tuple[int, ...]
    parts: int = 1

    def cut(self, whole: Tensor, position: int) -> Tensor:
        of_part = [size // self.parts for size in self.sizes]
        segments = [
            part.narrow(self.dim, sum(of_part[:position]), of_part[position])
            for part in whole.chunk(self.parts, self.dim)
        ]
        return segments[0] if self.parts == 1 else torch.cat(segments, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        of_ranks = [shard.chunk(self.parts, self.dim) for shard in shards]
        return torch.cat(
            [of_rank[part] for part in range(self.parts) for of_rank in of_ranks], self.dim
        )


Bounds = tuple[tuple[int, int], ...]


class Pieces(NamedTuple):
    """Flattened and cut over several axes together: place i on them holds the elements from
    `bounds[i][0]` to `bounds[i][1]` − 1; none if they are equal.

    `blocks`: the bounds for each place along (tp, ep), if those have cut the parameter before,
    perhaps unevenly.
    """

    bounds: Bounds
    axes: tuple[str, ...] = ("dp",)
    blocks: Mapping[tuple[int, int], Bounds] = {}

    def at(self, coordinates: Coordinates) -> Bounds:
        return self.blocks.get(block_at(coordinates), self.bounds)


def block_at(coordinates: Coordinates) -> tuple[int, int]:
    """Return the place along (tp, ep)."""
    return coordinates.get("tp", 0), coordinates.get("ep", 0)


Placement = Stages | Shard | Pieces


class Entry(NamedTuple):
    """A parameter or buffer of the whole model."""

    shape: torch.Size
    dtype: torch.dtype
    placements: Mapping[str, Placement] = {}  # by axis; "dp" for Pieces, whatever axes they have

    def cut_by(self) -> set[str]:
        """Return the axes along which ranks hold different parts of it."""
        return {
            name
            for axis, placement in self.placements.items()
            for name in (placement.axes if isinstance(placement, Pieces) else (axis,))
        }


class Axes:
    """The ranks that train as a mesh: the lines of ranks through this one.

    Args: group: all these ranks; see `group_of`. sizes: name of an axis → its size, in the order in
        which the group numbers its ranks; the last axis varies fastest.
    """

    def __init__(self, group: GroupLike, sizes: Mapping[str, int]):
        self.group, self.sizes = group, dict(sizes)
        self.members = group_of(group)
        if self.members.position is None:
            raise ValueError(
                f"this rank is not in group={group!r}: build a trainer on its members only, or "
                "leave group out"
            )
        self.position: int = self.members.position
        self.here = self.coordinates(self.position)

    def coordinates(self, position: int) -> dict[str, int]:
        """Return the coordinates, on each axis, of a position in the group."""
        return self.at(position, self.sizes)

    def at(self, place: int, names: Collection[str]) -> dict[str, int]:
        """Return the coordinates, on each of these axes, of a place on them, counted row by row."""
        found = {}
        for name, size in reversed(self.sizes.items()):
            if name in names:
                place, found[name] = divmod(place, size)
        return found

    def place(self, names: Collection[str], at: Coordinates | None = None) -> int:
        """Return the place of a rank (default: this one) on these axes: the inverse of `at`."""
        at, found = at or self.here, 0
        for name, size in self.sizes.items():
            if name in names:
                found = found * size + at[name]
        return found

    def size(self, names: Collection[str]) -> int:
        """Return the number of places that these axes have together."""
        return math.prod(size for name, size in self.sizes.items() if name in names)

    def line(self, names: Collection[str], position: int | None = None) -> list[int]:
        """Return the positions in the group of the ranks that differ from this one (or from
        `position`) along these axes only, row by row.
        """
        order = list(self.sizes)
        start = self.position if position is None else position
        axes = [order.index(name) for name in order if name in names]
        return along(list(self.sizes.values()), start, axes)

    def along(self, names: Collection[str]) -> Group:
        """Return the ranks of `line` as a group, which has these axes' names in the record."""
        line = self.line(names)
        whole = len(line) == len(self.members.ranks)
        named = tuple(
            name
            for name, size in self.sizes.items()
            if name in names and (size > 1 or len(names) == 1)
        )
        return Group(
            ranks=tuple(self.members.ranks[i] for i in line),
            position=line.index(self.position),
            shape=self.members.shape if whole else (len(line),),
            process_group=self.members.process_group if whole else None,
            axes=self.members.axes if whole and self.members.axes else named,
        )


class Layout:
    """Every parameter and buffer by name, and how to take it apart and put it together.

    Args:
        axes: the ranks.
        entries: of the whole model, the same on every rank.
        device: where the parts are.
    """

    def __init__(self, axes: Axes, entries: Mapping[str, Entry], device: torch.device):
        self.axes, self.entries, self.device = axes, dict(entries), device
        cut_axes = set().union(*(entry.cut_by() for entry in self.entries.values()))
        self.cut_axes = [axis for axis in axes.sizes if axis in cut_axes]
        # the ranks that together have everything
        self.line = [axes.coordinates(position) for position in axes.line(self.cut_axes)]

    # ── one entry, no messages ──

    def cut(self, name: str, whole: Tensor, at: Coordinates | None = None) -> Tensor:
        """Return the part of the whole that a rank (default: this one) holds, which may be empty.

        The part is a view if possible.
        """
        at, part = at or self.axes.here, whole
        for axis in ORDER:
            match self.entries[name].placements.get(axis):
                case Stages(positions) if at[axis] not in positions:
                    return whole.new_empty(0)
                case Shard() as shard:
                    part = shard.cut(part, at[axis])
                case Pieces() as pieces:
                    low, high = pieces.at(at)[self.axes.place(pieces.axes, at)]
                    part = part.reshape(-1)[low:high]
        return part

    def shape(self, name: str, at: Coordinates | None = None) -> torch.Size:
        """Return the shape of the part that a rank (default: this one) holds."""
        return self.cut(name, torch.empty(self.entries[name].shape, device="meta"), at).shape

    def join(self, name: str, part: Callable[[Coordinates], Tensor]) -> Tensor:
        """Return the whole, from the parts: `part(coordinates)` is what the rank there holds.

        Each element is asked of one rank only.
        """
        first = self.axes.here | dict.fromkeys(self.cut_axes, 0)
        return self._joined(self.entries[name], part, ORDER, first, self.entries[name].shape)

    def _joined(
        self,
        entry: Entry,
        part: Callable[[Coordinates], Tensor],
        axes: Sequence[str],
        at: dict[str, int],
        shape: Sequence[int],
    ) -> Tensor:
        """Return the parts that these axes cut, put together.

        (It isn't a function inside of `join`: that one would refer to itself, and so hold the parts
        until Python looks for cycles.)
        """
        if not axes:
            return part(at)
        axis, *inner = axes
        joined = partial(self._joined, entry, part, inner)
        match entry.placements.get(axis):
            case Shard(dim, sizes) as shard:
                shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
                return shard.join([joined(at | {axis: i}, shapes[i]) for i in range(len(sizes))])
            case Pieces() as pieces:
                bounds = pieces.at(at)
                held = [i for i, (low, high) in enumerate(bounds) if low < high]
                row = [
                    joined(at | self.axes.at(i, pieces.axes), shape).reshape(-1)
                    for i in held or [0]
                ]
                return torch.cat(row).view(tuple(shape))
            case Stages(positions):
                return joined(at | {axis: positions[0]}, shape)
            case None:
                return joined(at, shape)

    def counts(self, name: str, at: Coordinates | None = None) -> bool:
        """Return True on exactly one of the ranks that hold a copy, the first, so that `join` and
        `norm` count it once.
        """
        at, entry = at or self.axes.here, self.entries[name]
        stages = entry.placements.get("pp")
        if isinstance(stages, Stages) and at["pp"] != stages.positions[0]:
            return False
        return not any(at[axis] for axis in self.cut_axes if axis not in entry.cut_by())

    # ── all of them, collective ──

    def gather(
        self, parts: Mapping[str, Tensor], names: Sequence[str], first_only: bool = False
    ) -> dict[str, Tensor]:
        """Return the whole tensor of each of these names, from each rank's part.

        If nothing is cut, these are copies of the parts.

        One all-gather a dtype, or with `first_only` a gather to the first rank; the others get
        nothing. A rank's `parts` lacks a name if it holds no element of it.
        """
        if not self.cut_axes:
            return {name: parts[name].detach().clone() for name in names}
        # by rank
        held: dict[tuple[int, ...], dict[str, Tensor]] = {
            tuple(at.values()): {} for at in self.line
        }
        for dtype in dict.fromkeys(self.entries[name].dtype for name in names):
            alike = [name for name in names if self.entries[name].dtype == dtype]
            sizes = [
                {
                    name: self.shape(name, at).numel() if self.counts(name, at) else 0
                    for name in alike
                }
                for at in self.line
            ]
            mine = [
                parts[name].detach().reshape(-1)
                for name in alike
                if name in parts and self.counts(name)
            ]
            packed = torch.cat([torch.empty(0, dtype=dtype, device=self.device), *mine])
            collect = gather if first_only else all_gather
            rows = collect(
                packed, group=self.axes.along(self.cut_axes), sizes=[sum(s.values()) for s in sizes]
            )
            if first_only and self.axes.position != 0:
                continue
            for at, of_rank, row in zip(
                self.line, sizes, rows.split([sum(s.values()) for s in sizes])
            ):
                held[tuple(at.values())].update(zip(alike, row.split(list(of_rank.values()))))

        if first_only and self.axes.position != 0:
            return {}

        def part(name: str, at: Coordinates) -> Tensor:
            return held[tuple(at.values())][name].view(self.shape(name, at))

        return {name: self.join(name, partial(part, name)) for name in names}

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of the whole model's gradients, the same on every rank, from each rank's
        parts.
        """
        mine = nn.utils.get_total_norm([g for name, g in gradients.items() if self.counts(name)])
        if not self.cut_axes:
            return mine
        squares = all_gather(
            mine.to(self.device).double().square().view(1), group=self.axes.along(self.cut_axes)
        )
        return squares.sum().sqrt()

    # ── in words ──

    def describe(self) -> Iterator[str]:
        """Yield a line for each way in which parameters are placed."""
        ways: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            words = [
                f"{_in_words(placement)} over {_axes_of(placement, axis)}"
                for axis, placement in entry.placements.items()
            ]
            ways.setdefault(" and ".join(words) or "replicated", []).append(name)
        for how, names in ways.items():
            yield f"{names[0] if len(names) == 1 else f'{len(names)} tensors of the model'}: {how}"


# ── names ──


def tensors_of_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in a state_dict, by name, each once, even if tied."""
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    return {
        name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if id(t) in kept
    }


class StateNames:
    """The keys of a whole model's state_dict, and the tensors that they name.

    Attributes:
        keys: all of them. names: key → name of the parameter or buffer; several keys have the same
            name if they are tied.
    """

    def __init__(self, model: nn.Module):
        names = {id(t): name for name, t in tensors_of_state(model).items()}
        state = model.state_dict(keep_vars=True)
        self.keys = list(state)
        self.names = {key: names[id(t)] for key, t in state.items() if id(t) in names}


# ── in words ──


def _axes_of(placement: Placement, axis: str) -> str:
    return " and ".join(placement.axes) if isinstance(placement, Pieces) else axis


def _in_words(placement: Placement) -> str:
    match placement:
        case Stages(positions):
            return f"on stage{'s' if len(positions) > 1 else ''} {', '.join(map(str, positions))}"
        case Shard(dim):
            return f"sharded along dim {dim}"
        case Pieces():
            return "in flat pieces"
