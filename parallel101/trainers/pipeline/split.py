"""Cutting a model into pipeline stages: consecutive modules of a sequence whose composition is the
model's forward.

    GPT, 2 stages     embedding  block 0  block 1  |  block 2  block 3  norm  head
    MLP, 2 stages     linear  GELU  linear  GELU   |  linear  GELU  linear

By default each stage gets as many modules with parameters as the others. A module without any goes
with the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel101.mesh import split_sizes


class Received(Function):
    """Returns a tensor that has arrived, in the same memory, as a result that autograd allows to be
    changed in place. A leaf that requires grad is not such a result.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Part(nn.Module):
    """Consecutive modules of a model: one pipeline stage."""

    def __init__(self, entries: Mapping[int, nn.Module]):
        super().__init__()
        self.entries = list(entries.values())
        for number, entry in entries.items():
            self.add_module(str(number), entry)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the stage. The first module takes the model's arguments, or what the stage
        before has sent.
        """
        args = tuple(
            Received.apply(x) if isinstance(x, Tensor) and x.is_leaf and x.requires_grad else x
            for x in args
        )
        first, *others = self.entries
        x = first(*args, **kwargs)
        for entry in others:
            x = entry(x)
        return x

    def sequence(self) -> list[nn.Module]:
        """Return the modules whose composition is the forward."""
        return self.entries


def sequence_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the list of the model's `.sequence()`; None if it has no such method.

    Raises ValueError if not all of it are modules.
    """
    sequence: Any = getattr(model, "sequence", None)
    if not callable(sequence) or isinstance(sequence, nn.Module):  # a module may have this name too
        return None
    entries = list(sequence())
    for place, entry in enumerate(entries):
        if not isinstance(entry, nn.Module):
            raise ValueError(
                f"{type(model).__name__}.sequence() has a {type(entry).__name__} in position "
                f"{place} ({getattr(entry, '__name__', entry)}): "
                "expected modules only, such as nn.ReLU() for torch.relu, or a module of your "
                "own whose forward calls the function"
            )
    return entries


def entries_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose composition is the model's forward.

    Raises ValueError if the model doesn't tell.
    """
    entries = sequence_of(model)
    if entries is not None:
        return entries
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return list(model)
    raise ValueError(
        f"a {type(model).__name__} can't be cut into pipeline stages: expected an "
        "nn.Sequential without a forward of its own, or a model "
        "with a method .sequence() that returns the modules whose composition is its forward, "
        "in order"
    )


def cut_points(
    model: nn.Module, stages: int, layers_per_stage: Sequence[int] | None
) -> list[range]:
    """Return, for each stage, its entries of the sequence.

    Raises ValueError for a model that can't be cut like that.
    """
    entries = entries_of(model)
    with_parameters = [
        number for number, entry in enumerate(entries) if next(entry.parameters(), None) is not None
    ]
    if len(with_parameters) < stages:
        raise ValueError(
            f"the model has {len(with_parameters)} modules with parameters, too few for "
            f"{stages} pipeline stages: "
            "expected at least one per stage; use fewer stages (ranks or chunks) or a deeper model"
        )
    if layers_per_stage is None:
        firsts = list(accumulate(split_sizes(len(with_parameters), stages), initial=0))[1:-1]
        cuts = [0, *(with_parameters[first] for first in firsts), len(entries)]
        return [range(a, b) for a, b in pairwise(cuts)]
    counts = list(layers_per_stage) if isinstance(layers_per_stage, Sequence) else []
    whole = [
        count
        for count in counts
        if isinstance(count, int) and not isinstance(count, bool) and count > 0
    ]
    if len(whole) != stages or counts != whole or sum(counts) != len(entries):
        raise ValueError(
            f"layers_per_stage={layers_per_stage!r}: expected {stages} numbers, one for each "
            "stage, 1 or more, that add up to the "
            f"{len(entries)} modules of the model's sequence"
        )
    parts = [range(a, b) for a, b in pairwise(accumulate(counts, initial=0))]
    empty = [stage for stage, part in enumerate(parts) if not set(part) & set(with_parameters)]
    if empty:
        raise ValueError(
            f"layers_per_stage={counts}: stage {empty[0]} has no module with parameters; "
            "expected at least one"
        )
    return parts


class StageCut:
    """The stages into which a model is cut, and this rank's among them. Nothing is changed until
    `keep_mine`.

    Args:
        placement: global stage → position along pp.
        layers_per_stage: how many entries of the sequence each stage has; None: see `cut_points`.
        here: this rank's position.

    Attributes:
        on_stages: name of each parameter and buffer → the stages that use it; several if tied.
        mine: this rank's stages.
        entries: the modules of the sequence. The first is called with the inputs.

    Raises ValueError for a model that can't be cut like that.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Mapping[int, int],
        layers_per_stage: Sequence[int] | None,
        here: int,
    ):
        self.placement = placement
        self.ranges = cut_points(model, len(placement), layers_per_stage)
        self.entries = entries_of(model)
        first: dict[int, str] = {}  # of the names that a tied tensor has
        self.first_name = {n: first.setdefault(id(t), n) for n, t in all_tensors(model)}
        self.on_stages = stages_of_names(model, self.ranges, first)
        self.mine = frozenset(stage for stage, position in placement.items() if position == here)

    def modules_of_mine(self, model: nn.Module) -> set[str]:
        """Return the names of the entries of the model's sequence that this rank has."""
        entries, names = entries_of(model), {m: name for name, m in model.named_modules()}
        mine = [entries[number] for stage in self.mine for number in self.ranges[stage]]
        return {names[entry] for entry in mine if entry in names}

    def keep_mine(self, model: nn.Module) -> Mapping[int, nn.Module]:
        """Return the part of the model of each of this rank's stages. The memory of all other
        parameters is freed; a tensor that is tied to one here stays tied.
        """
        entries = entries_of(model)
        parts = {s: Part({i: entries[i] for i in self.ranges[s]}) for s in sorted(self.mine)}
        kept = {id(t) for part in parts.values() for t in (*part.parameters(), *part.buffers())}
        tensors = all_tensors(model)
        here = {self.first_name[name]: t for name, t in tensors if id(t) in kept}
        for name, t in tensors:
            if self.first_name[name] not in here:
                t.data = t.data.new_empty(0)
            elif id(t) not in kept:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, here[self.first_name[name]])
        return parts

    def describe(self) -> Iterator[str]:
        for stage, part in enumerate(self.ranges):
            yield (
                f"stage {stage} on position {self.placement[stage]} of pp: modules {part.start} to "
                f"{part.stop - 1} of the model's sequence"
            )


def all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers under each of their names: a tied one has several."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def stages_of_names(
    model: nn.Module, ranges: Sequence[range], names: Mapping[int, str]
) -> dict[str, list[int]]:
    """Return, for the name of each parameter and buffer, the stages that use it.

    Args:
        ranges: for each stage, its entries of the sequence.
        names: id of a tensor → its name.
    """
    entries = entries_of(model)
    found: dict[str, list[int]] = {name: [] for name in names.values()}
    for stage, numbers in enumerate(ranges):
        for _, t in all_tensors(nn.ModuleList(entries[number] for number in numbers)):
            of_name = found.get(names.get(id(t), ""), [stage])
            if stage not in of_name:
                of_name.append(stage)
    left_out = sorted(name for name, stages in found.items() if not stages)
    if left_out:
        raise ValueError(
            f"{left_out[0]!r} is in no module of the model's sequence, so it would be on no stage: "
            "expected .sequence() to return all modules with parameters or buffers"
        )
    return found
