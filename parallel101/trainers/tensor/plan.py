"""The styles of a tensor-parallel plan, and which modules its patterns name.

column          y = x Wᵀ, W cut by rows: each rank computes some of the outputs
row             W cut by columns: each rank takes some of the inputs, and outputs are summed
column_gather   column, and then an all-gather: every rank has all outputs
vocabulary      rows of an embedding, or a head whose logits stay cut

"blocks.*.mlp.up"     blocks.0.mlp.up, blocks.1.mlp.up, …
"*.up"                every module named up: a `*` matches one or more parts of the name
"layers.*"            among all below, those that have a weight of their own

plan="auto" is a plan from the model's structure:

a chain of linear layers    column, row, column, row, …; a last one without a partner: column_gather
attention by heads          by the names in TABLE: column(heads=…) and row
feed-forward                by the names in TABLE: column and row
head, and its embedding     vocabulary, if the loss is vocabulary_cross_entropy

What it does not recognize stays replicated. Names are a guess at what the code between the layers
does; a plan says it.

GPT-2's attention, as in nanoGPT, takes the width of a head from its input: `k.view(B, T,
self.n_head, C // self.n_head)`. That works only with all features, so its layers are gathered. To
cut it by heads, write `self.c_attn(x).chunk(3, -1)`, `k.view(B, T, -1, head_width)` and `y.view(B,
T, -1)`, and the plan {"*.c_attn": column(parts=3, heads=n_head), "*.attn.c_proj": "row", …}.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from parallel101.trainers.expect import expect
from parallel101.trainers.model_layers import order_of

NAMES = ("column", "column_gather", "row", "vocabulary")
WANTED = "an nn.Linear", "an nn.Embedding or the nn.Linear of the head"


class Style(NamedTuple):
    """The way in which a module is cut.

    `column(…)` makes one with options; a plain name such as "row" means the style without any.
    """

    name: str
    parts: int = 1
    heads: int | str | None = None

    def __str__(self) -> str:
        options = [f"parts={self.parts}"] * (self.parts > 1)
        options += [f"heads={self.heads!r}"] * (self.heads is not None)
        return f"{self.name}({', '.join(options)})" if options else self.name


TensorPlan = str | Mapping[str, str | Style]


def column(*, parts: int = 1, heads: int | str | None = None) -> Style:
    """Return the style "column" with options, for a plan:
    `{"attention.qkv": p101.column(parts=3, heads=8)}`.

    Args:
        parts: how many equal matrices are side by side in the outputs: 3 for a fused query, key and
            value. Each is cut in the same way.
        heads: how many heads each part has. They are dealt out whole, so the size of the axis must
            divide them. If the code of the module around the layer counts its heads, as in
            `q.unflatten(-1, (self.num_heads, -1))`, the name of that attribute: heads="num_heads".
            On each rank the attribute then becomes the number of heads that the rank has.

    Raises ValueError if either is not a whole number, 1 or more (or, for heads, a name).
    """
    expected = "a whole number, 1 or more"
    expect("parts", parts, whole_number(parts), expected)
    named = heads is None or (isinstance(heads, str) and heads.isidentifier())
    expect("heads", heads, named or whole_number(heads), f"{expected}, or an attribute's name")
    return Style("column", parts, heads)


def match(plan: Mapping[str, str | Style], model: nn.Module) -> dict[str, Style]:
    """Return the style of every module that a pattern names.

    An exact name counts for more than a pattern with `*`, and of two patterns the later one.
    Raises ValueError for a style or a pattern that doesn't fit the model.
    """
    expect("plan", plan, plan, 'names of modules and their styles, or "auto": this cuts nothing')
    named = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    first = {id(module): name for name, module in reversed(named.items())}
    styles: dict[str, Style] = {}
    for pattern, given in sorted(plan.items(), key=lambda item: "*" not in item[0]):
        known = isinstance(given, Style) or given in NAMES
        expected = f"one of {', '.join(map(repr, NAMES))}, or p101.column(…)"
        expect(f"plan[{pattern!r}]", given, known, expected)
        style = given if isinstance(given, Style) else Style(given)
        table, matches = style.name == "vocabulary", names_of(pattern, list(named))
        kinds = (nn.Linear, nn.Embedding) if table else nn.Linear
        fitting = [n for n in matches if isinstance(named[n], kinds) and is_plain(named[n])]
        left = [n for n in matches if n not in fitting]
        if "*" in pattern and fitting:  # which may also match what has no weight
            left = [n for n in left if named[n]._parameters]
        if left:
            raise ValueError(
                f"plan: {pattern!r} gives {left[0]!r} the style {str(style)!r}, but it is of type "
                f"{type(named[left[0]]).__name__}: expected {WANTED[table]}, without a forward of "
                "its own, a parametrization of its weight, max_norm, scale_grad_by_freq, sparse, "
                "and hooks (register them after the trainer is built)"
            )
        styles |= {first[id(named[name])]: style for name in fitting}
    return styles


def names_of(pattern: str, names: Sequence[str], what: str = "module") -> list[str]:
    """Return those of a model's modules that a pattern names. Raises ValueError if there are none.

    Args: what: the word for one of them.

    A `*` as a whole part is one or more parts; inside of a part, any characters of that part.
    """
    parts = (
        r"[^.]+(\.[^.]+)*" if part == "*" else r"[^.]*".join(map(re.escape, part.split("*")))
        for part in pattern.split(".")
    )
    expression = re.compile(r"\.".join(parts))
    matches = list(filter(expression.fullmatch, names))
    if not matches:
        raise ValueError(
            f"plan: {pattern!r} matches no {what}. The model's {what}s are {listed(names)}"
        )
    return matches


def is_plain(module: nn.Module) -> bool:
    """Return whether a linear layer or an embedding does just what its class says."""
    kind: Any = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    more = ("max_norm", "scale_grad_by_freq", "sparse", *hooks)
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and not any(getattr(module, name, None) for name in more)
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


# ── plan="auto" ──

FUNCTIONS = (
    "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Softplus Softsign Tanh Sigmoid LogSigmoid "
    "Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Tanhshrink Threshold Identity"
)
ELEMENTWISE = tuple(getattr(nn, name) for name in FUNCTIONS.split())  # dropout draws other masks
# name in the model ("" for one that is made anew for each forward, such as the MLP's GELUs), module
Chain = list[tuple[str, nn.Module]]
COLUMN, ROW, GATHERED = Style("column"), Style("row"), Style("column_gather")

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
    plan, names = by_names(model), first_names(model)
    seen = {id(module) for _, module in chain or []}
    for module in model.modules():  # each nn.Sequential outside of the chain and of the others
        entries = list(flat(module)) if type(module) is nn.Sequential else []
        if not any(id(entry) in seen for entry in entries):
            seen.update(map(id, entries))
            inner = pairs([(names[id(entry)], entry) for entry in entries])
            plan |= {name: style for name, style in inner.items() if style != GATHERED}
    if chain is not None:
        outer = chain
        if cut_head and is_plain_linear(chain[-1][1]):
            plan |= vocabulary(chain)
            outer = chain[:-1]
        if not any(isinstance(m, nn.Embedding) or list(m.children()) for _, m in chain):
            plan |= pairs(outer)
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
        elif not isinstance(module, ELEMENTWISE):
            waiting = None
    return plan


# the layers whose outputs are cut → the layer that takes them: into heads (one layer has query, key
# and value side by side), into features, or gathered, since the code between needs all features
TABLE = {
    "query key value → out": "heads",
    "q_proj k_proj v_proj → o_proj": "heads",  # LLaMA
    "wq wk wv → wo": "heads",  # LLaMA in Meta's code
    "to_q to_k to_v → to_out": "heads",
    "to_qkv → to_out": "heads",
    "to_qkv → to_out.0": "heads",
    "qkv → proj": "heads",
    "qkv → out": "heads",
    "c_attn → c_proj": "gathered",  # GPT-2: see above
    "gate up → down": "features",
    "up → down": "features",
    "c_fc → c_proj": "features",  # GPT-2
    "gate_proj up_proj → down_proj": "features",  # LLaMA
    "w1 w3 → w2": "features",
}


def by_names(model: nn.Module) -> dict[str, Style]:
    """Return the styles of the layers whose names are in the table; none for heads that can't be
    told, and for other widths.
    """
    plan: dict[str, Style] = {}
    linear = {name: m for name, m in model.named_modules() if is_plain_linear(m)}
    for (name, module), (names, way) in product(model.named_modules(), TABLE.items()):
        paths = [f"{name}.{n}".strip(".") for n in names.replace("→", "").split()]
        if not linear.keys() >= set(paths):
            continue
        *columns, row = (linear[path] for path in paths)
        fits, styles = True, [GATHERED] * len(paths)
        if way == "features":
            fits = all(layer.out_features == row.in_features for layer in columns)
            styles = [*[COLUMN] * len(columns), ROW]
        elif way == "heads":
            parts = 3 if len(columns) == 1 else 1
            counts = [
                heads_of(module, layer.out_features // parts, key_or_value=layer is not columns[0])
                for layer in columns
            ]
            fits = None not in counts and columns[0].out_features == parts * row.in_features
            styles = [*(column(parts=parts, heads=count) for count in counts), ROW]
        if fits:
            plan = dict(zip(paths, styles)) | plan
    return plan


def is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and is_plain(module)


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


# ── the order of a model's modules, where the model tells it ──


def chain_of(model: nn.Module) -> Chain | None:
    """Return the modules whose composition is the model's forward, those of an nn.Sequential one
    by one: embedding, blocks.0, …, norm, head of a GPT. None if the model does not tell.
    """
    if (modules := order_of(model)) is None:
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
