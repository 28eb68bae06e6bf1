"""A plan from the model's structure.

a chain of linear layers    column, row, column, row, …; a last one without a partner: column_gather
attention by heads          by the names in ATTENTION: column(heads=…) and row
feed-forward                by the names in FEED_FORWARD: column and row
head, and its embedding     vocabulary, if the loss is vocabulary_cross_entropy

What it does not recognize stays replicated. Names are a guess at what the code between the layers
does; a plan says it.

GPT-2's attention, as in nanoGPT, takes the width of a head from its input: `k.view(B, T,
self.n_head, C // self.n_head)`. That works only with all features, so its layers are gathered. To
cut it by heads, write `self.c_attn(x).chunk(3, -1)`, `k.view(B, T, -1, head_width)` and `y.view(B,
T, -1)`, and the plan {"*.c_attn": column(parts=3, heads=n_head), "*.attn.c_proj": "row", …}.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from torch import nn

from parallel101.trainers.tensor.chain import ELEMENTWISE, Chain, inner_chains
from parallel101.trainers.tensor.styles import Style, column, not_plain

DROPOUT = (nn.Dropout, nn.AlphaDropout)  # they would draw another mask on each rank
COLUMN, ROW, GATHERED = Style("column"), Style("row"), Style("column_gather")

# the layers whose outputs are heads, or one with query, key and value side by side; the layer that
# takes them
ATTENTION = (
    (("query", "key", "value"), "out"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # LLaMA
    (("wq", "wk", "wv"), "wo"),  # LLaMA in Meta's code
    (("to_q", "to_k", "to_v"), "to_out"),
    (("to_qkv",), "to_out"),
    (("to_qkv",), "to_out.0"),
    (("qkv",), "proj"),
    (("qkv",), "out"),
)
ALL_FEATURES = (("c_attn", "c_proj"),)  # GPT-2: see above
FEED_FORWARD = (
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("c_fc",), "c_proj"),  # GPT-2
    (("gate_proj", "up_proj"), "down_proj"),  # LLaMA
    (("w1", "w3"), "w2"),
)
# attributes that count them
HEAD_WIDTHS = "head_width head_dim head_size dim_head"
HEADS = "n_local_heads num_heads n_heads n_head heads num_attention_heads"
KEY_VALUE_HEADS = "n_local_kv_heads num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_heads"


def auto_plan(model: nn.Module, chain: Chain | None, cut_head: bool) -> dict[str, Style]:
    """Return the style of each module to cut, by name. Raises ValueError if there is none.

    Args:
        model: the whole model.
        chain: its modules in order, if it tells.
        cut_head: whether the loss is vocabulary_cross_entropy, so that the logits may stay cut.
    """
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        found = attention(module) | feed_forward(module)
        plan |= {f"{name}.{layer}".strip("."): style for layer, style in found.items()}
    for inner in inner_chains(model, chain):
        plan |= {name: style for name, style in pairs(inner).items() if style != GATHERED}
    if chain is not None:
        entries = chain
        if cut_head and is_plain_linear(chain[-1][1]):
            plan |= vocabulary(chain)
            entries = chain[:-1]
        if not any(isinstance(m, nn.Embedding) or list(m.children()) for _, m in chain):
            plan |= pairs(entries)
    if not plan:
        raise ValueError(
            f'plan="auto" found nothing to cut in {type(model).__name__}: expected an '
            "nn.Sequential of linear layers, or modules named query, key, value, out (with a "
            "head_width or num_heads) or up, down, or as in LLaMA or GPT-2. "
            'Pass a plan: {"name of a module": "column" or "row", …}'
        )
    return plan


def pairs(chain: Chain) -> dict[str, Style]:
    """Make linear layers with only elementwise functions between them column and row."""
    plan: dict[str, Style] = {}
    waiting = None  # the column layer that has no row yet
    times_used = Counter(id(module) for _, module in chain)
    for name, module in chain:
        if is_plain_linear(module) and times_used[id(module)] == 1:
            if waiting is None:
                plan[name], waiting = GATHERED, name
            else:
                plan[waiting], plan[name], waiting = COLUMN, ROW, None
        elif not isinstance(module, ELEMENTWISE) or isinstance(module, DROPOUT):
            waiting = None
    return plan


def attention(module: nn.Module) -> dict[str, Style]:
    """Return the styles of the layers in an attention, by their names in it; {} if it is none."""
    for inner, last in ATTENTION:
        found, parts = linears(module, (*inner, last)), 3 if len(inner) == 1 else 1
        if found and found[0].out_features == parts * found[-1].in_features:
            heads = [
                heads_of(module, layer.out_features // parts, key_or_value=layer is not found[0])
                for layer in found[:-1]
            ]
            if None not in heads:
                columns = [column(parts=parts, heads=count) for count in heads]
                return dict(zip(inner, columns)) | {last: ROW}
    gathered = (names for names in ALL_FEATURES if linears(module, names))
    return dict.fromkeys(next(gathered, ()), GATHERED)


def feed_forward(module: nn.Module) -> dict[str, Style]:
    """Return the styles of a feed-forward's layers, by their names in it; {} if it is none."""
    for inner, last in FEED_FORWARD:
        found = linears(module, (*inner, last))
        if found and all(layer.out_features == found[-1].in_features for layer in found[:-1]):
            return dict.fromkeys(inner, COLUMN) | {last: ROW}
    return {}


def is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and not_plain(module) is None


def linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """Return the plain linear layers of these names; none if the module lacks one of them."""
    below = dict(module.named_modules())
    found = [layer for name in names if is_plain_linear(layer := below.get(name))]
    return found if len(found) == len(names) else []


def heads_of(module: nn.Module, outputs: int, key_or_value: bool) -> str | int | None:
    """Return the attribute that counts the heads of these outputs, else their number; None if
    the module tells neither.
    """
    width = head_width(module)
    for name in (*KEY_VALUE_HEADS.split() * key_or_value, *HEADS.split()):
        count = whole_number(vars(module).get(name))
        if count and (count * width == outputs if width else outputs % count == 0):
            return name
    return outputs // width if width and outputs % width == 0 else None


def head_width(module: nn.Module) -> int | None:
    """Return the number of features of a head, if one of the module's attributes gives it."""
    values = (whole_number(getattr(module, name, None)) for name in HEAD_WIDTHS.split())
    return next(filter(None, values), None)


def whole_number(value: object) -> int | None:
    """Return the value of an attribute if it is a whole number, 1 or more, else None."""
    return value if type(value) is int and value > 0 else None


def vocabulary(chain: Chain) -> dict[str, Style]:
    """Return styles for the head and the token embedding in the first module: the one tied to
    the head, else the first with as many rows. (A table of positions may happen to have as many.)
    """
    (first, embedding), (last, head) = chain[0], chain[-1]
    tables = [
        (module.weight is not head.weight, f"{first}.{name}".strip("."))
        for name, module in embedding.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == head.out_features
    ]
    tables.sort(key=lambda table: table[0])
    return dict.fromkeys([last, *(name for _, name in tables[:1])], Style("vocabulary"))
