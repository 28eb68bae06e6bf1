"""A group's own methods, called in each of the ways that torch offers, give the same on plain
gloo, recorded gloo and sim.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

import parallel101 as p101

CALLS = (  # as a program may write them; torch's defaults fill in the rest
    "allreduce([x])",
    "allreduce(x)",
    "allreduce(x, MAX)",
    "allreduce([x], op=MAX)",
    "allreduce(x, MAX, minute)",
    "allreduce([x], of_max)",
    "allreduce(tensors=[x], opts=of_max)",
    "allreduce_coalesced([x, y])",
    "broadcast(x, 2)",
    "broadcast([x])",
    "broadcast(x, root=1)",
    "reduce(x, 1, MAX)",
    "reduce([x])",
    "allgather(row, x)",
    "allgather([row], [x])",
    "allgather(output_tensors=[row], input_tensors=[x])",
    "_allgather_base(wide, x)",
    "gather(row if at1 else [], x, 1)",
    "scatter(x, parts if at1 else [], 1)",
    "reduce_scatter(x, parts)",
    "reduce_scatter(x, parts, MAX)",
    "_reduce_scatter_base(x, torch.cat(parts))",
    "alltoall_base(narrow, torch.cat(parts)[:3], [], [])",
    "barrier()",
    "barrier(timeout=minute)",
    "barrier(opts=dist.BarrierOptions())",
)


def own_methods() -> dict[str, list]:
    """What each call leaves in its tensors."""
    rank, n = dist.get_rank(), dist.get_world_size()
    of_max = dist.AllreduceOptions()
    of_max.reduceOp = dist.ReduceOp.MAX
    names = {"torch": torch, "dist": dist, "group": dist.group.WORLD, "at1": rank == 1}
    names |= {"MAX": dist.ReduceOp.MAX, "of_max": of_max, "minute": timedelta(minutes=1)}
    found = {}
    for call in CALLS:
        given = torch.arange(1.0, 2 * n + 1, dtype=torch.float64) * 10.0**rank
        zeros = torch.zeros(2 * n + 2 * n + n + 2, dtype=torch.float64)
        row, (wide, narrow, y) = [*zeros[: 2 * n].chunk(n)], zeros[2 * n :].split([2 * n, n, 2])
        x, parts = given[:2].clone(), [*given.chunk(n)]
        tensors = {"x": x, "y": y, "row": row, "wide": wide, "narrow": narrow, "parts": parts}
        eval(f"group.{call}", names | tensors).wait()
        if not call.startswith("reduce(") or rank == int(", 1" in call):  # its root
            found[call] = [*x.tolist(), *zeros.tolist()]
    return found


def hooked() -> dict:
    """The parameters of a model that DDP trained for three steps with each of its hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    group = dist.group.WORLD

    def own_allreduce(state, bucket):
        work = state.allreduce([bucket.buffer().div_(state.size())])
        return work.get_future().then(lambda future: future.value()[0])

    def own_allgather(state, bucket):
        rows = [torch.empty_like(bucket.buffer()) for _ in range(state.size())]
        work = state.allgather([rows], [bucket.buffer()])
        return work.get_future().then(lambda future: torch.stack(rows).mean(0))

    hooks = {
        own_allreduce: group,
        own_allgather: group,
        powerSGD_hook.powerSGD_hook: powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2
        ),
        "torch's C++ hook": None,
    }
    trained = {}
    for hook, state in hooks.items():
        torch.manual_seed(1)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).double())
        if state is None:
            net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        else:
            net.register_comm_hook(state, hook)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
            net.zero_grad()
            net(x).square().mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
        trained[getattr(hook, "__name__", hook)] = [p.flatten().tolist() for p in net.parameters()]
    return trained


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
    return own_methods(), hooked(), refused()


def test_a_groups_own_methods_and_hooks_that_use_them_give_the_same_in_all_worlds():
    worlds = {"gloo": {}, "recorded": {"trace": True}, "sim": {"backend": "sim"}}
    gloo, *others = (p101.launch(program, world_size=3, **o).results for o in worlds.values())
    assert gloo[0][0]["allreduce([x])"][:2] == [111.0, 222.0]
    assert gloo[0][0]["broadcast(x, 2)"][:2] == [100.0, 200.0]
    assert gloo[0][2] == ["broadcast", "allreduce", "allgather", "reduce"]
    for theirs in others:
        for (methods, hooks, names), (own, by_hook, said) in zip(theirs, gloo, strict=True):
            assert (methods, names) == (own, said)
            # gloo adds in another order than sim
            torch.testing.assert_close(hooks, by_hook, rtol=1e-12, atol=1e-12)
