"""Random numbers of a Keras model on several ranks: dropout draws one mask for each sample.

    along tp    ranks compute the same samples      the same masks: position 0's random numbers
    along dp    ranks compute different samples     other masks on each rank

Keras draws from torch's generator and, in layers with a seed, from a seed that each layer keeps and
counts up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallel101.collectives import broadcast
from parallel101.trainers.agreement import Agreement

# between the seeds of two ranks: a layer counts its seed up by 1 for each mask
FAR_APART = 0x9E3779B1


class Draws:
    """The sources of random numbers in a model's layers.

    Attributes:
        seeds: the variables in which layers keep their seeds. Without any, the model draws no
            random numbers.
    """

    def __init__(self, model: Any, position: int, device: torch.device):
        weights = {id(v) for v in model.weights}
        self.seeds = [v for v in model.variables if id(v) not in weights]
        offset = (position * FAR_APART + 2**31) % 2**32 - 2**31  # an int32, as the seeds are
        self.position, self.device = position, device
        self.offset = torch.tensor([offset, 0], device=device)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw different random numbers on each rank inside the block.

        Afterwards all ranks draw the same numbers again.
        """
        if not self.seeds:
            yield
            return
        seed = int(torch.randint(2**31, ()))
        for v in self.seeds:
            v.assign(v.value + self.offset.to(v.value.dtype))
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(seed + self.position * FAR_APART)
                yield
        finally:
            for v in self.seeds:
                v.assign(v.value - self.offset.to(v.value.dtype))


def draw_alike(agree: Agreement) -> None:
    """Give every rank the state of position 0's random numbers.

    Keras shuffles with the CPU's random numbers. Collective.
    """
    state = broadcast(torch.get_rng_state().to(agree.device), 0, group=agree.group)
    torch.set_rng_state(state.cpu())
    if agree.device.type == "cuda":
        state = broadcast(
            torch.cuda.get_rng_state(agree.device).to(agree.device), 0, group=agree.group
        )
        torch.cuda.set_rng_state(state.cpu(), agree.device)


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Restore Python's random generator after the block.

    Building a Keras model draws seeds from it.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
