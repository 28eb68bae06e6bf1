"""A group's own methods, called in each of the ways that torch offers, give the same on plain
gloo, recorded gloo and sim.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

import parallel101 as p101


def own_methods() -> dict:
    """What each call leaves in its tensors.

    Each is written as a program may write it; torch's defaults fill in the rest.
    """
    g, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    minute = timedelta(minutes=1)

    def x(numel=2):
        return torch.arange(1.0, numel + 1, dtype=torch.float64) * 10.0**rank

    def row(numel=2):
        return [torch.zeros(numel, dtype=torch.float64) for _ in range(n)]

    of_max = dist.AllreduceOptions()
    of_max.reduceOp = dist.ReduceOp.MAX

    def cut():
        return list(x(2 * n).chunk(n))

    MAX, at1 = dist.ReduceOp.MAX, rank == 1
    narrow, wide = (torch.zeros(size, dtype=torch.float64) for size in (n, 2 * n))
    calls = {
        "allreduce([x])": lambda t, r: (g.allreduce([t]), t),
        "allreduce(x)": lambda t, r: (g.allreduce(t), t),
        "allreduce(x, MAX)": lambda t, r: (g.allreduce(t, MAX), t),
        "allreduce([x], op=MAX)": lambda t, r: (g.allreduce([t], op=MAX), t),
        "allreduce(x, MAX, timeout)": lambda t, r: (g.allreduce(t, MAX, minute), t),
        "allreduce([x], opts)": lambda t, r: (g.allreduce([t], of_max), t),
        "allreduce(tensors=…, opts=…)": lambda t, r: (g.allreduce(tensors=[t], opts=of_max), t),
        "allreduce_coalesced([x, y])": lambda t, r: (g.allreduce_coalesced([t, r[0]]), t, r[0]),
        "broadcast(x, 2)": lambda t, r: (g.broadcast(t, 2), t),
        "broadcast([x])": lambda t, r: (g.broadcast([t]), t),
        "broadcast(x, root=1)": lambda t, r: (g.broadcast(t, root=1), t),
        "reduce(x, 1, MAX)": lambda t, r: (g.reduce(t, 1, MAX), *[t][:at1]),
        "reduce([x])": lambda t, r: (g.reduce([t]), *[t][: rank == 0]),
        "allgather(list, x)": lambda t, r: (g.allgather(r, x()), *r),
        "allgather([list], [x])": lambda t, r: (g.allgather([r], [x()]), *r),
        "allgather(output_tensors=…)": lambda t, r: (
            g.allgather(output_tensors=[r], input_tensors=[x()]),
            *r,
        ),
        "_allgather_base": lambda t, r: (g._allgather_base(wide, x()), wide),
        "gather(list, x, 1)": lambda t, r: (g.gather(r[: n * at1], x(), 1), *r[: n * at1]),
        "scatter(x, list, 1)": lambda t, r: (g.scatter(t, cut() if at1 else [], 1), t),
        "reduce_scatter(x, list)": lambda t, r: (g.reduce_scatter(t, cut()), t),
        "reduce_scatter(x, list, MAX)": lambda t, r: (g.reduce_scatter(t, cut(), MAX), t),
        "_reduce_scatter_base": lambda t, r: (g._reduce_scatter_base(t, x(2 * n)), t),
        "alltoall_base": lambda t, r: (g.alltoall_base(narrow, x(n), [], []), narrow),
        "barrier()": lambda *_: (g.barrier(),),
        "barrier(timeout=…)": lambda *_: (g.barrier(timeout=minute),),
        "barrier(opts=…)": lambda *_: (g.barrier(opts=dist.BarrierOptions()),),
    }
    found = {}
    for name, call in calls.items():
        work, *tensors = call(x(), row())
        work.wait()
        found[name] = [t.tolist() for t in tensors]  # of a reduce, only the root has a result
    return found


def hooked(hook: str):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(1)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).double(), bucket_cap_mb=1)
    group = dist.group.WORLD

    def own_method(state, bucket):
        work = state.allreduce([bucket.buffer().div_(state.size())])
        return work.get_future().then(lambda future: future.value()[0])

    def gathers(state, bucket):
        rows = [torch.empty_like(bucket.buffer()) for _ in range(state.size())]
        return (
            state.allgather([rows], [bucket.buffer()])
            .get_future()
            .then(lambda future: torch.stack(rows).mean(0))
        )

    hooks = {
        "its own allreduce": lambda: net.register_comm_hook(group, own_method),
        "its own allgather": lambda: net.register_comm_hook(group, gathers),
        "torch's C++ hook": lambda: net._register_builtin_comm_hook(
            dist.BuiltinCommHookType.ALLREDUCE
        ),
        "torch's powerSGD": lambda: net.register_comm_hook(
            powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    hooks[hook]()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return [p.flatten().tolist() for p in net.parameters()]


HOOKS = ["its own allreduce", "its own allgather", "torch's powerSGD", "torch's C++ hook"]


def refused() -> list[str]:
    """The names of the methods in the errors about arguments that they do not take."""
    g, x, said = dist.group.WORLD, torch.ones(2), []
    for call in (
        lambda: g.broadcast(x, 0, dist.ReduceOp.SUM, 1),
        lambda: g.allreduce(x, root=1),
        lambda: g.allgather([x]),
        g.reduce,
    ):
        try:
            call()
        except TypeError as error:
            said.append(str(error).partition("(")[0])
    return said


def program():
    return own_methods(), {hook: hooked(hook) for hook in HOOKS}, refused()


def test_a_groups_own_methods_and_hooks_that_use_them_give_the_same_in_all_worlds():
    worlds = {"gloo": {}, "recorded": {"trace": True}, "sim": {"backend": "sim"}}
    gloo, *others = (p101.launch(program, world_size=3, **o).results for o in worlds.values())
    assert gloo[0][0]["allreduce([x])"] == [[111.0, 222.0]]
    assert gloo[0][0]["broadcast(x, 2)"] == [[100.0, 200.0]]
    assert gloo[0][2] == ["broadcast", "allreduce", "allgather", "reduce"]
    for theirs in others:
        for (methods, hooks, names), (own, by_hook, said) in zip(theirs, gloo, strict=True):
            assert (methods, names) == (own, said)
            # gloo adds in another order than sim
            torch.testing.assert_close(hooks, by_hook, rtol=1e-12, atol=1e-12)
