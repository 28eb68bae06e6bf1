"""The layout of every parameter: its whole shape, and how each axis of the mesh places it.

Only `gather`, `collect` and `norm` send messages.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather
from parallel101.mesh import Group, GroupLike, along, group_of
from parallel101.trainers.agreement import Agreement, named_tensors
from parallel101.trainers.batches import copied

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
        start, size = sum(of_part[:position]), of_part[position]
        parts = whole.chunk(self.parts, self.dim)
        segments = [part.narrow(self.dim, start, size) for part in parts]
        return segments[0] if self.parts == 1 else torch.cat(segments, self.dim)


class Pieces(NamedTuple):
    """Flattened and cut over several axes together: this rank holds the elements from `low` to
    `high` − 1, none if they are equal. Each rank knows its own bounds only.
    """

    low: int
    high: int
    axes: tuple[str, ...] = ("dp",)


Placement = Stages | Shard | Pieces
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
# what a rank holds of a tensor of the whole model: its Pieces as a tuple, empty if it has none, and
# their values
Part = tuple[Sequence[Any], Any]


class Entry(NamedTuple):
    """A parameter or buffer of the whole model."""

    shape: torch.Size
    dtype: torch.dtype
    placements: Mapping[str, Placement] = {}  # by axis; "dp" for Pieces, whatever axes they have

    def cut_by(self, in_pieces: bool = True) -> set[str]:
        """Return the axes along which ranks hold different parts of it, or of its shards."""
        cut = set(self.placements) - {"dp"}
        pieces = self.placements.get("dp")
        return cut | {*pieces.axes} if in_pieces and isinstance(pieces, Pieces) else cut


class Axes:
    """The ranks that train as a mesh: the lines of ranks through this one.

    Args: group: all these ranks; see `group_of`. sizes: name of an axis → its size, in the order in
        which the group numbers its ranks; the last axis varies fastest.

    Attributes:
        here: this rank's coordinates.
        shares: by position in the group, the place along dp and ep: which samples it is given.
        without_tp: the positions at the start of tp. The others have the same loss.
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
        everywhere = [self.coordinates(i) for i in range(len(self.members.ranks))]
        self.shares = [self.place(SAMPLES, rank) for rank in everywhere]
        self.without_tp = [i for i, rank in enumerate(everywhere) if not rank.get("tp", 0)]

    def coordinates(self, position: int) -> dict[str, int]:
        """Return the coordinates, on each axis, of a position in the group."""
        position_on = {}
        for name, size in reversed(self.sizes.items()):
            position, position_on[name] = divmod(position, size)
        return position_on

    def place(self, names: Collection[str], where: Coordinates | None = None) -> int:
        """Return the place of a rank (default: this one) on these axes, counted row by row."""
        where, place = where or self.here, 0
        for name, size in self.sizes.items():
            if name in names:
                place = place * size + where[name]
        return place

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
        line, among = self.line(names), [name for name in self.sizes if name in names]
        named = tuple(name for name in among if self.sizes[name] > 1 or len(names) == 1)
        if len(line) == len(self.members.ranks):
            return self.members._replace(axes=self.members.axes or named)
        ranks = tuple(self.members.ranks[i] for i in line)
        return Group(ranks, line.index(self.position), (len(line),), None, named)


