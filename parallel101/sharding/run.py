"""`run`: cut whole arrays, run a plan or a program of yours on ranks, and check what they return.

    a, b ──shard──▶ blocks ──launch: each rank runs the plan──▶ blocks of C
                                                                   │
                    are they the blocks of a · b? ◀────────────────┤
                    if not, of which sharding of C? ◀──────────────┘

This is the one file of the folder that starts ranks and draws (`run(…).picture()`), so it needs the
rest of parallel101 when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101.sharding.choose import plan
from parallel101.sharding.notation import Sharding, arrays_in
from parallel101.sharding.sharding_plan import ShardingPlan, check_tensor

# relative errors that rounding explains; other floats may have 2 %, integers none
RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True, repr=False)
class ShardedRun:
    """The result of a sharded product: each rank's blocks, and whether they are correct.

    Attributes:
        plan: the plan that chose the blocks, and was run unless the ranks ran another program.
        operands: the whole arrays.
        expected: the whole result.
        held: by rank, what it held at first and after each step of the plan, by name of the array.
        run: the Run, with its trace.
        program: whether the ranks ran a program other than the plan.
    """

    plan: ShardingPlan
    operands: tuple[Tensor, ...]
    expected: Tensor
    held: list[list[dict[str, Tensor]]]
    run: Any = field(repr=False)
    program: bool = False

    @property
    def results(self) -> list[Any]:
        """The block of the result that each rank returned."""
        return [states[-1][self.plan.result.name] for states in self.held]

    @property
    def wrong(self) -> list[int]:
        """The ranks whose block differs from their block of the expected result."""
        return self._differ_from(self.plan.result)

    @property
    def found(self) -> Sharding | None:
        """The sharding of the result whose blocks the ranks returned; None if there is none."""
        result, mesh = self.plan.result, self.plan.mesh
        for chosen in product([None, *result.dims, "U_"], repeat=len(mesh)):
            cut, *others = (
                tuple(axis for axis, to in zip(mesh, chosen) if to == dim)
                for dim in ("U_", *result.dims)
            )
            sharding = result._replace(axes=tuple(others), partial=tuple(sorted(cut)))
            if not self._differ_from(sharding):
                return sharding
        return None

    def _differ_from(self, array: Sharding) -> list[int]:
        """Return the ranks whose blocks are not those of the result under this sharding.

        Partial blocks are added up first.
        """
        places, wrong = list(self.plan.coordinates()), []
        kept = [tuple(i for axis, i in at.items() if axis not in array.partial) for at in places]
        for rank, at in enumerate(places):
            expected = self.expected[array.block(self.plan.sizes, self.plan.mesh, at)]
            # the ranks that differ only along axes along which the array is partial
            terms = [block for block, of in zip(self.results, kept) if of == kept[rank]]
            shaped = all(isinstance(x, Tensor) and x.shape == expected.shape for x in terms)
            if not shaped or not close(sum(x.detach() for x in terms), expected, self.expected):
                wrong.append(rank)
        return wrong

    @property
    def verdict(self) -> str:
        """One or two sentences that say whether the result is right, and if not, what it is."""
        result, wrong, n = self.plan.result, self.wrong, len(self.held)
        if not wrong:
            whole = " · ".join(array.name for array in self.plan.operands)
            return f"{result} on {n} ranks equals the whole {whole}."
        ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
        text = f"The block of {result} is wrong on {ranks if len(wrong) < n else 'every rank'}."
        if self.found is not None:
            missing = [axis for axis in self.found.partial if axis not in result.partial]
            why = f": the sum over {', '.join(missing)} is missing" if missing else ""
            return f"{text} The ranks hold {self.found}{why}."
        rank, at = wrong[0], list(self.plan.coordinates())[wrong[0]]
        block, due = self.results[rank], result.block(self.plan.sizes, self.plan.mesh, at)
        shape, is_tensor = tuple(self.expected[due].shape), isinstance(block, Tensor)
        if is_tensor and block.shape == shape:
            return f"{text} Rank {rank} has the right shape, {shape}, with other values."
        returned = f"shape {tuple(block.shape)}" if is_tensor else f"a {type(block).__name__}"
        return f"{text} Rank {rank} returned {returned}: expected shape {shape}."

    def picture(self, title: str | None = None) -> Any:
        """Draw the blocks that each rank held before and after each step, from their values.

        A notebook shows the picture; `.save("blocks.html")` writes it to a file.
        """
        from parallel101.laboratory.viz.sharded_product import sharding_scene

        return sharding_scene(self, title=title)

    def __str__(self) -> str:
        return f"{'' if self.program else f'{self.plan}' + chr(10)}{self.verdict}"

    __repr__ = __str__


def run(
    text: str,
    *wholes: Tensor,
    mesh: Mapping[str, int],
    program: Callable[..., Tensor] | None = None,
    backend: str = "sim",
    **launched: Any,
) -> ShardedRun:
    """Run a sharded product on ranks, and compare each rank's block with the whole product.

    Args:
        text, mesh: as for `plan`, which finds the steps; the sizes and the dtype are those of the
            arrays.
        wholes: the whole operands: a and b, or one array to reshard.
        program: instead of the plan, a function of this rank's blocks that returns its block of the
            result. It runs on every rank, with torch.distributed initialized; rank r has position r
            in the mesh, row by row.
        backend, launched: as for `parallel101.launch`.

    Returns a ShardedRun. `print` shows the plan and the verdict, `.picture()` the blocks, and
    `.run.trace` is the record. Raises ValueError as `plan` does, and for arrays whose shapes or
    dtypes don't fit each other; TypeError for anything but tensors. An error of a rank is raised as
    launch does.
    """
    from parallel101.laboratory.ranks.launch import launch

    operands, _ = arrays_in(text)
    names = " and ".join(array.name for array in operands)
    if len(wholes) != len(operands):
        raise ValueError(f"run() got {len(wholes)} arrays: expected {names}, whole")
    sizes: dict[str, int] = {}
    for array, whole in zip(operands, wholes):
        check_tensor(array.name, whole)
        if whole.dim() != len(array.dims):
            raise ValueError(
                f"{array.name} has shape {tuple(whole.shape)}: expected the "
                f"{len(array.dims)} dims of {array}"
            )
        sizes = dict(zip(array.dims, whole.shape)) | sizes
    chosen = plan(text, mesh, dtype=wholes[0].dtype, **sizes)
    blocks = chosen.shard(*wholes)

    def on_a_rank() -> list[dict[str, Tensor]]:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = [block.to(device) for block in blocks[dist.get_rank()]]
        if program is None:
            return list(chosen.walk(*mine))
        held = {array.name: block.clone() for array, block in zip(chosen.operands, mine)}
        return [held, held | {chosen.result.name: program(*mine)}]

    launched = {"trace": True, **launched}
    ran = launch(on_a_rank, world_size=chosen.world_size, backend=backend, **launched)
    expected = wholes[0] if len(wholes) == 1 else chosen.product(*wholes)
    return ShardedRun(chosen, wholes, expected, ran.results, ran, program is not None)


def close(found: Tensor, expected: Tensor, whole: Tensor) -> bool:
    """Return whether rounding explains the difference, given the largest value of the whole."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(found.to(whole.dtype), expected)
    sizes = whole.abs().nan_to_num(0.0, 0.0)  # an infinite tolerance would allow anything
    atol = RELATIVE.get(sizes.dtype, 2e-2) * sizes.max().item()
    found, expected = found.to(torch.complex128), expected.to(torch.complex128)
    return torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)
