"""Measures ring attention and Ulysses, forward and backward, against torch's attention.

Equal work: in torch's, each rank computes its share of the heads over the whole time, which sends
nothing. That is as many (query, key) pairs a rank as ring attention computes on average.

torch's own context parallel (torch.distributed.tensor.experimental) has rules for kernels on GPUs;
on a CPU it runs with sdpa_kernel(MATH), and without a mask.
"""

from __future__ import annotations

import contextlib
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
from parallel101.laboratory.bench.comparison import Benchmark, Work

SHAPE = (1, 8, 2048, 64)  # batch, heads, time, width of a head


class AttentionSide(NamedTuple):
    """One way to compute attention over several ranks."""

    part: str  # what of q, k, v and the result a rank has: "heads", or a layout of the time
    attend: Callable[..., Tensor]
    around: Callable[[int], Any] = contextlib.nullcontext


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


ZIGZAG = partial(p101.ring_attention, layout="zigzag")
PEER = "torch's, a share of the heads"
SIDES = {
    PEER: AttentionSide("heads", torchs),
    "ring attention": AttentionSide("contiguous", p101.ring_attention),
    "ring attention, zigzag": AttentionSide("zigzag", ZIGZAG),
    "Ulysses": AttentionSide("contiguous", p101.ulysses_attention),
    # its load balancer cuts the time as zigzag does
    "torch's context parallel": AttentionSide("zigzag", torchs, torchs_context_parallel),
}


def part_of(x: Tensor, part: str) -> Tensor:
    """Return this rank's part of a tensor (batch, heads, time, width)."""
    if part == "heads":
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return x[:, :, p101.context_positions(x.shape[2], layout=part, device=x.device)]


def attention(side: AttentionSide, causal: bool) -> Work | None:
    """Return forward and backward of a side; None where it has no rule for the mask."""
    if causal and side.around is torchs_context_parallel and dist.get_backend() != "nccl":
        return None
    torch.manual_seed(0)
    whole = [torch.randn(SHAPE) for _ in range(3)]
    inputs = [part_of(x, side.part).contiguous().requires_grad_() for x in whole]

    def work() -> None:
        with side.around(SHAPE[2]):
            y = side.attend(*inputs, causal=causal)
            torch.autograd.grad(y, inputs, torch.ones_like(y))

    return work


ATTENTION = [
    Benchmark(
        f"Attention over a time that is cut, on {{}}, forward and backward, {mask}: {SHAPE[0]} "
        f"text of {SHAPE[2]} positions, {SHAPE[1]} heads of width {SHAPE[3]}, float32",
        {name: partial(attention, side, mask == "causal") for name, side in SIDES.items()},
        {f"/ {PEER}": PEER},
        note=f"{PEER}: each rank computes as many pairs as in the other rows on average, and sends "
        "nothing. Its kernel is fused, as in Ulysses; ring attention computes plain products. So "
        "does torch's context parallel on a CPU, where it has no causal mask.",
    )
    for mask in ("causal", "no mask")
]
