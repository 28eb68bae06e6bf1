"""Which modules the patterns of a plan name, and whether these can have that style.

"blocks.*.mlp.up"     blocks.0.mlp.up, blocks.1.mlp.up, …
"*.up"                every module named up, at any depth: a `*` stands for one or more parts of the name
"layers.*"            among all below, those that have a weight of their own
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from parallel101.trainers.tensor.styles import Style, style_of


def match(plan: Mapping[str, str | Style], model: nn.Module) -> dict[str, Style]:
    """The style of every module that a pattern names.

    An exact name counts for more than a pattern with `*`.
    """
    if not plan:
        raise ValueError(
            'plan={} cuts nothing: expected names of modules and their styles, or "auto"'
        )
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    first = {id(module): name for name, module in reversed(named)}
    found: dict[str, tuple[bool, str, Style]] = {}
    for pattern, given in plan.items():
        style, exact = style_of(pattern, given), "*" not in pattern
        matches = [
            (name, module) for name, module in named if re.fullmatch(expression(pattern), name)
        ]
        if not matches:
            raise ValueError(
                f"plan: {pattern!r} matches no module. The model's modules are "
                f"{listed([name for name, _ in named])}"
            )
        fitting = []
        for name, module in matches:
            if (problem := kind_problem(model, name, module, style)) is None:
                fitting.append((name, module))
            elif exact or module._parameters:
                raise ValueError(
                    f"plan: {pattern!r} gives {name!r} the style {str(style)!r}, but {problem}"
                )
        if not fitting:
            found_only = listed([name for name, _ in matches])
            raise ValueError(
                f"plan: {pattern!r} has the style {str(style)!r}, but matches no layer with a "
                f"weight, only {found_only}"
            )
        for name, module in fitting:
            known = found.get(first[id(module)])
            if known and known[2] != style and known[0] == exact:
                raise ValueError(
                    f"plan: {known[1]!r} gives {name!r} the style {str(known[2])!r}, and "
                    f"{pattern!r} gives it {str(style)!r}: expected one"
                )
            if not known or exact:
                found[first[id(module)]] = exact, pattern, style
    return {name: style for name, (_, _, style) in found.items()}


def expression(pattern: str) -> str:
    """`*` as a whole part: one or more parts; inside of a part: any characters of that part."""
    parts = (
        r"[^.]+(\.[^.]+)*" if part == "*" else r"[^.]*".join(map(re.escape, part.split("*")))
        for part in pattern.split(".")
    )
    return r"\.".join(parts)


def kind_problem(model: nn.Module, name: str, module: nn.Module, style: Style) -> str | None:
    """Why a module cannot have a style, if it cannot."""
    if style.name == "vocabulary" and isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "the embedding has max_norm, scale_grad_by_freq or sparse: expected a plain one"
    elif not isinstance(module, nn.Linear):
        wanted = (
            "an nn.Embedding or the nn.Linear of the head"
            if style.name == "vocabulary"
            else "an nn.Linear"
        )
        return (
            f"it is {'an' if type(module).__name__[0] in 'AEIOU' else 'a'} "
            f"{type(module).__name__}: expected {wanted}"
        )
    expected: Any = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    if type(module).forward is not expected.forward or not isinstance(
        module._parameters.get("weight"), nn.Parameter
    ):
        return (
            f"its class {type(module).__name__} computes more than {expected.__name__} does, "
            "or its weight is not a plain parameter"
        )
    if has_hooks(module):
        return (
            "it has hooks, which the layer in its place would not have: register them after "
            "the trainer is built"
        )
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention reads the weights of this layer itself: expected query, key "
            "and value as linear layers"
        )
    return None


def has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def is_plain(module: object) -> bool:
    """Whether it is a linear layer or an embedding that computes what its class says, and
    nothing else.
    """
    if not isinstance(module, (nn.Linear, nn.Embedding)) or has_hooks(module):
        return False
    expected: Any = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    return (
        type(module).forward is expected.forward
        and set(module._parameters) <= {"weight", "bias"}
        and "weight" in module._parameters
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(map(repr, names[:most])) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )
