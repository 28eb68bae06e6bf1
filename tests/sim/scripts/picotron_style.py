"""In the style of picotron: layers and communications that look up `pgm.process_group_manager`
whenever they run.
"""

from __future__ import annotations

import os

import process_group_manager as pgm
import torch
import torch.distributed as dist
from torch import nn

STEP, VERBOSE = 0, os.environ.get("VERBOSE", "0") == "1"


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=pgm.process_group_manager.groups["tp"])
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=pgm.process_group_manager.groups["tp"])
        return grad


class Block(nn.Module):
    """Columns, then rows, of a two-layer perceptron."""

    def __init__(self, stage: int):
        super().__init__()
        m = pgm.process_group_manager
        gen = torch.Generator().manual_seed(stage)
        up, down = (torch.randn(4, 4, generator=gen, dtype=torch.float64) for _ in range(2))
        tp = dist.get_world_size(m.groups["tp"])
        self.up, self.down = (
            nn.Parameter(x.chunk(tp, dim)[m.tp_rank].clone()) for x, dim in ((up, 1), (down, 0))
        )

    def forward(self, x):
        return Reduce.apply(torch.tanh(Copy.apply(x) @ self.up) @ self.down)


def communicate(operation: str, tensor: torch.Tensor | None = None) -> torch.Tensor | None:
    global STEP
    m = pgm.process_group_manager
    receiving = operation.startswith("recv")
    peer = m.pp_next_rank if operation in ("recv_backward", "send_forward") else m.pp_prev_rank
    if peer is None:
        return None
    if receiving:
        tensor = torch.empty(2, 4, dtype=torch.float64, requires_grad=True)
    assert tensor is not None
    op = dist.P2POp(dist.irecv if receiving else dist.isend, tensor, peer)
    for work in dist.batch_isend_irecv([op]):
        work.wait()
    STEP += 1
    return tensor if receiving else None


def train(tp_size: int, pp_size: int, dp_size: int) -> tuple[float | None, list[list[float]], int]:
    """Two steps: the last loss (on the last stage), this rank's weights, and how many messages
    it sent and received.
    """
    pgm.setup_process_group_manager(tp_size, pp_size, dp_size)
    m = pgm.process_group_manager
    block, loss = Block(m.pp_rank), None
    for step in range(2):
        block.zero_grad()
        x = torch.randn(
            2,
            4,
            generator=torch.Generator().manual_seed(10 * step + m.dp_rank),
            dtype=torch.float64,
        )
        received = communicate("recv_forward")
        y = block(x if received is None else received)
        communicate("send_forward", y.detach())
        grad = communicate("recv_backward")
        if grad is None:
            loss = y.square().mean()
            loss.backward()
        else:
            y.backward(grad)
        if received is not None:
            communicate("send_backward", received.grad)
        with torch.no_grad():
            for p in block.parameters():
                dist.all_reduce(p.grad, group=m.groups["dp"])
                p -= 0.1 * p.grad / dp_size
    return (
        None if loss is None else loss.item(),
        [p.flatten().tolist() for p in block.parameters()],
        STEP,
    )
