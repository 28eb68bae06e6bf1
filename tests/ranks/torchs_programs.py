"""Programs of torch alone, as others write them: DDP, FSDP2, DTensor and
torch.distributed.pipelining, on two ranks in float64. (DDP's hooks: test_signatures.py.)

Each returns what the rank ends with. This module imports nothing of parallel101, so that plain
ranks, which this file starts when it is run as a script, know nothing of it:

    python -m tests.ranks.torchs_programs FOLDER   ──▶   FOLDER/0.pt, FOLDER/1.pt
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS = 2


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: nn.Module, net: nn.Module, batch: Any, steps: int = 2) -> list[Tensor]:
    """Weights and gradients of `net` after some steps on this rank's batches, through its
    wrapper `model`.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    found = [whole(p) for p in net.parameters()]
    return found + [whole(p.grad).to_dense() for p in net.parameters() if p.grad is not None]


def own(step: int) -> Tensor:
    return randn(10 * step + dist.get_rank(), 3, 4)


# ── Data parallel


def ddp(**options: Any) -> list[Tensor]:
    net = mlp()
    return trained(DDP(net, bucket_cap_mb=1e-4, **options), net, own)


def ddp_sparse() -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1)).double()
    rows = lambda step: torch.tensor([dist.get_rank(), step, 7 - step, step])  # noqa: E731
    return trained(DDP(net), net, rows)


def channels_last() -> list[Tensor]:
    torch.manual_seed(0)
    last = {"memory_format": torch.channels_last}
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)).double().to(**last)
    batch = lambda step: randn(10 * step + dist.get_rank(), 2, 2, 6, 6).to(**last)  # noqa: E731
    found = trained(DDP(net), net, batch)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        dist.broadcast(p.data, 1)
    return found + [p.detach() for p in net.parameters()] + [p.grad for p in net.parameters()]


# ── FSDP2 and DTensor


def fsdp2(**options: Any) -> list[Tensor]:
    net = mlp()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), **options)
    return trained(net, net, own)


def sequence_parallel() -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)
    ).double()
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(),
    }
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(net, mesh, plan)
    whole, parts = Replicate(), Shard(1)
    for style in (
        PrepareModuleInput(input_layouts=whole, desired_input_layouts=parts),
        PrepareModuleOutput(output_layouts=parts, desired_output_layouts=whole),
    ):
        parallelize_module(net, mesh, style)
    return trained(net, net, lambda step: randn(step, 2, 6, 4))


def parallel_loss() -> list[Tensor]:
    """The classes of the cross entropy are cut over the ranks. loss_parallel() is a switch of
    the whole process.
    """
    net = mlp()
    plan = {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(net, init_device_mesh("cpu", (RANKS,)), plan)
    with loss_parallel():
        F.cross_entropy(net(randn(1, 3, 4)), torch.tensor([0, 1, 3])).backward()
    return [whole(p.grad) for p in net.parameters()]


def dtensor() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    a, b = randn(1, 7, 6), randn(2, 6, 5)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    return [
        product.redistribute(mesh, [Shard(0)]).full_tensor(),
        product.redistribute(mesh, [Shard(1)]).full_tensor(),
    ]


# ── torch.distributed.pipelining


def pipelined(kind: type) -> list[Tensor]:
    rank, microbatches, name = dist.get_rank(), 4, kind.__name__
    mine: tuple[int, ...] = (rank,)
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        mine = rank, 3 - rank
    elif issubclass(kind, schedules.PipelineScheduleMulti):
        mine = rank, rank + RANKS
    count = len(mine) * RANKS
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(count))
    stages = [PipelineStage(net[stage], stage, count, torch.device("cpu")) for stage in mine]
    schedule = kind(stages if len(mine) > 1 else stages[0], microbatches, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    last = count - 1 in mine
    schedule.step(
        *([randn(1, 8, 4)] if 0 in mine else []),
        target=randn(2, 8, 4) if last else None,
        losses=losses if last else None,
    )
    return losses + [p.grad for p in net.parameters() if p.grad is not None]


PROGRAMS = {
    "DDP": ddp,
    "DDP, static graph": lambda: ddp(static_graph=True),
    "DDP, unused parameters": lambda: ddp(
        find_unused_parameters=True, gradient_as_bucket_view=True
    ),
    "DDP, sparse": ddp_sparse,
    "DDP, channels last": channels_last,
    "FSDP2": fsdp2,
    "FSDP2, kept": lambda: fsdp2(reshard_after_forward=False),
    "FSDP2, float32": lambda: fsdp2(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    ),
    "DTensor": dtensor,
    "sequence parallel": sequence_parallel,
    "loss parallel": parallel_loss,
    **{
        kind.__name__: lambda kind=kind: pipelined(kind)
        for kind in (
            schedules.ScheduleGPipe,
            schedules.ScheduleInterleaved1F1B,
            schedules.ScheduleInterleavedZeroBubble,
            schedules.ScheduleZBVZeroBubble,
            schedules.ScheduleDualPipeV,
        )
    },
}


def run_all(without: Sequence[str] = ()) -> dict[str, list[Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own future
        return {name: program() for name, program in PROGRAMS.items() if name not in without}


def plain_rank(rank: int, folder: str) -> None:
    """One rank of plain torch, as torchrun would start it."""
    assert "parallel101" not in sys.modules
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS
    )
    torch.save(run_all(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=plain_rank, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
