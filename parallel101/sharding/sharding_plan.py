"""The steps of a product of sharded arrays: what they cost, and how a rank runs them.

    A[I, J_X] · B[J, K] → C[I, K]      AllGather_X A[I, J_X] → A[I, J]          n(p−1)/p bytes
                                       A[I, J] · B[J, K] → C[I, K]              2IJK flops

choose.py says how a plan is chosen. Here is what one costs, and how it is run.

Source: Austin et al., "How to Scale Your Model" (2025), chapter 3, "Sharded Matrices and How to
Multiply Them".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel101 import cost
from parallel101.cost import Chip, Time
from parallel101.mesh import Group, group_of
from parallel101.sharding.notation import Sharding
from parallel101.sharding.reshard import ReshardStep, Transfer, apply, size, transfers
from parallel101.spans import span


class Multiply(NamedTuple):
    """The local product: each rank multiplies its own blocks.

    Dims that the result lacks are summed over.
    """

    a: Sharding
    b: Sharding
    after: Sharding

    @property
    def title(self) -> str:
        return "multiply"

    def __str__(self) -> str:
        return f"{self.a} · {self.b} → {self.after}"


@dataclass(frozen=True, repr=False)
class ShardingPlan:
    """The steps from the operands' blocks to the result's.

    Attributes:
        operands, result: as they were named.
        steps: collectives and slices, and for a product one Multiply.
        mesh: the size of each axis.
        sizes: of each dim of the whole arrays.
        dtype: of the arrays.
        alternatives: the other plans, the one that sends the fewest bytes first.
    """

    operands: tuple[Sharding, ...]
    result: Sharding
    steps: tuple[ReshardStep | Multiply, ...]
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    alternatives: tuple[ShardingPlan, ...] = field(default=(), compare=False)

    # ── What it costs

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def flops(self) -> int:
        """The multiplications and additions of rank 0, whose blocks are the largest."""
        products = [step for step in self.steps if isinstance(step, Multiply)]
        return sum(2 * math.prod(self._extents(step.a, step.b).values()) for step in products)

    @property
    def bytes_sent(self) -> list[int]:
        """The exact bytes that each rank sends."""
        of_steps = map(self.sent_in, self.steps)
        return [sum(of_rank) for of_rank in zip([0] * self.world_size, *of_steps)]

    @property
    def rounds(self) -> int:
        """The number of messages on the critical path.

        If no block is empty, that is the makespan of a run on sim with `Network(latency=1,
        bandwidth=inf)`.
        """
        return sum(self.rounds_of(step) for step in self.steps)

    def rounds_of(self, step: ReshardStep | Multiply) -> int:
        """Return the number of messages on the critical path of a step."""
        at = dict.fromkeys(self.mesh, 0)
        return sum(len(transfer.blocks) - 1 for transfer in self._transfers(step, at))

    def sent_in(self, step: ReshardStep | Multiply) -> list[int]:
        """Return the bytes that each rank sends in a step."""
        return [
            sum(transfer.sent for transfer in self._transfers(step, at)) * self.dtype.itemsize
            for at in self.coordinates()
        ]

    def _transfers(self, step: ReshardStep | Multiply, at: Mapping[str, int]) -> list[Transfer]:
        if isinstance(step, Multiply):
            return []
        return list(transfers(step, self.sizes, self.mesh, at))

    def times(self, chip: str | Chip) -> list[Time | None]:
        """Return the seconds of each step on a mesh of such chips; None for a slice.

        Args:
            chip: a name in `cost.CHIPS`, such as "TPU v5e", or a Chip. Its flops are those in bf16.
        """
        return [self._time(step, chip) for step in self.steps]

    def _time(self, step: ReshardStep | Multiply, chip: str | Chip) -> Time | None:
        if isinstance(step, Multiply):
            extents = self._extents(step.a, step.b)
            in_a, in_b, in_c = (set(array.dims) for array in (step.a, step.b, step.after))
            batch, m, n, k = (
                math.prod(extents[dim] for dim in dims)
                for dims in (in_a & in_b & in_c, in_a - in_b, in_b - in_a, in_a & in_b - in_c)
            )
            return cost.matmul(m, k, n, chip, element_bytes=self.dtype.itemsize, batch=batch)
        nbytes = math.prod(self._extents(step.larger).values()) * self.dtype.itemsize
        axes = [self.mesh[axis] for axis in step.axes]
        if step.operation == "AllToAll":  # its V is the array of all ranks together
            return cost.all_to_all(nbytes * math.prod(axes), axes, chip)
        operation = {
            "AllGather": cost.all_gather,
            "ReduceScatter": cost.reduce_scatter,
            "AllReduce": cost.all_reduce,
        }.get(step.operation)
        return operation and operation(nbytes, axes, chip)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yield each rank's position along each axis of the mesh; the last axis runs fastest."""
        for place in product(*(range(p) for p in self.mesh.values())):
            yield dict(zip(self.mesh, place))

    def _extents(self, *arrays: Sharding) -> dict[str, int]:
        """Return the size of each dim of rank 0's blocks."""
        first = dict.fromkeys(self.mesh, 0)
        return {
            dim: size(part)
            for array in arrays
            for dim, part in zip(array.dims, array.block(self.sizes, self.mesh, first))
        }

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {n}" for name, n in (*self.mesh.items(), *self.sizes.items()))
        operands, dtype = " · ".join(map(str, self.operands)), str(self.dtype).split(".")[-1]
        lines = [f"{operands} → {self.result}    ({sizes}, {dtype})"]
        for step in self.steps:
            costs = sent_text(max(self.sent_in(step)), self.rounds_of(step))
            if isinstance(step, Multiply):
                costs = f"{self.flops:,} flops on a rank"
            lines.append(f"  {step!s:<58} {costs}")
        lines.append(f"A rank sends {sent_text(max(self.bytes_sent), self.rounds)}.")
        lines += [f"Or: {other.short}" for other in self.alternatives[:3]]
        if len(self.alternatives) > 3:
            lines.append(f"There are {len(self.alternatives) - 3} more alternatives.")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def short(self) -> str:
        """The plan in one line."""
        steps = [
            step.title if isinstance(step, Multiply) else f"{step.title} {step.before.name}"
            for step in self.steps
        ]
        sent = sent_text(max(self.bytes_sent), self.rounds)
        return f"{', '.join(steps) or 'nothing'}: {sent}, {self.flops:,} flops"

    # ── How it is run

    def shard(self, *wholes: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the operands' blocks of each rank, from the whole arrays.

        Raises ValueError or TypeError unless they are tensors of the plan's shapes and dtype.
        """
        self._check(wholes, None)

        def block(array: Sharding, whole: Tensor, at: Mapping[str, int]) -> Tensor:
            part = whole[array.block(self.sizes, self.mesh, at)]
            # the whole value is the first term of the sum, the others are 0
            first = all(at[axis] == 0 for axis in array.partial)
            part = part if first else torch.zeros_like(part)
            return part.clone(memory_format=torch.contiguous_format)

        return [
            tuple(block(array, whole, at) for array, whole in zip(self.operands, wholes))
            for at in self.coordinates()
        ]

    def unshard(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the whole result from each rank's block.

        Partial blocks are added up; of equal blocks the first rank's is taken.
        """
        if len(blocks) != self.world_size:
            raise ValueError(
                f"unshard() got {len(blocks)} blocks: expected one of each of "
                f"{self.world_size} ranks"
            )
        whole = blocks[0].new_zeros([self.sizes[dim] for dim in self.result.dims])
        for at, block in zip(self.coordinates(), blocks):
            if all(at[axis] == 0 for axis in self.mesh if axis not in self.result.used):
                whole[self.result.block(self.sizes, self.mesh, at)] += block
        return whole

    def run(self, *blocks: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
        """Return this rank's block of the result.

        Every rank of the mesh calls it, and it has a backward.

        Args:
            blocks: of the operands. Rank r's are `plan.shard(…)[r]`. A rank outside the mesh passes
                zero-volume tensors and gets one.
            mesh: a DeviceMesh with the plan's axes, in their order. None: ranks 0, 1, … of the
                world, row by row.

        The result is a new tensor. Raises ValueError, before any message, for blocks of another
        shape or dtype and for another mesh.
        """
        *_, held = self.walk(*blocks, mesh=mesh)
        return held[self.result.name]

    def walk(self, *blocks: Tensor, mesh: DeviceMesh | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield what this rank holds, by name of the array: at first, and after each step."""
        group = self._group(mesh)
        if group.position is None:
            # the result depends on the blocks, as on the other ranks
            nothing = sum((block.sum() for block in blocks), blocks[0].new_empty(0))
            yield {array.name: nothing for array in (*self.operands, self.result)}
            return
        at = list(self.coordinates())[group.position]
        self._check(blocks, at)
        held = {array.name: block for array, block in zip(self.operands, blocks)}
        yield dict(held)
        for step in self.steps:
            with span(step.title, array=step.after.name):
                if isinstance(step, Multiply):
                    block = self.product(held[step.a.name], held[step.b.name])
                else:
                    block = apply(step, held[step.after.name], group, self.sizes, self.mesh, at)
            held[step.after.name] = block
            yield dict(held)
        if not self.steps:
            yield {self.result.name: blocks[0].clone()}

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of the two operands, or of blocks of them."""
        arrays = (*self.operands, self.result)
        letters = {dim: chr(ord("a") + i) for i, dim in enumerate(self.sizes)}
        words = ("".join(letters[dim] for dim in array.dims) for array in arrays)
        return torch.einsum("{},{}->{}".format(*words), a, b)

    def _group(self, mesh: DeviceMesh | None) -> Group:
        """Return the group of the mesh's ranks, with this rank's position if it is one of them."""
        if mesh is None:
            started = dist.is_initialized()
            if (world_size := dist.get_world_size() if started else 1) < self.world_size:
                raise ValueError(
                    f"the plan's mesh {dict(self.mesh)} has {self.world_size} ranks, but this "
                    f"run has {world_size}"
                )
            group = group_of(range(self.world_size) if started else None)
            return group._replace(shape=tuple(self.mesh.values()), axes=tuple(self.mesh))
        group = group_of(mesh)
        axes = list(zip(group.axes, group.shape))
        if group.position is not None and axes != list(self.mesh.items()):
            raise ValueError(
                f"the plan is for the mesh {dict(self.mesh)}, but this {type(mesh).__name__} has "
                f"{dict(axes) or group.shape}"
            )
        return group

    def _check(self, given: Sequence[Tensor], at: Mapping[str, int] | None) -> None:
        """Raise ValueError or TypeError unless these are the operands' blocks on the rank `at`.

        None: the whole operands.
        """
        names = " and ".join(array.name for array in self.operands)
        if len(given) != len(self.operands):
            raise ValueError(f"got {len(given)} arrays: expected {names}")
        for array, x in zip(self.operands, given):
            expected = tuple(self.sizes[dim] for dim in array.dims)
            what = array.name
            if at is not None:
                what = f"the block of {array} at {dict(at)}"
                expected = tuple(map(size, array.block(self.sizes, self.mesh, at)))
            check_tensor(what, x)
            if tuple(x.shape) != expected or x.dtype != self.dtype:
                raise ValueError(
                    f"{what} has shape {tuple(x.shape)} and dtype {x.dtype}: expected {expected} "
                    f"and {self.dtype}, as the plan's sizes and dtype say"
                )


def check_tensor(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a tensor")


def sent_text(nbytes: int, steps: int) -> str:
    """Return "192 B in 3 steps"."""
    return f"{nbytes:,} B in {steps} step{'s' * (steps != 1)}" if steps else "no message"
