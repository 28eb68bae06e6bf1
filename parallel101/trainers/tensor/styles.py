"""The styles of a tensor-parallel plan: how one linear layer or embedding is cut.

column          y = x @ Wᵀ, W cut by rows: each rank computes some of the outputs            W (out, in)    [ W₀ ]
row             W cut by columns: each rank takes some of the inputs, and outputs are summed                [ W₁ ]      [ W₀ | W₁ ]
column_gather   column, and then an all-gather: every rank has all outputs                                  column       row
vocabulary      rows of an embedding, or a head whose logits stay cut
"""

from __future__ import annotations

from typing import NamedTuple

NAMES = ("column", "column_gather", "row", "vocabulary")


class Style(NamedTuple):
    """How a module is cut.

    `column(…)` makes one with options; a plain name such as "row" means the style without any.
    """

    name: str
    parts: int = 1
    heads: int | str | None = None

    def __str__(self) -> str:
        options = [f"parts={self.parts}"] * (self.parts > 1) + [f"heads={self.heads!r}"] * (
            self.heads is not None
        )
        return f"{self.name}({', '.join(options)})" if options else self.name


def column(*, parts: int = 1, heads: int | str | None = None) -> Style:
    """The style "column" with options, for a plan: `{"attention.qkv": p101.column(parts=3,
    heads=8)}`.

    Args: parts: how many equal matrices lie side by side in the outputs: 3 for a fused query, key
        and value. Each is cut alike. heads: how many heads each part has. They are dealt out whole,
        so the size of the axis must divide them. If the code of the
            module around the layer counts its heads, as in `q.unflatten(-1, (self.num_heads, -1))`,
            the name of that attribute:
            heads="num_heads". On each rank the attribute then becomes the number of heads that the
            rank has.

    Raises ValueError if either is not a whole number, 1 or more (or, for heads, a name).
    """
    for name, value in (("parts", parts), ("heads", heads)):
        if name == "heads" and isinstance(value, str) and value.isidentifier():
            continue
        if value is not None and (type(value) is not int or value < 1):
            attribute = ", or the name of an attribute" if name == "heads" else ""
            raise ValueError(
                f"column({name}={value!r}): expected a whole number, 1 or more{attribute}"
            )
    return Style("column", parts, heads)


def style_of(pattern: str, style: object) -> Style:
    """What stands in a plan, as a Style. Raises ValueError."""
    if isinstance(style, Style):
        return style
    if style not in NAMES:
        raise ValueError(
            f"plan: {pattern!r} has the style {style!r}: expected one of "
            f"{', '.join(map(repr, NAMES))}, or p101.column(…)"
        )
    return Style(str(style))
