"""A flat tensor split into one block for each rank: every algorithm works on these.

    blocks[2]      block 2            |  0  |  1  |**2**|  3  |
    blocks[1:3]    blocks 1 and 2     |  0  |**1*****2**|  3  |

Blocks are views, never copies, so a message that is received into a block is already where the
result needs it. Neighbouring blocks are contiguous, so a tree or recursive halving sends half of
them in one message. Sizes may differ, and be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from parallel101.mesh import split_sizes


class Blocks:
    """Blocks of `sizes` elements each, stored in `flat` (1-D, contiguous) from block `first` on.

    `flat` has all blocks, or a window of them. A rank inside a tree stores a window: only the
    blocks that pass through it.
    """

    def __init__(self, flat: Tensor, sizes: Sequence[int], first: int = 0):
        self.flat, self.sizes, self.first = flat, list(sizes), first
        self.starts = [0, *accumulate(self.sizes)]
        self._each: Sequence[Tensor] = ()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, key: int | slice) -> Tensor:
        if isinstance(key, int):
            if not self._each and self.flat.numel() == self.starts[-1]:
                # one split takes a tenth of the time of p narrows
                self._each = self.flat.split_with_sizes(self.sizes)
            if self._each:
                return self._each[key]
            key = slice(key, key + 1)
        low, high, _ = key.indices(len(self))
        return self.flat.narrow(
            0, self.starts[low] - self.starts[self.first], self.starts[high] - self.starts[low]
        )

    def empty(self, low: int = 0, high: int | None = None) -> Blocks:
        """Return blocks of the same sizes in new memory, which stores the blocks low … high − 1.

        By default it stores all of them.
        """
        high = len(self) if high is None else high
        return Blocks(self.flat.new_empty(self.starts[high] - self.starts[low]), self.sizes, low)

    def room(self, window: slice) -> Blocks:
        """Return these blocks if they store this window, else blocks in new memory that do."""
        base = self.starts[self.first]
        fits = (
            base <= self.starts[window.start]
            and self.starts[window.stop] - base <= self.flat.numel()
        )
        return self if fits else self.empty(window.start, window.stop)

    def merged(self, cuts: Sequence[int]) -> Blocks:
        """Return the same memory in fewer blocks; the i-th joins blocks cuts[i] … cuts[i+1] − 1."""
        return Blocks(self.flat, [self.starts[b] - self.starts[a] for a, b in pairwise(cuts)])


def even_blocks(flat: Tensor, p: int) -> Blocks:
    """Return `flat` (1-D) split over p ranks by `split_sizes`."""
    return Blocks(flat, split_sizes(flat.numel(), p))


def row_of(x: Tensor, dim: int) -> int:
    """Return the number of elements of x for each index along `dim`."""
    return math.prod(extent for d, extent in enumerate(x.shape) if d != dim)


def flat_of(x: Tensor, dim: int = 0) -> Tensor:
    """Return the values of x in one row with `dim` outermost: a shard along it is contiguous.

    They are copied only if they aren't stored in that order.
    """
    return (x.movedim(dim, 0) if dim else x).contiguous().view(-1)


def shaped(flat: Tensor, shape: Sequence[int], dim: int = 0) -> Tensor:
    """Return the contiguous tensor of `shape` whose `flat_of(…, dim)` is `flat`.

    It isn't copied if dim is 0.
    """
    outermost = [shape[dim], *shape[:dim], *shape[dim + 1 :]] if dim else shape
    return flat.view(outermost).movedim(0, dim).contiguous() if dim else flat.view(outermost)
