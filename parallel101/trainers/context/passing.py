"""A block on its way round the ring: to the right neighbour, while the left one's arrives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from parallel101.collectives.comm import Work, wait_all
from parallel101.spans import wait_span


class Passing(NamedTuple):
    """Messages in flight: don't change what was sent, and don't read what arrives."""

    arriving: Tensor
    works: list[Work]

    def wait(self, why: str) -> Tensor:
        """Return what has arrived. The wait is recorded under the name `why`."""
        with wait_span(why):
            wait_all(self.works)
        return self.arriving
