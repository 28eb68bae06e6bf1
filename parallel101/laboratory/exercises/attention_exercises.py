"""Shared code of exercises on attention over several ranks: blocks, cases and mistakes.

The time is cut over the ranks. A rank's queries meet the keys of every rank, block by block:

               keys of rank 0   rank 1   rank 2
    queries 0      causal          ·        ·         ·  in the future: not computed
            1       whole       causal      ·
            2       whole        whole   causal

What is expected comes from one process with the whole sequence, in float64. What usual mistakes
would give is computed too, so that they can be named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.exercises.training_exercises import PeakBytes
from parallel101.laboratory.grade.exercise import Check, Draw, Trial
from parallel101.laboratory.grade.exercise_checks import (
    at_most,
    failed,
)
from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute, span

HEADS, WIDTH, ITEM = 2, 16, 8  # of every case; bytes of a float64
Partial = tuple[Tensor, Tensor]  # out (heads, queries, d) and lse (heads, queries)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Return the attention of queries to a block of keys: out, and the log-sum-exp of the scores.

    With `causal`, query i sees the block's keys 0 to i.
    """
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block adds to dq, dk and dv, given `out` and `lse` of the whole row."""
    weights = (_scores(q, k, causal) - lse[..., None]).exp()
    row = (dout * out).sum(-1, keepdim=True)
    dscores = weights * (dout @ v.mT - row) / math.sqrt(q.shape[-1])
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(future.to(scores.device), -torch.inf)
    return scores


def merge(parts: Sequence[Partial]) -> Partial:
    """Return the attention to several blocks together, given the attention to each of them."""
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    return ((lses - lse).exp()[..., None] * outs).sum(0), lse


class AttentionBlocks:
    """The `attend` and `attend_backward` that the learner's code gets on a rank.

    On the virtual clock a block takes as long as it has pairs of a query and a key: a second for
    the largest one, and 2.5 times as long backward. `counted` has the most bytes of other ranks'
    tensors that were alive when one was computed, and the number of calls.
    """

    def __init__(self, sizes: Sequence[int], *own: Tensor):
        self.pairs = max(sizes) ** 2
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.others, self.calls = PeakBytes(), 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
        self._begin(q, k, v)
        with span("attend"):
            compute(self._seconds(q, k, causal))
            return attend(q, k, v, causal)

    def attend_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._begin(dout, q, k, v)
        with span("attend backward"):
            compute(2.5 * self._seconds(q, k, causal))
            return attend_backward(dout, q, k, v, out, lse, causal)

    def _begin(self, *tensors: Tensor) -> None:
        self.calls += 1
        self.others.watch(*(t for t in tensors if t.untyped_storage().data_ptr() not in self.own))

    def _seconds(self, q: Tensor, k: Tensor, causal: bool) -> float:
        queries, keys = q.shape[-2], k.shape[-2]
        seen = sum(min(i + 1, keys) for i in range(queries)) if causal else queries * keys
        return seen / self.pairs

    @property
    def counted(self) -> list[int]:
        return [self.others.peak, self.calls]


# ---- cases ----


class Cut:
    """q, k and v of a whole sequence, cut over the ranks, and what each pair of blocks gives."""

    def __init__(self, draw: Draw, sizes: Sequence[int], scale: float = 1.0):
        time = sum(sizes)
        self.sizes, self.n = list(sizes), len(sizes)
        q, k, v, dout = (draw.tensor(HEADS, time, WIDTH, dtype=torch.float64) for _ in range(4))
        # Every other query: where all of a rank's queries attend to one key each, gradients are
        # 1e-38, and the rounding errors of correct code far larger.
        q[:, ::2] *= scale
        out, lse = attend(q, k, v, True)
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, True)
        self.q, self.k, self.v, self.dout = self._cut(q, k, v, dout)
        self.out, self.lse, self.dq, self.dk, self.dv = self._cut(out, lse, dq, dk, dv)

    def _cut(self, *whole: Tensor) -> list[list[Tensor]]:
        return [[block.clone() for block in tensor.split(self.sizes, 1)] for tensor in whole]

    def part(self, rank: int, other: int, causal: bool | None = None) -> Partial:
        """Return the attention of `rank`'s queries to the keys of `other`."""
        causal = rank == other if causal is None else causal
        return attend(self.q[rank], self.k[other], self.v[other], causal)

    def part_backward(
        self, rank: int, other: int, causal: bool | None = None, out_lse: Partial | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what these two parts add to dq of `rank`, and to dk and dv of `other`."""
        causal = rank == other if causal is None else causal
        out, lse = out_lse or (self.out[rank], self.lse[rank])
        return attend_backward(
            self.dout[rank], self.q[rank], self.k[other], self.v[other], out, lse, causal
        )

    def label(self, scale: float = 1.0) -> str:
        equal = len(set(self.sizes)) == 1
        positions = f"{self.sizes[0]} positions each" if equal else f"{self.sizes} positions"
        return positions + (", large scores" if scale > 10 else "")


def block_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of K and V of the longest part of the sequence."""
    return 2 * HEADS * max(sizes) * WIDTH * ITEM


def block_a_second(sizes: Sequence[int]) -> Network:
    """Return links that carry K and V of the longest part in one second."""
    return Network(latency=0.0, bandwidth=block_bytes(sizes))


# ---- checks ----


def never_called(trial: Trial) -> str | None:
    """Return a sentence about a rank that never called the function it was given; else None."""
    idle = [rank for rank, (*_, calls) in enumerate(trial.results) if not calls]
    text = "rank {} never called the function that it was given for a block"
    return text.format(idle[0]) if idle else None


def few_blocks(says: str) -> Check:
    """Return a check that a rank holds at most three other ranks' K and V at once.

    These are the one in use, the one before, and a copy.
    """
    held = at_most(
        "memory",
        says,
        lambda trial: [peak for *_, peak, _calls in trial.results],
        lambda case: 3 * block_bytes(case.facts["sizes"]),
        "rank {rank} held {found} bytes that it had received or joined, all at once; three blocks "
        "of K and V have {most}",
    )
    return replace(held, wrong=lambda trial: held.wrong(trial) or never_called(trial))


def all_gathered(trials: Sequence[Trial]) -> bool:
    """Return whether everything is right, but some rank holds more than a few blocks."""
    return (
        bool(trials)
        and not failed(trials)
        and not any(map(never_called, trials))
        and any(few_blocks("").wrong(trial) is not None for trial in trials)
    )


# ---- usual mistakes ----


def unpacked(found: Any, count: int) -> list[Any]:
    """Return a learner's result as a list of `count` parts.

    If it doesn't have that many, the first part is the result itself, and the others are None.
    """
    if isinstance(found, list | tuple) and len(found) == count:
        return [part.detach() if isinstance(part, Tensor) else part for part in found]
    return [found, *[None] * (count - 1)]
