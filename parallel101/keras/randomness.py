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


def seeds_of(model: Any) -> list[Any]:
    """Return the variables in which layers keep their seeds.

    Without any, the model draws no random numbers.
    """
    weights = {id(v) for v in model.weights}
    return [v for v in model.variables if id(v) not in weights]


@contextmanager
def own_draws(seeds: list[Any], position: int, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each rank inside the block.

    Afterwards all ranks draw the same numbers again.
    """
    seed, apart = int(torch.randint(2**31, ())), position * FAR_APART
    offset = (apart + 2**31) % 2**32 - 2**31  # an int32, as the seeds are

    def shift(by: int) -> None:
        for v in seeds:
            v.assign(v.value + torch.tensor([by, 0]).to(v.value))

    shift(offset)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + apart)
            yield
    finally:
        shift(-offset)


def draw_alike(agree: Agreement) -> None:
    """Give every rank the state of position 0's random numbers.

    Keras shuffles with the CPU's random numbers. Collective.
    """
    generators = [torch.default_generator]
    if agree.device.type == "cuda":
        generators.append(torch.cuda.default_generators[agree.device.index])
    for generator in generators:
        state = broadcast(generator.get_state().to(agree.device), 0, group=agree.group)
        generator.set_state(state.cpu())


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
