"""A plan from the model's structure.

a chain of linear layers    column, row, column, row, …; a last layer without a partner: column_gather
attention by heads          modules query, key, value and out with a head_width: column(heads=…) and row
feed-forward                modules up and down: column and row
head, and its embedding     vocabulary, if the loss is vocabulary_cross_entropy

What it does not recognise stays replicated.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from parallel101.trainers.tensor.chain import ELEMENTWISE, Chain, inner_chains
from parallel101.trainers.tensor.match import is_plain
from parallel101.trainers.tensor.styles import Style, column

COLUMN, ROW = Style("column"), Style("row")


def auto_plan(model: nn.Module, chain: Chain | None, cut_head: bool) -> dict[str, Style]:
    """Name of a module → style. Raises ValueError if there is nothing to cut.

    Args:
        model: the whole model.
        chain: its modules in order, if it tells.
        cut_head: whether the loss is vocabulary_cross_entropy, so that the logits may stay cut.
    """
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        plan |= attention(name, module) or feed_forward(name, module)
    for inner in inner_chains(model, chain):
        plan |= {name: style for name, style in pairs(inner).items() if style.name != "column_gather"}
    if chain is not None:
        entries = chain
        if cut_head and isinstance(chain[-1][1], nn.Linear) and is_plain(chain[-1][1]):
            plan |= vocabulary(chain)
            entries = chain[:-1]
        if not any(list(module.children()) or isinstance(module, nn.Embedding) for _, module in chain):
            plan |= pairs(entries)
    if not plan:
        raise ValueError(
            f'plan="auto" found nothing to cut in {type(model).__name__}: expected an nn.Sequential of linear layers, or modules named '
            'query, key, value, out (with a head_width) or up, down. Pass a plan: {"name of a module": "column" or "row", …}'
        )
    return plan


def pairs(chain: Chain) -> dict[str, Style]:
    """Two linear layers with only elementwise functions between them are column and row. A dropout is none: it would draw a mask a rank."""
    plan: dict[str, Style] = {}
    open_column = None
    times_used = Counter(id(module) for _, module in chain)
    for name, module in chain:
        if isinstance(module, nn.Linear) and is_plain(module) and times_used[id(module)] == 1:
            if open_column is None:
                plan[name], open_column = Style("column_gather"), name
            else:
                plan[open_column], plan[name], open_column = COLUMN, ROW, None
        elif not isinstance(module, ELEMENTWISE) or isinstance(module, (nn.Dropout, nn.AlphaDropout)):
            open_column = None
    return plan


def attention(name: str, module: nn.Module) -> dict[str, Style]:
    parts = [getattr(module, part, None) for part in ("query", "key", "value", "out")]
    width = getattr(module, "head_width", None)
    if not width or not all(isinstance(part, nn.Linear) and is_plain(part) for part in parts):
        return {}
    cut = {f"{name}.{part}": column(heads=getattr(module, part).out_features // width) for part in ("query", "key", "value")}
    return {**cut, f"{name}.out": ROW}


def feed_forward(name: str, module: nn.Module) -> dict[str, Style]:
    up, down = getattr(module, "up", None), getattr(module, "down", None)
    if (
        isinstance(up, nn.Linear)
        and isinstance(down, nn.Linear)
        and is_plain(up)
        and is_plain(down)
        and up.out_features == down.in_features
    ):
        return {f"{name}.up": COLUMN, f"{name}.down": ROW}
    return {}


def vocabulary(chain: Chain) -> dict[str, Style]:
    """The head, and the token embedding in the first module: the one tied to the head, else the first with as many rows."""
    (first, embedding), (last, head) = chain[0], chain[-1]
    plan = {last: Style("vocabulary")}
    tables = [(name, module) for name, module in embedding.named_modules() if isinstance(module, nn.Embedding)]
    fitting = [(name, module) for name, module in tables if module.num_embeddings == head.out_features]
    fitting.sort(key=lambda table: table[1].weight is not head.weight)  # a table of positions may happen to have as many rows
    for name, _ in fitting[:1]:
        plan[f"{first}.{name}".strip(".")] = Style("vocabulary")
    return plan
