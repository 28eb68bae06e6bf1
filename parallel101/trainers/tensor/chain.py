"""What a plan needs to know of a model's structure: its modules in order, and which of them act on
each element alone.

MLP([8, 32, 32, 8]).sequence()      layers.0, GELU, layers.1, GELU, layers.2
GPT(…).sequence()                   embedding, blocks.0, …, norm, head
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from parallel101.trainers.pipeline.split import sequence_of

# name in the model ("" for one that is made anew for each forward, such as the MLP's GELUs), module
Chain = list[tuple[str, nn.Module]]

ELEMENTWISE = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Softplus,
        nn.Softsign,
    ),
    *(
        nn.Tanh,
        nn.Sigmoid,
        nn.LogSigmoid,
        nn.Hardtanh,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.Hardshrink,
        nn.Softshrink,
        nn.Tanhshrink,
    ),
    *(nn.Threshold, nn.Identity, nn.Dropout, nn.AlphaDropout),
)


def chain_of(model: nn.Module) -> Chain | None:
    """The modules whose composition is the model's forward, those of an nn.Sequential one by one.

    None if the model does not tell.
    """
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        modules = list(model)
    elif (entries := sequence_of(model)) is not None:
        modules = entries
    else:
        return None
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    return [(names.get(id(module), ""), module) for entry in modules for module in flat(entry)]


def flat(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for entry in module:
            yield from flat(entry)
    else:
        yield module


def inner_chains(model: nn.Module, outer: Chain | None) -> list[Chain]:
    """Every nn.Sequential inside of the model that belongs neither to the outer chain nor to
    another nn.Sequential.
    """
    seen = {id(module) for _, module in outer or []}
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    found = []
    for module in model.modules():
        if type(module) is nn.Sequential:
            entries = list(flat(module))
            if not any(id(entry) in seen for entry in entries):
                found.append([(names[id(entry)], entry) for entry in entries])
                seen.update(map(id, entries))
    return found


def mixes_features(module: nn.Module) -> bool:
    """Whether a module needs all features of a position, as far as can be known: a user's
    module without parameters is trusted.
    """
    if isinstance(module, ELEMENTWISE):
        return False
    return (
        type(module).__module__.startswith("torch.nn.")
        or next(module.parameters(), None) is not None
    )


def acts_on_each_position(module: nn.Module) -> bool:
    """Whether a module treats every position (all dims but the last) alone, as far as can be known:
    a user's module is trusted.

    Sequence parallel cuts the positions.
    """
    if isinstance(module, (*ELEMENTWISE, nn.Linear, nn.Embedding)):
        return True
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    return not type(module).__module__.startswith("torch.nn.")
