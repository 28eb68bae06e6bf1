"""Cutting a model into pipeline stages: consecutive modules of a sequence whose composition is the
model's forward.

    GPT, 2 stages     embedding  block 0  block 1  |  block 2  block 3  norm  head
    MLP, 2 stages     linear  GELU  linear  GELU   |  linear  GELU  linear

By default each stage gets as many modules with parameters as the others. A module without any goes
with the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel101.mesh import split_sizes


class Received(Function):
    """What has arrived, in the same memory, as a result that autograd allows to be changed in
    place; a leaf that requires grad is none.
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
        """The first module takes what the model is called with, or what the stage before has
        sent.
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
        """The modules whose composition is the forward."""
        return self.entries


def sequence_of(model: nn.Module) -> list[nn.Module] | None:
    """What the model's method `.sequence()` returns; None if it has no such method.

    Raises ValueError if not all of it are modules.
    """
    sequence: Any = getattr(model, "sequence", None)
    if not callable(sequence) or isinstance(sequence, nn.Module):  # a module may have this name too
        return None
    entries = list(sequence())
    for place, entry in enumerate(entries):
        if not isinstance(entry, nn.Module):
            raise ValueError(
                f"{type(model).__name__}.sequence() has a {type(entry).__name__} at place "
                f"{place} ({getattr(entry, '__name__', entry)}): "
                "expected modules only, such as nn.ReLU() for torch.relu, or a module of your "
                "own whose forward calls the function"
            )
    return entries


def entries_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose composition is the model's forward.

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
    """For each stage, which entries of the sequence it has.

    Raises ValueError for what can't be cut like that.
    """
    entries = entries_of(model)
    with_parameters = [
        number for number, entry in enumerate(entries) if next(entry.parameters(), None) is not None
    ]
    if len(with_parameters) < stages:
        raise ValueError(
            f"the model has {len(with_parameters)} modules with parameters, too few for "
            f"{stages} pipeline stages: "
            "expected one a stage at least; use fewer stages (ranks or chunks) or a deeper model"
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
            "expected one at least"
        )
    return parts


def names_by_stage(model: nn.Module, parts: Sequence[range]) -> list[list[str]]:
    """For each stage, the names of its parameters and buffers in the whole model; a tied one is
    on several stages.
    """
    entries = entries_of(model)
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    found = []
    for part in parts:
        tensors = [
            t
            for number in part
            for t in [*entries[number].parameters(), *entries[number].buffers()]
        ]
        found.append(list(dict.fromkeys(names[id(t)] for t in tensors if id(t) in names)))
    left_out = set(names.values()).difference(*found)
    if left_out:
        raise ValueError(
            f"{sorted(left_out)[0]!r} is in no module of the model's sequence, so it would be "
            "on no stage: "
            "expected .sequence() to have all modules with parameters or buffers"
        )
    return found
