"""Expert parallel: each rank has some of the experts, and rows travel to the expert they chose.

    rank 0   rows for 0 0 1 2 3  ─┐ dispatch ┌─▶ experts 0, 1 ─┐ combine ┌─▶  0 0 1 2 3
    rank 1   rows for 0 1 1 1 3  ─┘          └─▶ experts 2, 3 ─┘         └─▶  0 1 1 1 3

    counts      how many rows a rank has for each expert: an all-to-all of whole numbers
    dispatch    an all-to-all of rows, as uneven as the router has chosen
    combine     the same messages the other way, with the experts' results

Where a row goes depends on the data, so a rank must be told the counts before it can receive.
Dispatch and combine are each the other's adjoint: a result's gradient is dispatched to its expert,
and a row's gradient is combined. All wait for the rank with the most rows (here rank 0, 7 of 10).
Source: Lepikhin et al., "GShard" (arXiv 2006.16668), section 3 (there, experts have a capacity).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel101.collectives import all_to_all
from parallel101.collectives.meta_device import count_choices
from parallel101.mesh import Group, GroupLike, group_of
from parallel101.spans import span, wait_span


def experts_over_ranks(
    experts: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    choice: Tensor,
    *,
    sizes: Sequence[int],
    group: GroupLike = None,
) -> Tensor:
    """Return the result of each row's expert, on whichever rank that expert is.

    Equal to one process with all experts. If one rank of the group calls it, or its backward, then
    all do, even those without rows. Forward and backward each send a row to its expert and back.

    Args:
        experts: this rank's experts: (rows, width) and the expert of each row, counted from this
            rank's first → (rows, width). `models.Experts` is one.
        rows: (rows, width) of this rank, 0 rows or more.
        choice: (rows,) int64: the expert of each row, 0 to sum(sizes) − 1.
        sizes: how many experts each position of the group has, in order.
        group: see `group_of`; None is all ranks. This rank is in it.

    Raises ValueError for arguments that don't fit, before the first row is sent.
    """
    members = group_of(group)
    order = choice.argsort(stable=True)  # by expert, and so by rank
    counts = count_rows(rows, choice, sizes, members)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # so that this rank takes part in backward's messages
    arrived = Exchange.apply("dispatch", rows[order], counts)
    with span("experts", rows=len(arrived)):
        results = experts(arrived, counts.choice)
    # `arrived` ties a rank into the graph whose results, of no rows, have none
    return Exchange.apply("combine", results, counts, arrived)[order.argsort()]


class RowCounts(NamedTuple):
    """The numbers of rows that this rank exchanges with each position, and their experts."""

    sent: list[int]  # by position
    received: list[int]
    choice: Tensor  # which of my experts each row that arrives is for
    group: Group


def count_rows(rows: Tensor, choice: Tensor, sizes: Sequence[int], group: Group) -> RowCounts:
    """Tell the other ranks how many rows they get from here, for each of their experts."""
    counts = count_choices(choice, sum(sizes))
    if choice.shape != rows.shape[:1] or len(counts) > sum(sizes):
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} and a choice of shape {tuple(choice.shape)}, up to "
            f"{len(counts) - 1}: expected for each row one of the {sum(sizes)} experts of "
            f"sizes={list(sizes)}"
        )
    with wait_span("counts"):
        arriving = all_to_all(counts, split_sizes=sizes, group=group, algorithm="direct")
    arriving = arriving.view(group.size, -1)  # from each rank, for each of my experts
    experts = torch.arange(arriving.shape[1], device=counts.device).repeat(group.size)
    return RowCounts(
        sent=[int(part.sum()) for part in counts.split(list(sizes))],
        received=arriving.sum(1).tolist(),
        choice=experts.repeat_interleave(arriving.flatten()).to(choice.device),
        group=group,
    )


class Exchange(Function):
    """Dispatches rows, sorted by expert, to their experts' ranks, or combines: sends results back
    to the ranks of their rows. Backward is the other one, of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, way: str, rows: Tensor, counts: RowCounts, arrived: Tensor | None = None
    ) -> Tensor:
        ctx.way, ctx.counts = way, counts
        return exchange(way, rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        way = "combine" if ctx.way == "dispatch" else "dispatch"
        return None, exchange(way, g, ctx.counts), None, None


def exchange(way: str, rows: Tensor, counts: RowCounts) -> Tensor:
    """Send the first rows to position 0, the next ones to position 1, …"""
    there, here = counts.sent, counts.received
    sent, received = (there, here) if way == "dispatch" else (here, there)
    with wait_span(way, rows=len(rows)):
        return all_to_all(rows, split_sizes=sent, concat_sizes=received, group=counts.group)
