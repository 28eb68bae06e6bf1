"""The bytes that each rank holds, counted from the storages that are alive, not from sizes.

rank 0   weights 4.2 MB   gradients 4.2 MB   optimizer state 8.4 MB
rank 1   weights 4.2 MB   …                  two views of one storage count once
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from parallel101.trainers.layout import (
    ORDER,
    Coordinates,
    Layout,
    Shard,
    Stages,
)
from parallel101.trainers.support.arguments import Trainer

Part = tuple[float, float]  # from, to: fractions of the whole model


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind these tensors, each storage once, however many of
    the tensors share it.
    """
    storages = {
        id(storage): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


@dataclass(frozen=True)
class Holdings:
    """The result of `describe()`: for each rank of the group, in order, the bytes of each kind
    that it holds. Print it to see a table.

    Attributes: title: which trainer, on how many ranks. ranks: their ranks in the world. bytes:
        kind → bytes by position, such as {"weights": [4096, 4096], …}. notes: what else is worth
        telling, a line each: how modules are cut, parameters placed and gradients synchronized.
        parts: kind → by position, which parts of the whole model these bytes belong to; see
        `parts_held`.
    """

    title: str
    ranks: Sequence[int]
    bytes: Mapping[str, Sequence[int]]
    notes: Sequence[str] = ()
    parts: Mapping[str, Sequence[Sequence[Part]]] = field(default_factory=dict)

    def total(self, position: int) -> int:
        return sum(by_position[position] for by_position in self.bytes.values())

    def __str__(self) -> str:
        kinds = [*self.bytes.values(), [self.total(i) for i in range(len(self.ranks))]]
        rows = [["", *self.bytes, "together"]]
        for i, rank in enumerate(self.ranks):
            rows.append([f"rank {rank}", *(readable(of_kind[i]) for of_kind in kinds)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["   ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([self.title, *lines, *self.notes])

    __repr__ = __str__


def describe(trainer: Trainer) -> Holdings:
    """Return each rank's holdings in bytes, counted from the storages that are alive now.

    Collective; print it to see a table.
    """
    ranks = trainer.agree.ranks
    title = f"{type(trainer).__name__} on {len(ranks)} rank{'s'[: len(ranks) - 1]}"
    data, owned, state = trainer.data, trainer.owned, trainer.optimizer.state.values()
    parameters = [*trainer.model.parameters(), *trainer.runner.sync.owned.values()]
    held: dict[str, Iterable[Tensor]] = {
        "weights": [*parameters, *trainer.model.buffers()],
        "gradients": [p.grad for p in [*parameters, *owned.values()] if p.grad is not None],
        "optimizer state": [
            value for of_one in state for value in of_one.values() if isinstance(value, Tensor)
        ],
    }
    if trainer.precision.master:
        held["master weights"] = owned.values()
    mine = {kind: storage_bytes(tensors) for kind, tensors in held.items()}
    if zero_stage := data.options.zero_stage:
        mine["gathered (peak)"] = data.live.peak["weights"]
        mine["gradients in flight (peak)"] = data.live.peak["gradients"]
    if trainer.activations is not None:
        mine["activations (peak)"] = trainer.activations.peak
    layout, trained = trainer.layout, trainer.trained
    dp = {name: entry.placements.get("dp") for name, entry in layout.entries.items()}
    pieces = {name: tuple(own)[:2] for name, own in dp.items() if own is not None}
    of_ranks, of_pieces = zip(*trainer.agree.objects((mine, pieces)))
    # a stage without trained weights has fewer kinds
    kinds = dict.fromkeys(kind for of_rank in of_ranks for kind in of_rank)
    counts = {kind: [of_rank.get(kind, 0) for of_rank in of_ranks] for kind in kinds}
    notes = [*trainer.notes, *trainer.layout.describe(), f"{len(owned)} gradients, {data.how()}"]
    # dp cuts what its ZeRO stage says, and everything else is the same along it
    parts = {
        kind: parts_held(layout, names, of_pieces if zero_stage >= stage else ())
        for kind, names, stage in (
            ("weights", layout.entries, 3),
            ("gradients", trained, 2),
            ("optimizer state", trained, 1),
            ("master weights", trained, 1),
        )
        if kind in counts
    }
    return Holdings(title, ranks, counts, notes, parts)


def parts_held(
    layout: Layout, names: Iterable[str], pieces: Sequence[Mapping[str, tuple[int, int]]]
) -> list[list[Part]]:
    """Return the parts of the model that each rank holds, by position in the group.

        rank 0  ▇▇▇             [(0.0, 0.3)]
        rank 1    ▇▇▇           [(0.2, 0.5)]    both have what is not cut along tp
        rank 2       ▇▇▇▇▇      [(0.5, 1.0)]    another stage

    Elements that the same ranks hold are put side by side, in the order of the cuts: stages, in
    each stage the shards along tp and ep, in each shard the pieces along dp. So a part that several
    ranks hold is at the same place for all of them, and together they cover everything.

    Args:
        layout: of the model.
        names: of the tensors that count.
        pieces: which elements of its shard each rank holds, by name; empty if dp doesn't cut them.
    """
    places = [layout.axes.coordinates(i) for i in range(len(layout.axes.members.ranks))]
    sizes: dict[tuple[int, ...], int] = defaultdict(int)  # the ranks that hold some bytes → bytes
    for name in names:
        entry = layout.entries[name]
        stages = entry.placements.get("pp")
        shards = {a: s for a, s in entry.placements.items() if isinstance(s, Shard)}
        # ranks with the same shard along tp, or of the experts along ep
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for position, at in enumerate(places):
            if not isinstance(stages, Stages) or at["pp"] in stages.positions:
                alike[tuple(at[axis] for axis in shards)].append(position)
        for here, positions in alike.items():
            count = entry.shape.numel()
            for i, shard in zip(here, shards.values()):
                count = count * shard.sizes[i] // entry.shape[shard.dim]
            spans = [
                pieces[k][name] if pieces and name in pieces[k] else (0, count) for k in positions
            ]
            for low, high in pairwise(sorted({edge for span in spans for edge in span})):
                holders = tuple(
                    k for k, (start, end) in zip(positions, spans) if start <= low and high <= end
                )
                sizes[holders] += (high - low) * entry.dtype.itemsize
    held: list[list[tuple[int, int]]] = [[] for _ in places]
    low = 0
    for holders in sorted(sizes, key=lambda ranks: _middle([places[i] for i in ranks])):
        high = low + sizes[holders]
        for position in holders:
            before = held[position]
            start = before.pop()[0] if before and before[-1][1] == low else low
            before.append((start, high))
        low = high
    return [[(start / low, end / low) for start, end in of_rank] for of_rank in held]


def _middle(places: Sequence[Coordinates]) -> list[float]:
    """Return the mean coordinates of some ranks, the axis that cuts first coming first."""
    return [sum(at.get(axis, 0) for at in places) / len(places) for axis in (*ORDER, "cp")]


def readable(count: float) -> str:
    """Return 18_874_368 as "18.9 MB": in powers of 1000, as papers write memory."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
