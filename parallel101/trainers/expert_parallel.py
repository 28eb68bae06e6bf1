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

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallel101.collectives import all_to_all
from parallel101.collectives.meta_device import count_choices
from parallel101.mesh import Group, GroupLike, group_of, split_sizes
from parallel101.spans import span, wait_span
from parallel101.trainers.axis import Axis, OneStage
from parallel101.trainers.layout import Axes, Shard
from parallel101.trainers.options import EXPERTS, Options
from parallel101.trainers.tensor.plan import names_of
from parallel101.trainers.torch_functions import GraphNode


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
    counts, of_arrived = count_rows(rows, choice, sizes, members)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # so that this rank takes part in backward's messages
    arrived = exchange("dispatch", rows[order], counts)
    with span("experts", rows=len(arrived)):
        results = experts(arrived, of_arrived)
    # `arrived` ties a rank into the graph whose results, of no rows, have none
    return exchange("combine", results, counts, arrived)[order.argsort()]


# how many rows this rank has for the experts of each position, how many arrive from it, the ranks
RowCounts = tuple[list[int], list[int], Group]


def count_rows(
    rows: Tensor, choice: Tensor, sizes: Sequence[int], group: Group
) -> tuple[RowCounts, Tensor]:
    """Tell the other ranks how many rows they get from here, for each of their experts.

    Returns the counts, and which of this rank's experts each row that arrives is for.
    """
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
    sent = [int(part.sum()) for part in counts.split(list(sizes))]
    of_arrived = experts.repeat_interleave(arriving.flatten()).to(choice.device)
    return (sent, arriving.sum(1).tolist(), group), of_arrived


def exchange(way: str, rows: Tensor, counts: RowCounts, *ties: Tensor) -> Tensor:
    """Dispatch rows, sorted by expert, to their experts' ranks, or combine: send results back to
    the ranks of their rows. Backward is the other one, of gradients.
    """
    there, here, group = counts

    def send(
        way: str, rows: Tensor
    ) -> Tensor:  # the first rows to position 0, the next ones to 1, …
        sent, received = (there, here) if way == "dispatch" else (here, there)
        with wait_span(way, rows=len(rows)):
            return all_to_all(rows, split_sizes=sent, concat_sizes=received, group=group)

    other = partial(send, "combine" if way == "dispatch" else "dispatch")
    return GraphNode.apply(lambda rows: (send(way, rows), other), rows, *ties)


# ── the axis ep: the modules of a model that hold experts, and how it deals the experts out ──
#
#     plan      {"blocks.*.mlp.experts": "experts"}, or "auto": modules with the name "experts"
#     before    up (8, width, hidden), down (8, hidden, width)     expert e is [e] of each parameter
#     after     up (4, width, hidden), down (4, hidden, width)     on each of two ranks
#
# Such a module is called with (rows, choice), and computes each row with the expert of its choice,
# a whole number. Afterwards it is called in the same way.


class ExpertsAxis(Axis):
    """The axis ep, which deals the model's experts out to its positions, as evenly as possible.

    Attributes:
        sizes: name of a module → how many experts each position along ep has.

    Raises ValueError for a model without experts, or with fewer than ranks.
    """

    name = "ep"

    def __init__(self, model: nn.Module, axes: Axes, options: Options):
        named = {name: module for name, module in model.named_modules() if name}
        ranks, self.axes, patterns = axes.sizes["ep"], axes, options.experts_plan
        matched = {name for p in patterns for name in names_of(p, list(named))}
        if not patterns:
            matched = {name for name in named if name.rpartition(".")[2] == EXPERTS}
        if not matched:
            raise ValueError(
                f"the mesh has an axis ep, but {type(model).__name__} has no module named "
                '"experts": expected one, or a plan such as {"*.mlp.experts": "experts"}'
            )
        inside = tuple(f"{name}." for name in matched)  # of another one
        chosen = [name for name in named if name in matched and not name.startswith(inside)]
        self.sizes, self.placements = {}, {}
        for name in chosen:
            counts = {p.shape[0] if p.dim() else 0 for p in named[name].parameters()}
            if len(counts) != 1 or min(counts) < ranks or [*named[name].buffers()]:
                raise ValueError(
                    f"{name!r} ({type(named[name]).__name__}) can't be dealt out over {ranks} "
                    f"ranks along ep: its parameters have {sorted(counts)} entries along dim 0. "
                    "Expected one entry for each expert in all of them, at least one expert for "
                    "each rank, and no buffers"
                )
            (count,) = counts
            self.sizes[name] = tuple(split_sizes(count, ranks))
            for of_module, _ in named[name].named_parameters(prefix=name):
                self.placements[of_module] = Shard(0, self.sizes[name])

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        """Keep this rank's experts, and let the modules send rows to the others."""
        group, position = self.axes.along(["ep"]), self.axes.here["ep"]
        for name, sizes in self.sizes.items():
            module = model.get_submodule(name)
            for part in module.modules():
                for of_part, p in part.named_parameters(recurse=False):
                    block = Shard(0, sizes).cut(p.detach(), position).clone()
                    setattr(part, of_part, nn.Parameter(block, p.requires_grad))
            module.forward = partial(experts_over_ranks, module.forward, sizes=sizes, group=group)

    def describe(self) -> Iterator[str]:
        for name, sizes in self.sizes.items():
            yield f"{name}: {' + '.join(map(str, sizes))} experts along ep"
