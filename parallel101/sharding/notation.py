"""`A[I_X, J_Y] {U_Z}`: an array named by how it is sharded, and the reader of such names.

    A[I_X, J]        the mesh axis X cuts dim I, no axis cuts dim J: every rank on a line along Y
                     has the same block
    A[I_XY, J]       X cuts I, and Y cuts each of those blocks
    C[I, K] {U_X}    partial along X: each rank on a line along X has one term of a sum

In torch's words, X shards dim 0 of A[I_X, J] (Shard(0)), Y replicates it (Replicate()), and C is
partial over X (Partial()). The notation is that of Austin et al., "How to Scale Your Model" (2025),
chapter 3, where U_X means "unreduced along X". An axis with a longer name has lower-case letters:
A[I_dp, J], and several of them need braces: A[I_{dp,tp}, J].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from parallel101.mesh import split_sizes

WORD = r"[A-Za-z][A-Za-z0-9]*"
ARRAY = re.compile(rf"\s*({WORD})\s*\[([^\]]*)\]\s*(?:\{{\s*U_(\w+|\{{[^}}]*\}})\s*\}})?\s*")
DIM = re.compile(rf"\s*({WORD})\s*(?:_\s*(\w+|\{{[^}}]*\}}))?\s*")


class Sharding(NamedTuple):
    """An array's name and dims, the axes that cut each dim, and the axes along which it is partial.

    Of the axes that cut a dim, the outermost is the first.
    """

    name: str
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = ", ".join(subscripted(dim, axes) for dim, axes in zip(self.dims, self.axes))
        unreduced = f" {{{subscripted('U', self.partial)}}}" if self.partial else ""
        return f"{self.name}[{dims}]{unreduced}"

    @property
    def used(self) -> tuple[str, ...]:
        """The axes that cut a dim or along which the array is partial."""
        return (*(axis for axes in self.axes for axis in axes), *self.partial)

    def block(
        self, sizes: Mapping[str, int], mesh: Mapping[str, int], at: Mapping[str, int]
    ) -> tuple[slice, ...]:
        """Return the part of the whole array that the rank at these coordinates holds: an index."""
        cuts = zip(self.dims, self.axes)
        return tuple(interval(sizes[dim], axes, mesh, at) for dim, axes in cuts)


def interval(n: int, axes: Iterable[str], mesh: Mapping[str, int], at: Mapping[str, int]) -> slice:
    """Return the slice of n things that a rank holds if one axis after the other splits them."""
    start, stop = 0, n
    for axis in axes:
        parts = split_sizes(stop - start, mesh[axis])
        start += sum(parts[: at[axis]])
        stop = start + parts[at[axis]]
    return slice(start, stop)


def subscripted(name: str, axes: tuple[str, ...]) -> str:
    """Return I_X, I_XY or I_{dp,tp}."""
    if not axes:
        return name
    joined = "".join(axes)
    if len(axes) > 1 and tuple(axes_in(joined)) != axes:
        joined = "{" + ",".join(axes) + "}"
    return f"{name}_{joined}"


def axes_in(subscript: str) -> list[str]:
    """Return the axes that a subscript names: two for XY and for {dp,tp}, one for dp."""
    if subscript.startswith("{") and "," in subscript:
        return [word.strip() for word in subscript.strip("{} ").split(",")]
    return re.findall(r"[A-Z][0-9]*|[a-z][a-z0-9]*", subscript)


def arrays_in(text: str) -> tuple[list[Sharding], Sharding]:
    """Return the operands, one or two, and the result of "A[I, J_X] · B[J, K] → C[I, K]".

    Raises ValueError for a text that can't be read, or whose dims don't make a product.
    """
    sides = re.split(r"→|->", text) if isinstance(text, str) else []
    factors = re.split(r"[·*@]", sides[0]) if sides else []
    if len(sides) != 2 or len(factors) > 2:
        raise ValueError(
            f"can't read {text!r}: expected one or two arrays and one arrow, as in "
            "'A[I, J_X] · B[J, K] → C[I, K]' or 'A[I_X, J] → A[I, J_X]'"
        )
    arrays = [array_in(part) for part in (*factors, sides[1])]
    *operands, result = arrays
    if len(operands) == 1:
        if operands[0][:2] != result[:2]:
            raise ValueError(f"{text!r}: expected the same array with the same dims on both sides")
        return operands, result
    if len({array.name for array in arrays}) < 3:
        raise ValueError(f"{text!r} uses a name twice: give the three arrays three names")
    for array in arrays:
        for dim in array.dims:
            if not any(dim in other.dims for other in arrays if other is not array):
                raise ValueError(
                    f"{text!r}: only {array.name} has the dim {dim}, but a dim of the result is "
                    "one of an operand, and only a dim of both operands can be summed over"
                )
    return operands, result


def array_in(text: str) -> Sharding:
    """Return the array that a text such as "A[I_X, J] {U_Y}" names. Raises ValueError."""
    match = ARRAY.fullmatch(text)
    dims = [DIM.fullmatch(part) for part in re.split(r",(?![^{]*\})", match[2])] if match else []
    if match is None or not all(dims):
        raise ValueError(
            f"can't read {text.strip()!r}: expected a name, its dims and their axes, as in "
            "A[I_X, J] or C[I, K] {U_X}"
        )
    names = tuple(dim[1] for dim in dims if dim)
    axes = tuple(tuple(axes_in(dim[2] or "")) for dim in dims if dim)
    array = Sharding(match[1], names, axes, tuple(sorted(axes_in(match[3] or ""))))
    for kind, words in ("dim", names), ("axis", array.used):
        if twice := [word for k, word in enumerate(words) if word in words[:k]]:
            raise ValueError(
                f"{array} uses the {kind} {twice[0]} twice: each dim of an array needs its own "
                "name, and each axis can cut only one of them"
            )
    return array
