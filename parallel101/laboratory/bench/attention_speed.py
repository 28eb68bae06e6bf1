"""Measures ring attention and Ulysses, forward and backward, against torch's attention.

Equal work: in torch's, each rank computes its share of the heads over the whole time, which sends
nothing. That is as many (query, key) pairs a rank as ring attention computes on average. The ways
take turns, one after the other in each round, and all ranks compute at once.

torch's own context parallel (torch.distributed.tensor.experimental) is measured where it runs. It
has rules for kernels on GPUs; on a CPU it runs with sdpa_kernel(MATH), and without a mask.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import parallel101 as p101
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport, median_and_range
from parallel101.laboratory.bench.process import synchronize

SHAPE = (1, 8, 2048, 64)  # batch, heads, time, width of a head
ROUNDS = 9


class AttentionSide(NamedTuple):
    """One way to compute attention over several ranks."""

    causal: bool
    part: str  # what of q, k, v and the result a rank has: "heads", or a layout of the time
    attend: Callable[..., Tensor]
    around: Callable[[int], Any] = contextlib.nullcontext  # entered before the clock starts


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


@contextlib.contextmanager
def torchs_context_parallel(length: int) -> Iterator[None]:
    """Replace F.scaled_dot_product_attention by torch's context parallel inside the block."""
    from torch.distributed.tensor.experimental import context_parallel

    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    kernel = sdpa_kernel(SDPBackend.MATH) if device == "cpu" else contextlib.nullcontext()
    whole = torch.zeros(1, 1, length, 1)  # without a buffer to cut it raises an error
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[2]), kernel:
        yield


ring, zigzag = p101.ring_attention, partial(p101.ring_attention, layout="zigzag")
SIDES = {
    "torch's, a share of the heads, causal": AttentionSide(True, "heads", torchs),
    "ring attention, contiguous, causal": AttentionSide(True, "contiguous", ring),
    "ring attention, zigzag, causal": AttentionSide(True, "zigzag", zigzag),
    "Ulysses, causal": AttentionSide(True, "contiguous", p101.ulysses_attention),
    # its load balancer cuts the time as zigzag does
    "torch's context parallel, causal": AttentionSide(
        True, "zigzag", torchs, torchs_context_parallel
    ),
    "torch's, a share of the heads, no mask": AttentionSide(False, "heads", torchs),
    "ring attention, no mask": AttentionSide(False, "contiguous", ring),
    "Ulysses, no mask": AttentionSide(False, "contiguous", p101.ulysses_attention),
    "torch's context parallel, no mask": AttentionSide(
        False, "zigzag", torchs, torchs_context_parallel
    ),
}


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    batch, heads, length, width = SHAPE
    report.heading(
        f"Attention over a time that is cut, on {backend} ranks, forward and backward: {batch} "
        f"text of {length} positions, {heads} heads of width {width}, float32"
    )
    reasons: dict[str, str] = {}
    for world_size in (2, 4):
        rounds, failed = p101.launch(
            time_sides, 2 if quick else ROUNDS, world_size=world_size, backend=backend, timeout=600
        ).results[0]
        reasons |= failed
        report.table(
            [f"{world_size} ranks", "ms", "least … most", "/ torch's, a share of the heads"],
            rows(rounds),
        )
    report.sentence(
        "torch's, a share of the heads: each rank computes as many pairs as in the other rows on "
        "average, and sends nothing. Its kernel is fused, as in Ulysses; ring attention and, on a "
        "CPU, torch's context parallel compute plain products. Times are medians, and ratios are "
        "taken round by round, with the row of the same mask."
    )
    for name, reason in reasons.items():
        report.sentence(f"{name} doesn't run here: {reason}")


def rows(rounds: list[dict[str, float]]) -> Iterator[tuple[str, ...]]:
    for name in rounds[0]:
        peer = next(n for n in rounds[0] if SIDES[n].causal == SIDES[name].causal)
        ratio = statistics.median(of_round[name] / of_round[peer] for of_round in rounds)
        middle, spread = median_and_range([of_round[name] * 1e3 for of_round in rounds])
        yield name, middle, spread, f"**{ratio:.2f}**"


# ---- on each rank ----


def time_sides(rounds: int) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Return the seconds of each side in each round, and why a side doesn't run, by its name."""
    torch.manual_seed(0)
    whole = [torch.randn(SHAPE) for _ in range(3)]
    reasons, inputs = {}, {}
    for name, side in SIDES.items():
        inputs[name] = [part_of(x, side.part).contiguous().requires_grad_() for x in whole]
        try:
            timed(side, inputs[name])  # warm up
        except (NotImplementedError, RuntimeError) as error:
            if side.around is not torchs_context_parallel:
                raise
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [
        {name: timed(side, inputs[name]) for name, side in SIDES.items() if name not in reasons}
        for _ in range(rounds)
    ], reasons


def timed(side: AttentionSide, inputs: list[Tensor]) -> float:
    with side.around(SHAPE[2]):
        synchronize()
        began = time.perf_counter()
        y = side.attend(*inputs, causal=side.causal)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        synchronize()
        return time.perf_counter() - began


def part_of(x: Tensor, part: str) -> Tensor:
    """Return this rank's part of a tensor (batch, heads, time, width)."""
    if part == "heads":
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return x[:, :, p101.context_positions(x.shape[2], layout=part, device=x.device)]
