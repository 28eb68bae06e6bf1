"""torch's own DDP and differentiable collectives run unchanged on the sim, with the results of one
process or of gloo. (FSDP2, DTensor and pipelining: tests/ranks/test_torchs_programs.py.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101

from .programs import run, trace


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    ).double()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def train(net: torch.nn.Module, share) -> None:
    """Two steps of gradient descent; the loss is the mean square of the output."""
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
@pytest.mark.parametrize("way", ["plain", "hook", "static graph"])
def test_torchs_data_parallel_gives_what_one_process_does(n, way):
    def program(rank):
        net = torch.nn.parallel.DistributedDataParallel(
            model(), bucket_cap_mb=0.0001, static_graph=way == "static graph"
        )
        if way == "hook":  # a communication hook written in Python
            net.register_comm_hook(
                None,
                lambda _, bucket: (
                    dist.all_reduce(bucket.buffer().div_(n), async_op=True)
                    .get_future()
                    .then(lambda f: f.value()[0])
                ),
            )
        train(net, lambda m: m(batch(rank)).square().mean())
        return [p.detach() for p in net.parameters()]

    result = run(program, n)
    assert any(
        e.kind == "all_reduce" and e.where.startswith(__file__) for e in trace(result).events
    )
    for parameters in result.results:
        for ours, theirs in zip(parameters, one_process(n), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def differentiable_collectives():
    """The results of each of torch.distributed.nn's functions, and the gradients of its inputs."""
    import warnings

    import torch.distributed.nn.functional as functional  # on each rank, as programs do

    warnings.simplefilter("ignore", FutureWarning)  # torch is going to rename them
    p, rank = dist.get_world_size(), dist.get_rank()

    def given(salt: int) -> torch.Tensor:
        return torch.randn(
            p, generator=torch.Generator().manual_seed(10 * rank + salt), dtype=torch.float64
        )

    def room() -> list[torch.Tensor]:
        return [torch.zeros(p, dtype=torch.float64) for _ in range(p)]

    calls = {
        "broadcast": lambda *x: functional.broadcast(x[0], 1),
        "gather": lambda *x: functional.gather(x[0], 1),
        "scatter": lambda *x: functional.scatter(list(x), 1),
        # on other ranks the result is undefined
        "reduce": lambda *x: functional.reduce(x[0], 1) * (rank == 1),
        "reduce_scatter": lambda *x: functional.reduce_scatter(room()[0], list(x)),
        "all_gather": lambda *x: functional.all_gather(x[0]),
        "all_to_all": lambda *x: functional.all_to_all(room(), list(x)),
        "all_to_all_single": lambda *x: functional.all_to_all_single(room()[0], x[0]),
        "all_reduce": lambda *x: functional.all_reduce(x[0]),
    }
    found = {}
    for name, call in calls.items():
        x = [given(i).requires_grad_() for i in range(p)]
        results = call(*x)
        results = results if isinstance(results, tuple) else (results,)
        sum((y * given(i)).sin().sum() for i, y in enumerate(results)).backward()
        found[name] = (
            [t.tolist() for t in results],
            [None if t.grad is None else t.grad.tolist() for t in x],
        )
    return found


def test_torchs_differentiable_collectives_give_what_they_do_on_gloo():
    gloo, sim = (
        p101.launch(differentiable_collectives, world_size=2, backend=backend).results
        for backend in ("gloo", "sim")
    )
    assert sim == gloo  # bit for bit, as the sum of two values does not depend on their order
