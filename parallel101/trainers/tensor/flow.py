"""Whether every cut output reaches a layer that can take it.

column ──▶ gelu ──▶ row          right
column ──▶ norm ──▶ row          wrong: the norm needs all features, and a rank has some of them
column ──▶ (end)                 wrong: nobody puts the outputs together; column_gather does
row    ──▶ row                   wrong: the second one's inputs are not cut

In a chain the order is known. Elsewhere a model's code decides, so layers of one module belong
together: its columns to its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.chain import Chain, inner_chains, mixes_features
from parallel101.trainers.tensor.styles import Style

Styles = Mapping[str, Style]
Shards = Mapping[str, Shard]


def check_flow(model: nn.Module, chain: Chain | None, styles: Styles, shards: Shards) -> None:
    """Raises ValueError with the name of the first layer that does not fit."""
    settled: set[str] = set()
    if chain is not None:
        settled |= walk(chain, styles, shards, whole_model=True)
    for inner in inner_chains(model, chain):
        settled |= walk(inner, styles, shards, whole_model=False)
    check_others(
        model,
        {name: style for name, style in styles.items() if name not in settled},
        styles,
        shards,
    )


def walk(chain: Chain, styles: Styles, shards: Shards, whole_model: bool) -> set[str]:
    """Follow the features through a chain.

    Returns the layers that are in order; what enters or leaves a part of a model is left open.
    """
    settled: set[str] = set()
    cut_by = None  # the column layer whose outputs are on their way
    for name, module in chain:
        style = styles.get(name)
        if style is None or isinstance(module, nn.Embedding):
            if cut_by is not None and mixes_features(module):
                raise ValueError(
                    f"plan: {name or 'the module'!r} ({type(module).__name__}) gets the cut "
                    f"outputs of column layer {cut_by!r}, but "
                    f'needs all of them: make {cut_by!r} "column_gather", or put a row layer '
                    "before it"
                )
            settled |= {name} & styles.keys()
        elif style.name == "row":
            if cut_by is None:
                if whole_model:
                    raise input_not_cut(name)
                continue
            check_fit(name, [cut_by], styles, shards)
            settled |= {name, cut_by}
            cut_by = None
        else:
            if cut_by is not None:
                raise ValueError(
                    f"plan: {name!r} gets the cut outputs of column layer {cut_by!r}: make it "
                    '"row", or that "column_gather"'
                )
            settled.add(name)
            if style.name == "column":
                cut_by = name
    if cut_by is not None:
        if whole_model:
            raise outputs_stay_cut(cut_by)
        settled.discard(cut_by)
    return settled


def check_others(model: nn.Module, rest: Styles, styles: Styles, shards: Shards) -> None:
    """Layers whose order only the model's code knows."""
    waiting: list[str] = []  # columns that no row has taken, in the order of the modules
    taken = False
    of_parent: dict[str, dict[str, str]] = {}
    for name, style in rest.items():
        if style.name in ("column", "row"):
            of_parent.setdefault(name.rpartition(".")[0], {})[name] = style.name
    for kinds in of_parent.values():
        columns, rows = (
            [name for name, kind in kinds.items() if kind == wanted] for wanted in ("column", "row")
        )
        if columns and rows:
            for row in rows:
                check_fit(row, columns, styles, shards)
            continue
        for name, kind in kinds.items():
            if kind == "column":
                waiting, taken = ([name] if taken else [*waiting, name]), False
            elif taken or not waiting:
                raise input_not_cut(name)
            else:
                check_fit(name, waiting, styles, shards)
                taken = True
    if waiting and not taken:
        raise outputs_stay_cut(waiting[0])


def check_fit(row: str, columns: list[str], styles: Styles, shards: Shards) -> None:
    """Whether the row layer's inputs are cut as the outputs of one of these column layers are."""
    wanted = shards[row].sizes
    given = {
        column: tuple(size // styles[column].parts for size in shards[column].sizes)
        for column in columns
    }
    if wanted not in given.values():
        column, sizes = next(iter(given.items()))
        raise ValueError(
            f"plan: row layer {row!r} takes {sum(wanted)} inputs, cut as {list(wanted)}, but "
            f"column layer {column!r} gives {sum(sizes)}, "
            f"cut as {list(sizes)}: expected a row layer for the outputs of a column layer"
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
