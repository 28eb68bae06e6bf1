"""Keller Jordan's MuonWithAuxAdam, which shares its work among the ranks, in a small data-parallel
loop.

    PYTHONPATH=Muon … muon_steps.py
"""

import torch
import torch.distributed as dist
from muon import MuonWithAuxAdam
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *hidden, nn.Linear(32, 1))
    # as in its README: the hidden matrices by Muon, all else by Adam. gloo's all-gather wants
    # matrices of one shape.
    matrices = [p for p in hidden.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    optimizer = MuonWithAuxAdam(
        [
            {"params": matrices, "lr": 0.02, "momentum": 0.95, "use_muon": True},
            {"params": others, "lr": 1e-2, "use_muon": False},
        ]
    )
    torch.manual_seed(dist.get_rank())
    for step in range(8):
        x = torch.randn(16, 8)
        loss = (net(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
