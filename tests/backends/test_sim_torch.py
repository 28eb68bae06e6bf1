"""Torch's own DDP, FSDP2 and DTensor run unchanged on the sim, and give what one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .programs import run, trace


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def train(net: torch.nn.Module, share) -> None:
    """Two steps of gradient descent on the mean square of the output."""
    for _ in range(2):
        net.zero_grad()
        share(net).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad


def one_process(n: int) -> list[torch.Tensor]:
    net = model()
    train(net, lambda m: sum(m(batch(r)).square().mean() for r in range(n)) / n)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("hook", [False, True])
def test_torchs_data_parallel_gives_what_one_process_does(n, hook):
    def program(rank):
        net = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0001)
        if hook:  #  a communication hook of the program's own, in Python
            net.register_comm_hook(
                None, lambda _, bucket: dist.all_reduce(bucket.buffer().div_(n), async_op=True).get_future().then(lambda f: f.value()[0])
            )
        train(net, lambda m: m(batch(rank)).square().mean())
        return [p.detach() for p in net.parameters()]

    outcome = run(program, n)
    assert any(e.kind == "all_reduce" and e.where.startswith(__file__) for e in trace(outcome).events)
    for parameters in outcome.results:
        for ours, theirs in zip(parameters, one_process(n), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_fully_shard_gives_what_one_process_does(n):
    from torch.distributed.fsdp import fully_shard

    def program(rank):
        mesh = init_device_mesh("cpu", (n,))
        net = model()
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
        train(net, lambda m: m(batch(rank)).square().mean())
        return [p.full_tensor().detach() for p in net.parameters()]

    outcome = run(program, n)
    assert {"all_gather", "reduce_scatter"} <= {e.kind for e in trace(outcome).events}
    for parameters in outcome.results:
        for ours, theirs in zip(parameters, one_process(n), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_dtensor(n):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def program(rank):
        gen = torch.Generator().manual_seed(1)
        a, b = torch.randn(7, 6, generator=gen, dtype=torch.float64), torch.randn(6, 5, generator=gen, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (n,))
        product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        torch.testing.assert_close(product.redistribute(mesh, [Shard(0)]).full_tensor(), a @ b)
        rows = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
        torch.testing.assert_close(rows.full_tensor(), a @ b)

    assert {"reduce_scatter", "all_gather"} <= {e.kind for e in trace(run(program, n)).events}
