"""The random numbers of a step, such as dropout's masks.

They come from the first rank's seed, the step, and the place along dp, cp and ep.

    dp 0, tp 0   mask 1 0 1 1        dp 1, tp 0   mask 0 1 1 0        other samples: other masks
    dp 0, tp 1   mask 1 0 1 1        dp 1, tp 1   mask 0 1 1 0        equal samples: equal masks
    dp 0, cp 1   mask 1 1 0 0        other positions of the same samples: other masks

So it does not matter how the ranks were seeded, a step that is repeated or resumed draws the same
masks again, and torch's global random numbers, which may shuffle the data, go on afterwards as if
there had been no step. One rank alone draws from the global ones, as in plain torch. Random numbers
of Python, of NumPy and of a torch.Generator of the program's own are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel101.trainers.agreement import Agreement
from parallel101.trainers.layout import DATA, Axes


class RandomNumbers:
    """torch's global generators, of the CPU and of this rank's GPU, during a step.

    All ranks build it together.
    """

    def __init__(self, axes: Axes, agree: Agreement, device: torch.device):
        self.alone, self.place = axes.members.size == 1, axes.place(DATA)
        self.gpus = [device] if device.type == "cuda" else []
        if not self.alone:
            (seeds,) = agree.numbers(torch.initial_seed() % 2**53)  # which a float64 has exactly
            self.first = int(seeds[0])

        self.step: int | None = None  # that is running
        self.forwards = 0  # that it has begun

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        """Draw the random numbers of this step inside; afterwards they go on where they were
        before.
        """
        if self.alone:
            yield
            return
        with torch.random.fork_rng(self.gpus):
            self.step, self.forwards = step, 0
            try:
                yield
            finally:
                self.step = None

    @contextmanager
    def during_forward(self) -> Iterator[None]:
        """Run a forward, which draws numbers of its own: with sequence parallel, ranks along tp
        that have unequal parts of the time draw different amounts of them.
        """
        if self.step is not None:
            text = f"{self.first} {self.place} {self.step} {self.forwards}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
            torch.default_generator.manual_seed(seed)
            for gpu in self.gpus:
                torch.cuda.set_rng_state(torch.Generator(gpu).manual_seed(seed).get_state(), gpu)
            self.forwards += 1
        yield
