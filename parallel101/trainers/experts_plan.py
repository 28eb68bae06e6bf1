"""The axis ep: the modules of a model that hold experts, and how it deals the experts out.

    plan      {"blocks.*.mlp.experts": "experts"}, or "auto": modules with the name "experts"
    before    up (8, width, hidden), down (8, hidden, width)     expert e is [e] of each parameter
    after     up (4, width, hidden), down (4, hidden, width)     on each of two ranks

Such a module is called with (rows, choice), and computes each row with the expert of its choice, a
whole number. Afterwards it is called in the same way: expert_parallel.py sends the rows to the
ranks that hold their experts, and the results back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from parallel101.mesh import split_sizes
from parallel101.trainers.axis import Axis, OneStage
from parallel101.trainers.expert_parallel import experts_over_ranks
from parallel101.trainers.layout import Axes, Shard
from parallel101.trainers.options import EXPERTS, Options
from parallel101.trainers.tensor.plan import names_of


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
        chosen = [name for name in named if name in matched]
        chosen = [name for name in chosen if not any(name.startswith(f"{n}.") for n in chosen)]
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
