"""Who holds what: bytes a rank, counted from the storages that are alive, never from sizes that somebody multiplied.

rank 0   weights 4.2 MB   gradients 4.2 MB   optimizer state 8.4 MB
rank 1   weights 4.2 MB   …                                            two views of one storage count once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once, however many of the tensors lie in it."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


@dataclass(frozen=True)
class Holdings:
    """What `describe()` gives: for each rank of the group, in order, the bytes of each kind that it holds.

    Attributes:
        title: which trainer, on how many ranks.
        ranks: their ranks in the world.
        bytes: kind → bytes by position, such as {"weights": [4096, 4096], …}.
        notes: what else is worth telling, a sentence each.
    """

    title: str
    ranks: Sequence[int]
    bytes: Mapping[str, Sequence[int]]
    notes: Sequence[str] = ()

    def total(self, position: int) -> int:
        return sum(by_position[position] for by_position in self.bytes.values())

    def __str__(self) -> str:
        head = ["", *self.bytes, "together"]
        rows = [
            [f"rank {rank}", *(readable(by_position[i]) for by_position in self.bytes.values()), readable(self.total(i))]
            for i, rank in enumerate(self.ranks)
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = ["   ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [head, *rows]]
        return "\n".join([self.title, *lines, *self.notes])

    __repr__ = __str__


def readable(count: float) -> str:
    """18_874_368 → "18.9 MB": powers of 1000, as memory is told in papers."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
