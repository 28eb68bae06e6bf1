"""What is alive for a moment: gathered layers and gradients on their way, counted for as long as anything holds their memory.

gathered   ▂ ▄ ▄ ▄ ▄ ▂        two layers at most, if every layer is let go;
leaked     ▂ ▄ ▆ █ █ ▇        a view that somebody keeps keeps the whole storage, and is seen
"""

from __future__ import annotations

import weakref
from collections import defaultdict

from torch import Tensor, UntypedStorage


class Live:
    """Storages by kind, without holding them: one counts until its last tensor, view or place in a graph is gone.

    Attributes:
        most: kind → the most bytes of it that were alive at once since `begin`.
    """

    def __init__(self) -> None:
        self.storages: dict[str, list[weakref.ref[UntypedStorage]]] = defaultdict(list)
        self.most: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        self.most = defaultdict(int, {kind: self.now(kind) for kind in self.storages})

    def watch(self, kind: str, tensor: Tensor) -> None:
        """From now on it counts."""
        self.storages[kind].append(weakref.ref(tensor.untyped_storage()))
        self.most[kind] = max(self.most[kind], self.now(kind))

    def now(self, kind: str) -> int:
        """Bytes of this kind that are alive."""
        refs = self.storages[kind]
        alive = {id(storage): (ref, storage) for ref in refs if (storage := ref()) is not None}
        refs[:] = [ref for ref, _ in alive.values()]
        return sum(storage.nbytes() for _, storage in alive.values())
