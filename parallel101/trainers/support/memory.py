"""The bytes that each rank holds, counted from the storages that are alive, not from sizes.

rank 0   weights 4.2 MB   gradients 4.2 MB   optimizer state 8.4 MB
rank 1   weights 4.2 MB   …                  two views of one storage count once
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, UntypedStorage

from parallel101.trainers.layout import (
    ORDER,
    Coordinates,
    Layout,
    Pieces,
    Shard,
    Stages,
)
from parallel101.trainers.step import Trainer

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


class LiveBytes:
    """Bytes that are alive only for a moment (gathered layers, gradients in flight), as long as
    anything holds their memory.

    gathered   ▂ ▄ ▄ ▄ ▄ ▂        two layers at most, if every layer is freed;
    leaked     ▂ ▄ ▆ █ █ ▇        a view that somebody keeps keeps the whole storage, and is counted

    It holds weak references to storages: one counts until its last tensor, view or place in a graph
    is gone.

    Attributes:
        peak: kind → the most bytes of it that were alive at once since `begin`.
    """

    def __init__(self) -> None:
        self.storages: dict[str, list[weakref.ref[UntypedStorage]]] = defaultdict(list)
        self.peak: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        self.peak = defaultdict(int, {kind: self.now(kind) for kind in self.storages})

    def watch(self, kind: str, tensor: Tensor) -> None:
        """Count the memory of this tensor from now on."""
        self.storages[kind].append(weakref.ref(tensor.untyped_storage()))
        self.peak[kind] = max(self.peak[kind], self.now(kind))

    def now(self, kind: str) -> int:
        """Return the bytes of this kind that are alive."""
        refs = self.storages[kind]
        alive = {id(storage): (ref, storage) for ref in refs if (storage := ref()) is not None}
        refs[:] = [ref for ref, _ in alive.values()]
        return sum(storage.nbytes() for _, storage in alive.values())


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
        head = ["", *self.bytes, "together"]
        rows = [
            [
                f"rank {rank}",
                *(readable(by_position[i]) for by_position in self.bytes.values()),
                readable(self.total(i)),
            ]
            for i, rank in enumerate(self.ranks)
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = [
            "   ".join(cell.rjust(width) for cell, width in zip(row, widths))
            for row in [head, *rows]
        ]
        return "\n".join([self.title, *lines, *self.notes])

    __repr__ = __str__


def describe(trainer: Trainer, title: str) -> Holdings:
    """Return the bytes of each rank: see `HybridTrainer.describe`."""
    parameters, state = list(trainer.model.parameters()), trainer.optimizer.state.values()
    held: dict[str, list[Tensor]] = {
        "weights": [*parameters, *trainer.model.buffers()],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [
            value for of_one in state for value in of_one.values() if isinstance(value, Tensor)
        ],
    }
    more = trainer.sync.held()
    mine = {
        kind: storage_bytes([*held.get(kind, []), *more.get(kind, [])]) for kind in {**held, **more}
    } | dict(trainer.sync.peaks())
    if trainer.activations is not None:
        mine["activations (peak)"] = trainer.activations.peak
    # a stage without trained weights has fewer kinds
    of_ranks = [json.loads(text) for text in trainer.agree.texts(json.dumps(mine))]
    counts = {
        kind: [of_rank.get(kind, 0) for of_rank in of_ranks]
        for kind in dict.fromkeys(kind for of_rank in of_ranks for kind in of_rank)
    }
    ranks = trainer.agree.ranks
    notes = [*trainer.notes, *trainer.layout.describe(), trainer.sync.describe()]
    # dp cuts what its ZeRO stage says, and everything else is the same along it
    layout, trained = trainer.layout, trainer.trained
    parts = {
        kind: parts_held(layout, names, dp=trainer.sync.zero_stage >= stage)
        for kind, names, stage in (
            ("weights", layout.entries, 3),
            ("gradients", trained, 2),
            ("optimizer state", trained, 1),
            ("master weights", trained, 1),
        )
        if kind in counts
    }
    return Holdings(title, ranks, counts, notes, parts)


def parts_held(layout: Layout, names: Iterable[str], *, dp: bool) -> list[list[Part]]:
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
        dp: whether they are cut along dp too. If not, its ranks hold the same.
    """
    places = [layout.axes.coordinates(i) for i in range(len(layout.axes.members.ranks))]
    sizes: dict[tuple[int, ...], int] = defaultdict(int)  # the ranks that hold some bytes → bytes
    for name in names:
        entry = layout.entries[name]
        stages, pieces = entry.placements.get("pp"), entry.placements.get("dp")
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
            spans = [(0, count)] * len(positions)
            if dp and isinstance(pieces, Pieces):
                spans = [
                    pieces.at(places[k])[layout.axes.place(pieces.axes, places[k])]
                    for k in positions
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
