"""`watch(fn)`: runs a function that talks to other ranks, on values that carry their origin.

    rank r calls fn(x), with x made of values that only rank r has
        ──▶ fn's messages ──▶ run.animate() shows whose data is where

The function needs no annotation, so this also works on a learner's own code, right or wrong. The
encoding of the values is in `laboratory.analysis.provenance`; `collective.py` draws the picture.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.analysis.provenance import most_elements, origin_tensor
from parallel101.laboratory.ranks.launch import Run, launch
from parallel101.laboratory.sim.network import Network

ELEMENTS_PER_CHUNK = 2  # with one element, a cut in the wrong place could not be seen


def watch(
    fn: Callable[[torch.Tensor], Any],
    world_size: int = 4,
    *,
    numel: int | None = None,
    backend: str = "gloo",
    network: Network | None = None,
    rules: str = "gloo",
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Run:
    """Call `fn(x)` on every rank, with an x whose values carry their origin.

    The contents of the messages are recorded.

    Args:
        fn: takes a tensor, talks to the other ranks, and returns a tensor (or several, or none).
            Copies, sums and means can be followed.
        world_size: the number of ranks, at most 18 (more do not fit into an int64).
        numel: elements of x on each rank; None: 2·world_size, or as many as fit.
        backend: "gloo", "nccl" or "sim".
        network: on sim, the links between the ranks.
        rules: on sim, "gloo" or "nccl", as for launch.
        shape: the shape of x, instead of numel.
        dtype: torch.int64 or torch.float64.

    Returns:
        The Run, whose `animate()` shows whose data each rank holds of each chunk.

    Raises:
        TypeError: fn is not callable.
        ValueError: numel and shape disagree; the world size, shape or dtype is not possible; or the
            values do not fit into the dtype.
    """
    if not callable(fn):
        raise TypeError(
            "watch() takes a function of a tensor, to run on each rank; got a "
            f"{type(fn).__name__}: {fn!r}"
        )
    origin_tensor(0, world_size, 0, dtype)  # raises here, and not on every rank
    if shape is not None and not (
        isinstance(shape, Sequence) and all(isinstance(n, int) and n >= 0 for n in shape)
    ):
        raise ValueError(f"shape={shape!r}: expected a whole number for each dim, such as (2, 3)")
    if numel is None:
        most = min(ELEMENTS_PER_CHUNK * world_size, most_elements(world_size, dtype))
        numel = max(1, most) if shape is None else math.prod(shape)
    size = tuple(shape) if shape is not None else (numel,)
    if math.prod(size) != numel:
        raise ValueError(
            f"shape={size} has {math.prod(size)} elements, but numel={numel}: pass one of them, or "
            "two that agree"
        )
    origin_tensor(0, world_size, numel, dtype)

    def watched() -> Any:
        x = origin_tensor(dist.get_rank(), world_size, numel, dtype)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        with _settings(keep=backend != "sim"):
            return fn(x.to(device).reshape(size))

    on: dict[str, Any] = {"backend": backend, "network": network, "rules": rules}
    run = launch(watched, world_size=world_size, trace="payload", **on)
    run.watched = size
    return run


@contextlib.contextmanager
def _settings(keep: bool) -> Iterator[None]:
    """Make torch fill new memory with NaN or the largest integer inside the block.

    A division of integers gives float64, in which it is exact. With `keep`, the filling of new
    memory is set back afterwards. (On sim the ranks share it, and their process ends after the
    run.)
    """
    before = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    torch.set_default_dtype(torch.float64)
    # (use_deterministic_algorithms does the same, and imports torch._inductor: four seconds)
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        if keep:
            torch.set_deterministic_debug_mode(before[1])
