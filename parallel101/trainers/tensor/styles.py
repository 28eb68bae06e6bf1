"""The styles of a tensor-parallel plan, and which modules its patterns name.

column          y = x Wᵀ, W cut by rows: each rank computes some of the outputs
row             W cut by columns: each rank takes some of the inputs, and outputs are summed
column_gather   column, and then an all-gather: every rank has all outputs
vocabulary      rows of an embedding, or a head whose logits stay cut

"blocks.*.mlp.up"     blocks.0.mlp.up, blocks.1.mlp.up, …
"*.up"                every module named up: a `*` matches one or more parts of the name
"layers.*"            among all below, those that have a weight of their own
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

NAMES = ("column", "column_gather", "row", "vocabulary")


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
    for name, value in (("parts", parts), ("heads", heads)):
        if name == "heads" and (value is None or (isinstance(value, str) and value.isidentifier())):
            continue
        if type(value) is not int or value < 1:
            attribute = ", or the name of an attribute" if name == "heads" else ""
            raise ValueError(
                f"column({name}={value!r}): expected a whole number, 1 or more{attribute}"
            )
    return Style("column", parts, heads)


def style_of(pattern: str, style: object) -> Style:
    """Return the style that a plan gives a pattern, as a Style. Raises ValueError."""
    if isinstance(style, Style):
        return style
    if style not in NAMES:
        raise ValueError(
            f"plan: {pattern!r} has the style {style!r}: expected one of "
            f"{', '.join(map(repr, NAMES))}, or p101.column(…)"
        )
    return Style(str(style))


def match(plan: Mapping[str, str | Style], model: nn.Module) -> dict[str, Style]:
    """Return the style of every module that a pattern names.

    An exact name counts for more than a pattern with `*`.
    """
    if not plan:
        raise ValueError(
            'plan={} cuts nothing: expected names of modules and their styles, or "auto"'
        )
    named = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    first = {id(module): name for name, module in reversed(named.items())}
    found: dict[str, tuple[str, Style]] = {}
    for pattern, given in sorted(plan.items(), key=lambda item: "*" not in item[0]):
        style, fitting = style_of(pattern, given), []
        matches = names_of(pattern, list(named))
        for name in matches:
            if (why := problem(model, name, named[name], style)) is None:
                fitting.append(name)
            elif "*" not in pattern or named[name]._parameters:
                raise ValueError(
                    f"plan: {pattern!r} gives {name!r} the style {str(style)!r}, but {why}"
                )
        if not fitting:
            raise ValueError(
                f"plan: {pattern!r} has the style {str(style)!r}, but matches no layer with a "
                f"weight, only {listed(matches)}"
            )
        for name in fitting:
            other, known = found.get(first[id(named[name])], (pattern, style))
            if known != style and ("*" in other) == ("*" in pattern):
                raise ValueError(
                    f"plan: {other!r} gives {name!r} the style {str(known)!r}, and "
                    f"{pattern!r} gives it {str(style)!r}: expected one"
                )
            found[first[id(named[name])]] = pattern, style
    return {name: style for name, (_, style) in found.items()}


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
    found = list(filter(expression.fullmatch, names))
    if not found:
        raise ValueError(
            f"plan: {pattern!r} matches no {what}. The model's {what}s are {listed(names)}"
        )
    return found


def problem(model: nn.Module, name: str, module: nn.Module, style: Style) -> str | None:
    """Return the reason why a module cannot have a style, or None."""
    table = style.name == "vocabulary" and isinstance(module, nn.Embedding)
    if not table and not isinstance(module, nn.Linear):
        wanted = "an nn.Embedding or the nn.Linear of the head"
        wanted = wanted if style.name == "vocabulary" else "an nn.Linear"
        article = "an" if type(module).__name__[0] in "AEIOU" else "a"
        return f"it is {article} {type(module).__name__}: expected {wanted}"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention reads the weights of this layer itself: expected query, key "
            "and value as linear layers"
        )
    if not is_plain(module):
        return (
            f"this {type(module).__name__} does more than a plain layer: expected no forward of "
            "its own, no parametrization of its weight, no max_norm, scale_grad_by_freq or sparse, "
            "and no hooks (register them after the trainer is built)"
        )
    return None


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