class Layout:
    """Every parameter and buffer by name, and how to take it apart and put it together.

    Args:
        axes: the ranks.
        shapes: name → shape and dtype of the whole, the same on every rank.
        placed: axis → name → how the axis cuts it.
        device: where the parts are.

    Attributes: entries: by name. line: coordinates of the ranks that together have everything.
    """

    def __init__(self, axes: Axes, shapes: Shapes, placed: Mapping[str, Any], device: torch.device):
        self.axes, self.device, self.entries = axes, device, dict[str, Entry]()
        for name, kind in shapes.items():
            axes_of = [axis for axis in ORDER if name in placed.get(axis, ())]
            self.entries[name] = Entry(*kind, {axis: placed[axis][name] for axis in axes_of})
        cut_axes = set().union(*(entry.cut_by() for entry in self.entries.values()))
        self.cut_axes = [axis for axis in axes.sizes if axis in cut_axes]
        self.line = [axes.coordinates(position) for position in axes.line(self.cut_axes)]

    # ── one entry, no messages ──

    def cut(
        self, name: str, whole: Tensor, where: Coordinates | None = None, pieces: Sequence[Any] = ()
    ) -> Tensor:
        """Return the part of the whole that a rank (default: this one) holds, which may be empty.

        The part is a view if possible. For another rank, `pieces` are its bounds, if it has some.
        """
        where, part = where or self.axes.here, whole
        for axis in ORDER:
            match self.entries[name].placements.get(axis):
                case Stages(positions) if where[axis] not in positions:
                    return whole.new_empty(0)
                case Shard() as shard:
                    part = shard.cut(part, where[axis])
                case Pieces() as own:
                    low, high, _ = pieces or own
                    part = part.reshape(-1)[low:high]
        return part

    def join(self, name: str, parts: Sequence[Part | None]) -> Tensor:
        """Return the whole, from the parts of the ranks in `line`, each element once."""
        shape, held = self.entries[name].shape, [part for part in parts if part is not None]
        if not held:  # it has no elements
            return torch.empty(shape, dtype=self.entries[name].dtype, device=self.device)
        if len(held) == 1:
            return held[0][1].view(shape)
        whole = held[0][1].new_empty(shape)
        numbers = torch.arange(shape.numel(), device=whole.device).view(shape)
        for where, part in zip(self.line, parts):
            if part is not None:
                pieces, value = part
                places = self.cut(name, numbers, where, pieces).reshape(-1)
                whole.view(-1)[places] = value.reshape(-1)
        return whole

    def counts(self, name: str, where: Coordinates | None = None) -> bool:
        """Return True on exactly one of the ranks that hold a copy, the first, so that `join` and
        `norm` count it once.
        """
        where, entry = where or self.axes.here, self.entries[name]
        stages = entry.placements.get("pp")
        if isinstance(stages, Stages) and where["pp"] != stages.positions[0]:
            return False
        return not any(where[axis] for axis in self.cut_axes if axis not in entry.cut_by())

    # ── all of them, collective ──

    def gather(
        self, parts: Mapping[str, Tensor], names: Sequence[str], first_only: bool = False
    ) -> dict[str, Tensor]:
        """Return the whole tensor of each of these names, from each rank's part.

        A rank's `parts` lacks a name if it holds no element of it. If nothing is cut, these are
        copies of the parts. With `first_only` the other ranks get nothing.
        """
        if not self.cut_axes:
            return {name: parts[name].detach().clone() for name in names}
        of_ranks = self.collect({n: parts[n] for n in names if n in parts}, first_only)
        if not of_ranks:
            return {}
        return {n: self.join(n, [of_rank.get(n) for of_rank in of_ranks]) for n in names}

    def collect(self, parts: Mapping[str, Any], first_only: bool = False) -> list[dict[str, Part]]:
        """Return what each rank in `line` has for each name: a tensor, or dicts of tensors and
        numbers. A rank leaves out copies of what another one has.

        With `first_only` the other ranks get [].
        """
        content = dict[str, Part]()
        for name in filter(self.counts, parts):
            pieces = tuple(self.entries[name].placements.get("dp", ()))
            content[name] = pieces, copied(parts[name])
        line = Agreement(self.axes.along(self.cut_axes), self.device)
        return line.objects(content, first_only)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of the whole model's gradients, the same on every rank, from each rank's
        parts.
        """
        norm = nn.utils.get_total_norm([g for name, g in gradients.items() if self.counts(name)])
        if not self.cut_axes:
            return norm
        square = norm.to(self.device).double().square().view(1)
        return all_gather(square, group=self.axes.along(self.cut_axes)).sum().sqrt()

    # ── in words ──

    def describe(self) -> Iterator[str]:
        """Yield a line for each way in which parameters are placed."""
        ways: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            words = []
            for axis, placement in entry.placements.items():
                match placement:
                    case Stages(positions):
                        numbers = ", ".join(map(str, positions))
                        words.append(f"on stage{'s' * (len(positions) > 1)} {numbers} over {axis}")
                    case Shard(dim):
                        words.append(f"sharded along dim {dim} over {axis}")
                    case Pieces(axes=axes):
                        words.append(f"in flat pieces over {' and '.join(axes)}")
            ways.setdefault(" and ".join(words) or "replicated", []).append(name)
        for how, names in ways.items():
            yield f"{names[0] if len(names) == 1 else f'{len(names)} tensors of the model'}: {how}"


# ── names ──


def state_names(model: nn.Module) -> dict[str, str | None]:
    """Return key → name of the parameter or buffer, for each key of a whole model's state_dict.

    Several keys have the same name if they are tied. None: it is neither, such as a module's extra
    state.
    """
    names = {id(t): name for name, t in named_tensors(model)}
    return {key: names.get(id(t)) for key, t in model.state_dict(keep_vars=True).items()}
