"""A block on its way round the ring: to the right neighbour, while the left one's arrives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from parallel101.collectives.comm import Comm, Work, wait_all
from parallel101.record.spans import wait_span


class Passing(NamedTuple):
    """Two messages in flight. `wait` returns what arrives."""

    arriving: Tensor
    works: list[Work]

    def wait(self, why: str) -> Tensor:
        with wait_span(why):
            wait_all(self.works)
        return self.arriving


def pass_on(block: Tensor, source: int, sizes: list[int], comm: Comm) -> Passing:
    """Begin to pass on a block of (…, time, d), and to receive another one.

    Args:
        block: contiguous. Don't change it before `wait`.
        source: the position whose time the block is about. That of position source − 1 arrives.
        sizes: the time of each position.
        comm: of the ring. One rank alone sends nothing: it gets its block back.
    """
    if comm.size == 1:
        return Passing(block, [])
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    arriving = block.new_empty(*block.shape[:-2], sizes[source - 1], block.shape[-1])
    works = [comm.irecv(arriving, left), comm.isend(block, right)]
    comm.flush()  # under NCCL's rules the two start together, now
    return Passing(arriving, works)
