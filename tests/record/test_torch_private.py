"""torch still has the private parts that this project relies on.

Each failure says what has moved, and what needs it.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.simulate import simulate


def moved(what: str, whose: str) -> str:
    return (
        f"torch {torch.__version__} moved {what}: record/torch_private.py, which {whose} needs, "
        "must follow"
    )


def test_a_rank_world_has_the_attributes_of_torchs_own():
    theirs = {name for name in vars(c10d._World) if not name.startswith("_")}
    ours = set(vars(torch_private.RankWorld())) | {"pg_config_info"}
    assert theirs | {"pg_flight_recorder_hooks"} == ours, moved(
        f"c10d._World (RankWorld differs in {sorted(theirs ^ ours)})", "sim"
    )


def test_torch_reads_its_world_at_each_use():
    asked: list = []

    class Group(dist.ProcessGroup):
        def new_group(self, ranks, **options):
            asked.append((ranks, options["group_name"]))

    world, group = torch_private.RankWorld(), Group(0, 3)
    before = torch_private.use_world(world)
    torch_private.name_groups_by_thread(True)
    try:
        world.add_default(group, "0", "sim", dist.HashStore(), 3)
        seen = dist.is_initialized(), dist.group.WORLD is group, dist.get_backend()
        ranks = dist.get_process_group_ranks(group)
        assert (*seen, ranks) == (True, True, "sim", [0, 1, 2]), moved(
            "c10d._world, or what init_process_group puts in it", "sim"
        )
        assert c10d._resolve_process_group("0") is group, moved(
            "_register_process_group", "sim's functional collectives"
        )
        # dist.new_group asks the default group for the new one
        assert dist.new_group([2, 1]) is dist.GroupMember.NON_GROUP_MEMBER
        assert asked == [([1, 2], "1")], moved("ProcessGroup.new_group", "sim's sub-groups")
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(c10d._resolve_process_group, "0").exception()
        assert isinstance(elsewhere, RuntimeError), moved(
            "_set_thread_isolation_mode", "sim, where each rank has a group '0',"
        )
    finally:
        torch_private.forget_groups()
        torch_private.name_groups_by_thread(False)
        assert torch_private.use_world(before) is world


def test_every_wait_for_an_unfinished_future_is_seen():
    calls: list[str] = []
    future: torch.futures.Future = torch.futures.Future()

    def set_it(done) -> None:
        calls.append("wait")
        assert not done()
        future.set_result(1)
        assert done()

    with torch_private.ahead_of_futures(set_it, lambda: calls.append("ask")):
        both = torch.futures.collect_all([future, future.then(lambda f: f.value() + 1)])
        seen = both.done(), [f.wait() for f in both.wait()], future.wait()
    assert seen == (False, [1, 2], 1) and calls == ["ask", "wait"], moved(
        "torch._C.Future, or how torch.futures waits", "sim"
    )
    assert not torch.futures.Future().done() and calls == ["ask", "wait"]


def test_a_callback_at_the_end_of_a_backward():
    called: list[str] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            assert torch_private.after_backward(lambda: called.append("end"))
            called.append("backward")
            return grad

    assert not torch_private.after_backward(lambda: called.append("never"))
    Ask.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert called == ["backward", "end"], moved("_execution_engine.queue_callback", "DDP on sim")


def test_two_ranks_of_a_process_inside_loss_parallel():
    import torch.distributed.tensor.parallel.loss as loss

    handlers = loss.DTensor._op_dispatcher._custom_op_handlers
    torch_private.count_loss_parallel()
    first, second, seen = ExitStack(), ExitStack(), []
    for rank, step in ((first, "enter"), (second, "enter"), (first, "leave"), (second, "leave")):
        rank.enter_context(loss.loss_parallel()) if step == "enter" else rank.close()
        seen.append(loss.customized_loss_ops.keys() <= handlers.keys())
    assert seen == [True, True, True, False], moved("loss_parallel", "sim")


def test_a_draw_changes_the_generators_memory():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    look = torch_private.generator_memory()
    assert look is not None, moved(
        "the CPU generator's memory", "sim (which is only slower without)"
    )
    assert torch.equal(torch.rand(3), expected), "looking changed the state"
    seen = look()
    assert look() == seen
    torch.rand(1)
    assert look() != seen


def test_device_mesh_describes_the_group_of_each_axis():
    def axes(rank):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        return [torch_private.mesh_axis(mesh.get_group(name)) for name in ("dp", "cp", "tp")]

    found = simulate(axes, 4).results[0]
    assert found == ["dp", "cp", "tp"], moved("DeviceMesh's group_desc", "event.group.axis")


def test_a_group_in_python_has_one_device_and_is_its_backend(tmp_path):
    """torch asks for the device types in monitored_barrier and async_save, and for the backend
    in batch_isend_irecv.
    """

    def program(folder):
        import torch.distributed.checkpoint as checkpoint

        world, cpu = dist.group.WORLD, torch.device("cpu")
        rank, received = dist.get_rank(), torch.empty(2)
        ops = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if dist.get_backend() == "gloo":
            dist.monitored_barrier()
            # from a thread, which sim refuses
            checkpoint.async_save({"x": torch.ones(2)}, checkpoint_id=folder).result()
        return received.tolist(), world._device_types == [cpu], world._get_backend(cpu) is world

    for backend in ("gloo", "sim"):
        run = p101.launch(program, str(tmp_path / backend), world_size=2, backend=backend)
        expected = [([1.0, 1.0], True, True), ([0.0, 0.0], True, True)]
        assert run.results == expected, moved(
            "how a group's devices and backends are asked for", "batch_isend_irecv"
        )


def test_torchs_functions_can_be_replaced_wherever_they_are_known():
    functions = {
        f: (f.__code__, f.__closure__)
        for f in (dist.init_process_group, dist.destroy_process_group, dist.batch_isend_irecv)
    }
    for function, own in functions.items():
        with torch_private.called_instead(
            function, lambda original: lambda *args, **kwargs: (original.__name__, args, kwargs)
        ):
            called = function(1, b=2)
        assert called == (function.__name__, (1,), {"b": 2}), moved(
            f"{function.__name__} or its decorator", "init_process_group in a launch"
        )
        assert (function.__code__, function.__closure__) == own


def test_a_running_batch_is_found():
    seen = []

    class Group(torch_private.PythonGroup):
        ranks, torch_name = [0, 1], "0"

        def send(self, *_):
            seen.append(torch_private.running_batch(sys._getframe(1)))

    def program(rank):
        group = Group(rank, 2)
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        messages = [dist.P2POp(dist.isend, torch.ones(1), 1, group) for _ in range(3)]
        dist.batch_isend_irecv(messages)
        dist.isend(torch.ones(1), 1, group)

    assert simulate(program, 1).error is None
    *batch, alone = seen
    call = batch[0][0]
    assert call is not None and batch == [(call, 3)] * 3 and alone == (None, 0), moved(
        "batch_isend_irecv, its argument p2p_op_list, or how it calls isend and irecv",
        "sim with rules='nccl'",
    )


def test_optimizers_on_meta():
    weight = torch.empty(4, 4, device="meta", requires_grad=True)
    weight.grad = torch.empty_like(weight)
    with torch_private.optimizers_as_on_a_gpu():
        torch.optim.AdamW([weight], fused=True).step()
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError:
        return
    raise AssertionError(moved("_get_fused_kernels_supported_devices", "virtual GPUs"))


def test_what_weights_only_makes():
    made = torch_private.made_by_weights_only()
    expected = {"torch._utils._rebuild_parameter", "torch.float32", "collections.OrderedDict"}
    assert expected <= made.keys(), moved("_get_allowed_globals", "a job's ranks")
    assert "torch.storage._load_from_bytes" not in made, "it unpickles"
