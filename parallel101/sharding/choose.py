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

from collections.abc import Iterator, Mapping, Sequence
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
    extents = mesh_sizes(mesh)
    arrays = (*operands, result)
    for array in arrays:
        unknown = [axis for axis in array.used if axis not in extents]
        if unknown:
            raise ValueError(
                f"{array} uses the axis {unknown[0]}, but the mesh has {', '.join(extents)}"
            )
    sizes = checked_sizes(arrays, sizes)
    if len(operands) == 1:
        steps = reshard(operands[0], result, sizes, extents)
        ways: list[Steps] = [] if steps is None else [tuple(steps)]
    else:
        ways = list(products(operands[0], operands[1], result, sizes, extents))
    if not ways:
        axes = ", ".join(result.partial)
        raise ValueError(
            f"there is no way to {result}: only a product gives that, if a dim that it sums "
            f"over is cut along {axes}"
        )
    plans = [ShardingPlan(tuple(operands), result, steps, extents, sizes, dtype) for steps in ways]
    best, *others = sorted(plans, key=cost_of)
    others = [other for other in others if not gathered_and_cut(other)]
    return ShardingPlan(
        best.operands, best.result, best.steps, extents, sizes, dtype, tuple(others)
    )


def gathered_and_cut(plan: ShardingPlan) -> bool:
    """Return whether the plan gathers along an axis and then keeps a block along it.

    That is right, but never worth showing.
    """
    steps = [step for step in plan.steps if isinstance(step, ReshardStep)]
    gathered = {axis for step in steps if step.operation == "AllGather" for axis in step.axes}
    kept = {axis for step in steps if step.operation == "Slice" for axis in step.axes}
    return bool(gathered & kept)


def cost_of(plan: ShardingPlan) -> tuple[float, int, int]:
    """Return bytes (of equal blocks), flops and number of steps, by which plans are compared."""
    return round(sent_by(plan.steps, plan.sizes, plan.mesh), 3), plan.flops, len(plan.steps)


def sent_by(steps: Steps, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> float:
    """Return the elements that a rank would send in these steps if all blocks were equal."""
    moves = [step for step in steps if isinstance(step, ReshardStep)]
    return sum(elements_sent(step, sizes, mesh) for step in moves)


def products(
    a: Sharding, b: Sharding, c: Sharding, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> Iterator[Steps]:
    """Yield a plan's steps for each way to choose a dim, or none, for each axis."""
    summed = [dim for dim in a.dims if dim in b.dims and dim not in c.dims]

    def choices(axis: str) -> list[str | None]:
        dims = [
            dim for array in (a, b, c) for dim, axes in zip(array.dims, array.axes) if axis in axes
        ]
        return [*dict.fromkeys(dims + (summed if axis in c.partial else [])), None]

    for chosen in product(*(choices(axis) for axis in mesh)):
        cuts = {
            dim: [axis for axis, to in zip(mesh, chosen) if to == dim]
            for dim in chosen
            if dim is not None
        }
        ways: list[Steps] = []
        for orders in product(*(permutations(axes) for axes in cuts.values())):
            cut = dict(zip(cuts, orders))
            new_a, new_b, new_c = (
                array.replace(dict(enumerate(cut.get(dim, ()) for dim in array.dims)), ())
                for array in (a, b, c)
            )
            new_c = new_c.replace({}, [axis for dim in summed for axis in cut.get(dim, ())])
            before_a, before_b = reshard(a, new_a, sizes, mesh), reshard(b, new_b, sizes, mesh)
            after = reshard(new_c, c, sizes, mesh)
            if before_a is not None and before_b is not None and after is not None:
                ways.append((*before_a, *before_b, Multiply(new_a, new_b, new_c), *after))
        if ways:
            yield min(ways, key=lambda steps: sent_by(steps, sizes, mesh))


def mesh_sizes(mesh: Mapping[str, int] | DeviceMesh) -> dict[str, int]:
    """Return the size of each axis, by name. Raises ValueError or TypeError for other meshes."""
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise ValueError(
                "the DeviceMesh has axes without names: pass mesh_dim_names to init_device_mesh"
            )
        return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape))
    if not isinstance(mesh, Mapping) or not mesh:
        raise TypeError(
            f'mesh={mesh!r}: expected the size of each axis, such as {{"X": 4, "Y": 2}}, or a '
            "DeviceMesh"
        )
    for axis, p in mesh.items():
        if type(p) is not int or p < 1:
            raise ValueError(f"mesh={dict(mesh)}: expected 1 rank or more along {axis}")
    return dict(mesh)


def checked_sizes(arrays: Sequence[Sharding], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the dims, in the order of the text.

    Raises ValueError if one is missing or unknown, or isn't a size.
    """
    dims = list(dict.fromkeys(dim for array in arrays for dim in array.dims))
    for dim in dims:
        if dim not in sizes:
            raise ValueError(
                f"the size of {dim} is missing: pass plan(…, {', '.join(f'{d}=…' for d in dims)})"
            )
    for dim, n in sizes.items():
        if dim not in dims:
            raise ValueError(f"{dim}={n}, but no array has a dim {dim}: expected {', '.join(dims)}")
        if type(n) is not int or n < 1:
            raise ValueError(f"{dim}={n!r}: expected a size, 1 or more")
    return {dim: sizes[dim] for dim in dims}
