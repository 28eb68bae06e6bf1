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

from parallel101.mesh import split_sizes


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


def order_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules whose composition is the model's forward; None if it doesn't tell."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return list(model)
    return sequence_of(model)


def entries_of(model: nn.Module) -> list[nn.Module]:
    """Return the same. Raises ValueError if the model doesn't tell."""
    if (entries := order_of(model)) is not None:
        return entries
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
    whole = [count for count in counts if type(count) is int and count > 0]
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
