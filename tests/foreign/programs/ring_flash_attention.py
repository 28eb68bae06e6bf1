"""ring-flash-attention's ring, zigzag and striped attention on CPUs, in a small training loop.

The package calls two functions of flash_attn, which needs a GPU. Here they are written in torch;
the ring, its messages and its sums are the package's own. Its adapter for transformers, which
goes with certain versions of transformers only, is left out.
"""

import math
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn


def scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """(batch, heads, queries, keys) of q and k, which are (batch, time, heads, width)."""
    found = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        found = found.masked_fill(later, -math.inf)
    return found


def _flash_attn_forward(q, k, v, softmax_scale, causal, **_unused):
    found = scores(q, k, softmax_scale, causal)
    out = torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), v.float()).to(q.dtype)
    return out, found.logsumexp(-1), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, **_unused
):
    p = (scores(q, k, softmax_scale, causal) - softmax_lse.unsqueeze(-1)).exp()
    dv.copy_(torch.einsum("bhqk,bqhd->bkhd", p, dout.float()))
    dp = torch.einsum("bqhd,bkhd->bhqk", dout.float(), v.float())
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = p * (dp - delta) * softmax_scale
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k.float()))
    dk.copy_(torch.einsum("bhqk,bqhd->bkhd", ds, q.float()))


def stand_in(name: str, **contents) -> None:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)


stand_in("flash_attn")
stand_in(
    "flash_attn.flash_attn_interface",
    _flash_attn_forward=_flash_attn_forward,
    _flash_attn_backward=_flash_attn_backward,
    _flash_attn_varlen_forward=None,
    _flash_attn_varlen_backward=None,
)
stand_in(
    "ring_flash_attn.adapters", substitute_hf_flash_attn=None, update_ring_flash_attn_params=None
)

from ring_flash_attn import (  # noqa: E402
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)

ATTENTIONS = {
    "ring": ring_flash_attn_qkvpacked_func,
    "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
    "stripe": stripe_flash_attn_qkvpacked_func,
}


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, attention in ATTENTIONS.items():
        torch.manual_seed(0)
        qkv = nn.Linear(16, 3 * 16)
        x, target = torch.randn(2, 2, 16 * size, 16).chunk(size, dim=2)[rank]
        optimizer = torch.optim.SGD(qkv.parameters(), lr=0.5)
        for step in range(4):
            optimizer.zero_grad()
            # in float32 its backward writes into a buffer that it is still sending
            out = attention(qkv(x).view(2, 16, 3, 4, 4).bfloat16(), causal=True)
            loss = (out.float().flatten(2) - target).square().mean()
            loss.backward()
            for parameter in qkv.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            print(f"{name} rank {rank} step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
