"""Whether every cut output reaches a layer that can take it.

column ──▶ gelu ──▶ row          right
column ──▶ norm ──▶ row          wrong: the norm needs all features, and a rank has some of them
column ──▶ (end)                 wrong: no layer puts the outputs together; column_gather does
row    ──▶ row                   wrong: the second one's inputs are not cut

In a chain of modules the order is known. Elsewhere a model's code decides, so layers of one module
belong together: its columns to its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from parallel101.trainers.layout import Shard
from parallel101.trainers.pipeline.split import sequence_of
from parallel101.trainers.tensor.styles import Style

# name in the model ("" for one that is made anew for each forward, such as the MLP's GELUs), module
Chain = list[tuple[str, nn.Module]]
Styles = Mapping[str, Style]
Shards = Mapping[str, Shard]

names = (
    "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Tanh Sigmoid LogSigmoid "
    "Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Tanhshrink Threshold Identity Dropout "
    "AlphaDropout"
)
ELEMENTWISE = tuple(getattr(nn, name) for name in names.split())


def chain_of(model: nn.Module) -> Chain | None:
    """The modules whose composition is the model's forward, those of an nn.Sequential one by one:
    embedding, blocks.0, …, norm, head of a GPT. None if the model does not tell.
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
    """id of a module → the first of its names."""
    return {id(module): name for name, module in model.named_modules()}


def inner_chains(model: nn.Module, outer: Chain | None) -> list[Chain]:
    """Every nn.Sequential inside of the model that belongs neither to the outer chain nor to
    another nn.Sequential.
    """
    seen, names, found = {id(module) for _, module in outer or []}, first_names(model), []
    for module in model.modules():
        entries = list(flat(module)) if type(module) is nn.Sequential else []
        if entries and not any(id(entry) in seen for entry in entries):
            found.append([(names[id(entry)], entry) for entry in entries])
            seen.update(map(id, entries))
    return found


def mixes_features(module: nn.Module) -> bool:
    """Whether a module needs all features of a position, as far as can be known: a user's module
    without parameters is trusted.
    """
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not isinstance(module, ELEMENTWISE) and (
        of_torch or any(True for _ in module.parameters())
    )


def acts_on_each_position(module: nn.Module) -> bool:
    """Whether a module treats every position (all dims but the last) alone, as far as can be known:
    a user's module is trusted. Sequence parallel cuts the positions.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    known = isinstance(module, (*ELEMENTWISE, nn.Linear, nn.Embedding))
    return known or not type(module).__module__.startswith("torch.nn.")


def check_flow(model: nn.Module, chain: Chain | None, styles: Styles, shards: Shards) -> None:
    """Raises ValueError with the name of the first layer that does not fit."""
    settled: set[str] = set()
    if chain is not None:
        settled |= walk(chain, styles, shards, whole_model=True)
    for inner in inner_chains(model, chain):
        settled |= walk(inner, styles, shards, whole_model=False)
    check_others([name for name in styles if name not in settled], styles, shards)


def walk(chain: Chain, styles: Styles, shards: Shards, whole_model: bool) -> set[str]:
    """Follow the features through a chain.

    Returns the layers that are in order; what enters or leaves a part of a model is left open.
    """
    settled: set[str] = set()
    column = None  # the layer whose outputs are on their way
    for name, module in chain:
        style = styles.get(name)
        if style is None or isinstance(module, nn.Embedding):
            if column is not None and mixes_features(module):
                raise ValueError(
                    f"plan: {name or 'the module'!r} ({type(module).__name__}) gets the cut "
                    f"outputs of column layer {column!r}, but needs all of them: make "
                    f'{column!r} "column_gather", or put a row layer before it'
                )
            settled |= {name} & styles.keys()
        elif style.name == "row":
            if column is None and whole_model:
                raise input_not_cut(name)
            if column is not None:
                check_fit(name, [column], styles, shards)
                settled |= {name, column}
            column = None
        elif column is not None:
            raise ValueError(
                f"plan: {name!r} gets the cut outputs of column layer {column!r}: make it "
                '"row", or that "column_gather"'
            )
        elif style.name == "column":
            column = name
        else:
            settled.add(name)
    if column is not None and whole_model:
        raise outputs_stay_cut(column)
    return settled


def check_others(names: list[str], styles: Styles, shards: Shards) -> None:
    """Layers whose order only the model's code knows."""
    waiting: list[str] = []  # columns that no row has taken, in the order of the modules
    taken = False
    of_parent: dict[str, tuple[list[str], list[str]]] = {}  # its columns, its rows
    for name in names:
        if (kind := styles[name].name) in ("column", "row"):
            of_parent.setdefault(name.rpartition(".")[0], ([], []))[kind == "row"].append(name)
    for columns, rows in of_parent.values():
        if not rows:
            waiting, taken = columns if taken else waiting + columns, False
        for row in rows:
            if not columns and (taken or not waiting):
                raise input_not_cut(row)
            check_fit(row, columns or waiting, styles, shards)
            taken = taken or not columns
    if waiting and not taken:
        raise outputs_stay_cut(waiting[0])


def check_fit(row: str, columns: list[str], styles: Styles, shards: Shards) -> None:
    """Whether the row layer's inputs are cut as the outputs of one of these column layers are."""
    wanted = shards[row].sizes
    given = [tuple(n // styles[name].parts for n in shards[name].sizes) for name in columns]
    if wanted not in given:
        raise ValueError(
            f"plan: row layer {row!r} takes {sum(wanted)} inputs, cut as {list(wanted)}, but "
            f"column layer {columns[0]!r} gives {sum(given[0])}, cut as {list(given[0])}"
        )


def input_not_cut(row: str) -> ValueError:
    return ValueError(
        f"plan: row layer {row!r} needs inputs that are cut, but no column layer gives it any: "
        'make the layer before it "column"'
    )


def outputs_stay_cut(column: str) -> ValueError:
    return ValueError(
        f"plan: no row layer takes the cut outputs of column layer {column!r}: make the layer "
        'after it "row", or this one "column_gather"'
    )
