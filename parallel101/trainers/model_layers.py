"""The layers of a model: their order, where the model tells it, and which ZeRO-3 gathers one at a
time.

GPT      embedding  blocks.0  blocks.1 …  norm  head      its own `sequence()`
MLP      layers.0  layers.1 …                             what a ModuleList or Sequential holds,
                                                          and the modules beside it
Keras    dense  dense_1 …                                 the model's `layers`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
PARAMETERS = (nn.ParameterList, nn.ParameterDict)  # have no forward


def layers_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the layers, in order; none is part of another.

    They are the entries of `model.sequence()` that have parameters. Without such a method, every
    module below the model that has parameters and holds no ModuleList, ModuleDict or Sequential to
    look into; a Sequential inside a module of another type is a part of that module. A Keras model
    is looked into, too.
    """
    sequence = sequence_of(model)
    if sequence is not None:
        names = {module: prefix + name for name, module in model.named_modules()}
        used = dict.fromkeys(m for m in sequence if next(m.parameters(), None) is not None)
        yield from ((names[module], module) for module in used)
        return
    keras = [(layer.name, layer) for layer in keras_layers(model)]
    for name, module in keras or model.named_children():
        lists = (nn.ModuleList, nn.ModuleDict)
        inside = isinstance(module, LISTS) or any(isinstance(m, lists) for m in module.modules())
        if inside or keras_layers(module):
            yield from layers_of(module, f"{prefix}{name}.")
        elif next(module.parameters(), None) is not None and not isinstance(module, PARAMETERS):
            yield prefix + name, module


def keras_layers(module: nn.Module) -> list[Any]:
    """Return the layers of a Keras model, which torch doesn't see: Keras has a list of its own for
    them. (Of a keras.Sequential, torch would name the functional model inside it, which is never
    called as a module.) Other modules, which keep theirs in a ModuleList, have none.
    """
    layers: Any = getattr(module, "layers", None)
    of_keras = isinstance(layers, list) and all(isinstance(layer, nn.Module) for layer in layers)
    return layers if of_keras else []


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
