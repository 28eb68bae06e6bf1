"""The order of a model's modules, where the model tells it, and what is known of torch's modules.

GPT      embedding  blocks.0  blocks.1  norm  head      its .sequence(), or an nn.Sequential
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from parallel101.trainers.pipeline.split import sequence_of

# name in the model ("" for one that is made anew for each forward, such as the MLP's GELUs), module
Chain = list[tuple[str, nn.Module]]

NAMES = (
    "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Tanh Sigmoid LogSigmoid "
    "Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Tanhshrink Threshold Identity Dropout "
    "AlphaDropout"
)
ELEMENTWISE = tuple(getattr(nn, name) for name in NAMES.split())


def chain_of(model: nn.Module) -> Chain | None:
    """Return the modules whose composition is the model's forward, those of an nn.Sequential one
    by one: embedding, blocks.0, …, norm, head of a GPT. None if the model does not tell.
    """
    modules = sequence_of(model)
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        modules = list(model)
    if modules is None:
        return None
    names = first_names(model)
    return [(names.get(id(module), ""), module) for entry in modules for module in flat(entry)]


def flat(module: nn.Module) -> Iterator[nn.Module]:
    for entry in module if type(module) is nn.Sequential else ():
        yield from flat(entry)
    if type(module) is not nn.Sequential:
        yield module


def first_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each module, by its id."""
    return {id(module): name for name, module in model.named_modules()}


def inner_chains(model: nn.Module, outer: Chain | None) -> list[Chain]:
    """Return every nn.Sequential inside of the model that belongs neither to the outer chain nor
    to another nn.Sequential.
    """
    seen, names, found = {id(module) for _, module in outer or []}, first_names(model), []
    for module in model.modules():
        entries = list(flat(module)) if type(module) is nn.Sequential else []
        if entries and not any(id(entry) in seen for entry in entries):
            found.append([(names[id(entry)], entry) for entry in entries])
            seen.update(map(id, entries))
    return found


def acts_on_each_position(module: nn.Module) -> bool:
    """Return whether a module treats every position (all dims but the last) alone, as far as can
    be known: a user's module is trusted. Sequence parallel cuts the positions.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    known = isinstance(module, (*ELEMENTWISE, nn.Linear, nn.Embedding))
    return known or not type(module).__module__.startswith("torch.nn.")
