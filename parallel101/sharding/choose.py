"""The collectives that a product of sharded arrays needs: the plan that sends the fewest bytes.

    A[I, J_X] · B[J, K] → C[I, K]      gather first:    AllGather_X A[I, J_X] → A[I, J]
                                                        A[I, J] · B[J, K] → C[I, K]

                                       or add last:     Slice_{X,J} B[J, K] → B[J_X, K]
                                                        A[I, J_X] · B[J_X, K] → C[I, K] {U_X}
                                                        AllReduce_X C[I, K] {U_X} → C[I, K]

One rule replaces the book's four cases. Blocks can be multiplied if each axis cuts at most one dim,
in every operand that has the dim. If the dim is summed over, the product is partial along the axis.
So a plan chooses a dim for each axis, or none. It reshards the operands to that, multiplies, and
reshards the product. It tries the dims that the axis cuts in an operand or in the result.

Source: Austin et al., "How to Scale Your Model" (2025), chapter 3, "Sharded Matrices and How to
Multiply Them".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.sharding.notation import Sharding, arrays_in
from parallel101.sharding.reshard import ReshardStep, elements_sent, reshard
from parallel101.sharding.sharding_plan import Multiply, ShardingPlan

Steps = tuple[ReshardStep | Multiply, ...]


def plan(
    text: str,
    mesh: Mapping[str, int] | DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> ShardingPlan:
    """Return the plan that sends the fewest bytes; of equal ones, the one with the fewest flops.

    Args:
        text: a product such as "A[I, J_X] · B[J, K] → C[I, K]", or an array twice, to reshard it:
            "A[I_X, J] → A[I, J_X]". `*` and `@` are read as ·, and `->` as →. Dims that the result
            lacks are summed over; a dim of both operands that the result has is a batch dim.
        mesh: the size of each axis, such as {"X": 4, "Y": 2}, or a DeviceMesh with named axes.
        dtype: of the arrays.
        sizes: of each dim: I=8, J=12, K=4. Blocks may be uneven: each axis splits by `split_sizes`.

    Raises ValueError if the text can't be read, an array uses an axis twice, the mesh lacks an
    axis, a size is missing, or the result can't be reached, because it is to be partial along an
    axis and isn't a sum along it.

    Example:
        >>> print(p101.sharding.plan("A[I, J_X] · B[J, K] → C[I, K]", {"X": 4}, I=8, J=12, K=4))
        A[I, J_X] · B[J, K] → C[I, K]    (X = 4, I = 8, J = 12, K = 4, float32)
          Slice_{X,J} B[J, K] → B[J_X, K]                            no message
          A[I, J_X] · B[J_X, K] → C[I, K] {U_X}                      192 flops on a rank
          AllReduce_X C[I, K] {U_X} → C[I, K]                        192 B in 6 steps
        A rank sends 192 B in 6 steps.
        Or: AllGather_X A, multiply: 288 B in 3 steps, 768 flops
    """
    operands, result = arrays_in(text)
    arrays, extents = (*operands, result), mesh_sizes(mesh)
    for array in arrays:
        for axis in array.used:
            if axis not in extents:
                raise ValueError(
                    f"{array} uses the axis {axis}, but the mesh has {', '.join(extents)}"
                )
    dims = list(dict.fromkeys(dim for array in arrays for dim in array.dims))
    if set(sizes) != set(dims):
        raise ValueError(
            f"plan() got the sizes of {', '.join(sizes) or 'no dims'}: expected those of "
            f"{', '.join(dims)}, as in plan(…, {dims[0]}=8)"
        )
    for name, n in (*extents.items(), *sizes.items()):
        if type(n) is not int or n < 1:
            raise ValueError(f"{name}={n!r}: expected a whole number, 1 or more")
    sizes = {dim: sizes[dim] for dim in dims}
    if len(operands) == 1:
        steps = reshard(operands[0], result, sizes, extents)
        ways: list[Steps] = [] if steps is None else [tuple(steps)]
    else:
        ways = list(products((operands[0], operands[1], result), sizes, extents))
    if not ways:
        raise ValueError(
            f"there is no way to {result}: only a product gives that, if a dim that it sums "
            f"over is cut along {', '.join(result.partial)}"
        )
    plans = [ShardingPlan(tuple(operands), result, steps, extents, sizes, dtype) for steps in ways]
    plans.sort(key=lambda one: (sent_by(one.steps, sizes, extents), one.flops, len(one.steps)))
    others = tuple(other for other in plans[1:] if not gathered_and_cut(other.steps))
    return replace(plans[0], alternatives=others)


def gathered_and_cut(steps: Steps) -> bool:
    """Return whether these steps gather along an axis and then keep a block along it.

    That is right, but never worth showing.
    """
    moves = [step for step in steps if isinstance(step, ReshardStep)]
    gathered, kept = (
        {axis for step in moves if step.operation == name for axis in step.axes}
        for name in ("AllGather", "Slice")
    )
    return bool(gathered & kept)


def sent_by(steps: Steps, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> float:
    """Return the elements that a rank would send in these steps if all blocks were equal."""
    moves = [step for step in steps if isinstance(step, ReshardStep)]
    return round(sum(elements_sent(step, sizes, mesh) for step in moves), 3)


def products(
    arrays: tuple[Sharding, Sharding, Sharding], sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> Iterator[Steps]:
    """Yield a plan's steps for each way to choose a dim, or none, for each axis."""
    a, b, c = arrays
    summed = [dim for dim in a.dims if dim in b.dims and dim not in c.dims]

    def choices(axis: str) -> list[str | None]:
        cut = [dim for array in arrays for dim, axes in zip(array.dims, array.axes) if axis in axes]
        return [*dict.fromkeys(cut + (summed if axis in c.partial else [])), None]

    for chosen in product(*map(choices, mesh)):
        dims = [dim for dim in dict.fromkeys(chosen) if dim is not None]
        orders = [permutations(axis for axis, to in zip(mesh, chosen) if to == dim) for dim in dims]
        ways: list[Steps] = []
        for axes in product(*orders):
            cut = dict(zip(dims, axes))
            new_a, new_b, new_c = (
                array._replace(axes=tuple(cut.get(dim, ()) for dim in array.dims), partial=())
                for array in arrays
            )
            partial = sorted(axis for dim in summed for axis in cut.get(dim, ()))
            new_c = new_c._replace(partial=tuple(partial))
            of_a, of_b, of_c = (
                reshard(before, after, sizes, mesh)
                for before, after in ((a, new_a), (b, new_b), (new_c, c))
            )
            if of_a is not None and of_b is not None and of_c is not None:
                ways.append((*of_a, *of_b, Multiply(new_a, new_b, new_c), *of_c))
        if ways:
            yield min(ways, key=lambda steps: sent_by(steps, sizes, mesh))


def mesh_sizes(mesh: Mapping[str, int] | DeviceMesh) -> dict[str, int]:
    """Return the size of each axis, by name. Raises TypeError for a mesh without names."""
    if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names:
        return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape))
    if not isinstance(mesh, Mapping) or not mesh:
        raise TypeError(
            f'mesh={mesh!r}: expected the size of each axis, such as {{"X": 4, "Y": 2}}, or a '
            "DeviceMesh with mesh_dim_names"
        )
    return dict(mesh)
