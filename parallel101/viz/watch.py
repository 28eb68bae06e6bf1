"""`watch(fn)`: run any function that takes a tensor and talks to its peers, on values that carry their origin.

    rank r calls fn(x) with x = what only rank r has ──▶ fn's sends and receives ──▶ run.animate() shows whose data is where

No annotation is needed, so it works on the learner's own function, right or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.analysis.provenance import most_elements, origin_tensor

if TYPE_CHECKING:
    from parallel101.ranks.run import Run
    from parallel101.sim.network import Network

PARTS = 2  #  elements for each rank's chunk: two show a cut in the wrong place that one would hide


def watch(
    fn: Callable[[torch.Tensor], Any],
    world_size: int = 4,
    *,
    numel: int | None = None,
    backend: str = "gloo",
    network: Network | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Run:
    """Call `fn(x)` on every rank, with an x that can be traced, and keep what the messages carried.

    Args:
        fn: takes a tensor, talks to the other ranks, returns a tensor (or several, or none). Sums, copies and moves can be followed.
        world_size: how many ranks; up to 18 have room in an int64.
        numel: elements of x on each rank; 2·world_size unless said, or as many as there is room for.
        backend: "gloo", "nccl" or "sim".
        network: on sim, the links between the ranks.
        shape: of x, in place of numel.
        dtype: torch.int64 or torch.float64.

    Returns:
        The Run, whose `animate()` shows whose data every rank holds of every chunk.

    Raises:
        TypeError: fn is nothing that can be called.
        ValueError: numel and shape that disagree, a world, shape or dtype that cannot be, or values that do not fit the dtype.
    """
    if not callable(fn):
        raise TypeError(f"watch() takes a function of a tensor, to run on each rank; got a {type(fn).__name__}: {fn!r}")
    origin_tensor(0, world_size, 0, dtype)  # what cannot be is better said here than by every rank
    if shape is not None and not (isinstance(shape, Sequence) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise ValueError(f"shape={shape!r}: expected a whole number for each dim, such as (2, 3)")
    if numel is None:
        numel = math.prod(shape) if shape is not None else max(1, min(PARTS * world_size, most_elements(world_size, dtype)))
    size = tuple(shape) if shape is not None else (numel,)
    if math.prod(size) != numel:
        raise ValueError(
            f"shape={size} has {math.prod(size)} elements and numel={numel} was asked for: give one of them, or let them agree"
        )
    origin_tensor(0, world_size, numel, dtype)  # nor what does not fit

    from parallel101.ranks.launch import launch

    def watched() -> Any:
        x = origin_tensor(dist.get_rank(), world_size, numel, dtype)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return fn(x.to(device).reshape(size))

    links: dict[str, Any] = {} if network is None else {"network": network}
    return launch(watched, world_size=world_size, backend=backend, trace="payload", **links)
