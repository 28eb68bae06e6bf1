"""Everything in this project that uses a private part of torch, and nothing else.

Each function says what it relies on. If torch changes that, tests/record/test_torch_private.py
fails and says which function is affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import string_at
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

import torch
import torch._weights_only_unpickler
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.utils.deterministic
from torch.utils import _python_dispatch

from parallel101.spans import axis_described


def name_backend(name: str) -> None:
    """Make `dist.get_backend()` return `name` for every group.

    Programs choose their device by it, and know "gloo", not our wrapper.

    Relies on `_world.pg_map`: group -> (backend's name, store).
    """
    groups = c10d._world.pg_map
    for group, (_, store) in list(groups.items()):
        groups[group] = (name, store)


def mesh_axis(group: dist.ProcessGroup) -> str | None:
    """Return the name of the mesh axis for which DeviceMesh made this group, or None.

    Relies on DeviceMesh describing the group of axis "tp" as "mesh_tp". (For an axis that is the
    whole world it uses the default group.)
    """
    return axis_described(group.group_desc)


def describe_group(group: dist.ProcessGroup, description: str | None) -> None:
    """Give a group the description that `new_group` was called with.

    Relies on `_set_group_desc`.
    """
    if description is not None:
        group._set_group_desc(description)


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Give torch's own backend another time limit.

    Relies on `_set_default_timeout`, as torch's `_set_pg_timeout` does.
    """
    backend._set_default_timeout(timeout)


class PythonGroup(dist.ProcessGroup):
    """A process group written in Python.

    It tells torch its one device, and is that device's backend itself.

    So everything goes through its own methods, also what torch sends by the backend of a device.
    Relies on torch asking for `_device_types` (monitored_barrier, async_save) and
    `_get_backend(device)` (batch_isend_irecv; torch 2.14's `get_backend`) in Python.
    """

    ranks: list[int]  # of the world, in order
    torch_name: str  # under which torch knows the group
    device_type = "cpu"
    takes_meta = False  # whether it sends tensors of the meta device, too
    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.device_type)]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind != self.device_type and not (kind == "meta" and self.takes_meta):
            # as torch says it
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self

    get_backend = _get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def name(self) -> str:
        return self.getBackendName()  # type: ignore[attr-defined]  # which each group defines

    def size(self) -> int:
        return len(self.ranks)

    # DDP, FSDP2 and the functional collectives look a group up by its name
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.torch_name

    def _set_group_name(self, name: str) -> None:
        self.torch_name = name

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""

    def abort(self) -> None:
        """Do nothing: there is nothing to close."""


def leave_out_of_flight_recorder(backend: str) -> None:
    """Keep torch's flight recorder from groups of this backend, which are written in Python.

    Since 2.15, torch attaches it to every group, but it looks for the group's name in C++. Relies
    on `_FR_SELF_RECORDING_BACKENDS`, which older versions don't have.
    """
    backends: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    backends.add(backend)


def made_by_weights_only() -> dict[str, Any]:
    """Return what `torch.load(weights_only=True)` makes: classes and functions, by full name.

    Relies on `torch._weights_only_unpickler._get_allowed_globals`.
    """
    names: dict[str, Any] = torch._weights_only_unpickler._get_allowed_globals()
    return names


def fill_new_tensors() -> None:
    """Make torch.empty return NaN, or the largest integer, from now on.

    So memory which was never written can be recognized. Relies on `_set_deterministic_algorithms`.
    (The public function imports torch's compiler as well, which takes 2 seconds.)
    """
    # an operation without a deterministic version only warns
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def called_instead(
    function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let each call of torch's `function` call `make(original)`, inside the block.

    This also holds if it was imported by name, before or inside. So the function itself is changed,
    not the attributes of modules that refer to it. Relies on its being a Python function without a
    closure, apart from decorators that note it as `__wrapped__` (as `_exception_logger` does).
    """
    function = inspect.unwrap(function)
    code, instead = function.__code__, f"_instead_of_{function.__name__}"
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    function.__globals__[instead] = make(functools.update_wrapper(original, function))
    defined: dict[str, Any] = {}
    source = f"def {function.__name__}(*args, **kwargs): return {instead}(*args, **kwargs)"
    exec(compile(source, __file__, "exec"), defined)  # a file of ours, so no program line
    function.__code__ = defined[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code
        del function.__globals__[instead]


def running_batch(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the frame of the `batch_isend_irecv` to which `frame` belongs, and its messages.

    These are how many it posts in all. Outside a batch: None and 0.

    `frame` is the caller of a group's send or recv. For a process group written in Python, torch
    posts the messages of a batch one by one, and does not say where it begins. Relies on isend and
    irecv being called by `batch_isend_irecv` (with at most a few frames between) and on its
    argument `p2p_op_list`.
    """
    code = inspect.unwrap(c10d.batch_isend_irecv).__code__
    for _ in range(6):
        if frame is None:
            break
        if frame.f_code is code:
            return frame, len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return None, 0


class RankWorld:
    """The state that torch keeps once per process: the default group, and all groups.

    It has their names and ranks too. On sim, each rank has its own. Relies on torch reading
    `c10d._world` at each use, and on these being all its attributes (`c10d._World`).
    """

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict = {}
        self.pg_names: dict = {}
        self.pg_group_ranks: dict = {}
        self.pg_backend_config: dict = {}
        self.group_count = 0
        self.tags_to_pg: dict = {}
        self.pg_to_tag: dict = {}
        self.pg_coalesce_state: dict = {}
        self.comms: list = []
        self.pg_flight_recorder_hooks: dict = {}  # since torch 2.15

    pg_config_info = c10d._World.pg_config_info

    def add_default(
        self, group: dist.ProcessGroup, name: str, backend: str, store: dist.Store, size: int
    ) -> None:
        """Make `group` the default group, as init_process_group does.

        Call it on the rank's own thread, which has its own C++ registry.

        Relies on `_register_process_group(name, group)`, through which C++ (functional collectives)
        finds a group.
        """
        self.default_pg = group
        self.pg_map[group] = (backend, store)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self.pg_backend_config[group] = f"cpu:{backend}"
        self.tags_to_pg = {"": [group], f"ptd:{name}": [group]}
        self.pg_to_tag[group] = f"ptd:{name}"
        self.group_count = 1
        c10d._register_process_group(name, group)  # type: ignore[arg-type]


WORLD = c10d, "_world"  # the attribute in which torch has its RankWorld


def use_world(world: object) -> object:
    """Make torch.distributed use `world` from now on. Returns what it used before."""
    before, c10d._world = c10d._world, world  # type: ignore[assignment]
    return before


def name_groups_by_thread(on: bool) -> None:
    """Give every thread its own table of group names in C++.

    Each virtual rank is a thread, and all of them have a group "0".

    Relies on `_set_thread_isolation_mode`.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]


def forget_groups() -> None:
    """Empty this thread's table of group names."""
    c10d._unregister_all_process_groups()


def after_backward(callback: Callable[[], Any]) -> bool:
    """Call `callback` at the end of the backward that runs on this thread.

    Callbacks run in the order of these calls.

    It is called at once if the backward is already at its end: DDP with a static graph communicates
    in such a callback. Returns False if no backward runs.

    Relies on `Variable._execution_engine.queue_callback`, as torch's own DDP and FSDP2 do, and on
    `_current_autograd_node`.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    if torch._C._current_autograd_node() is None:
        callback()
    return True


def ahead_of_futures(
    waits: Callable[[Callable[[], bool]], None], asks: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `waits(done)` before Python waits for an unfinished torch future, inside the block.

    `asks()` is called before done() returns False. Relies on all waiting in Python, including
    torch.futures.wait_all and collect_all, being a call of `torch._C.Future.wait`.
    """
    future: Any = torch._C.Future
    wait, done = future.wait, future.done

    def wait_first(self: Any) -> Any:
        if not done(self):
            waits(lambda: done(self))
        return wait(self)

    def ask_first(self: Any) -> bool:
        if not done(self):
            asks()
        return done(self)

    return mock.patch.multiple(future, wait=wait_first, done=ask_first)


def around_profiler(uses: Callable[[bool], None]) -> AbstractContextManager[None]:
    """Call `uses(False)` before torch's profiler starts or stops, inside the block.

    `uses(True)` is called after it has stopped. Relies on torch.autograd.profiler, which
    torch.profiler uses, calling these three of its names.
    """
    profiler: Any = torch.autograd.profiler

    def calling(name: str) -> Any:
        original = getattr(profiler, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            uses(False)
            try:
                return original(*args, **kwargs)
            finally:
                uses(name == "_disable_profiler")

        return call

    names = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
    return mock.patch.multiple(profiler, **{name: calling(name) for name in names})


def wrap_new_groups(
    name: str,
    wrapped: str,
    context: Callable[[list[int] | None, bool], AbstractContextManager[object]],
) -> None:
    """Make every new sub-group on backend `name` with the registered backend `wrapped`.

    It is made inside `context(ranks, members_only)`. In that context torch waits for the members of
    the group. Unless `members_only`, all ranks of the world make the same groups in the same order.
    Relies on `_new_group_with_tag`, which `new_group` and DeviceMesh call by that name, and on its
    parameters.
    """
    original = getattr(c10d._new_group_with_tag, "original", c10d._new_group_with_tag)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group_with_tag(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if given.get("backend") in (None, name):
            given["backend"] = wrapped
        with context(given.get("ranks"), given.get("use_local_synchronization", False)):
            made = original(*call.args, **call.kwargs)
        name_backend(name)
        return made

    new_group_with_tag.original = original  # type: ignore[attr-defined]
    c10d._new_group_with_tag = new_group_with_tag


def count_loss_parallel() -> None:
    """Let several ranks of one process be inside `loss_parallel()`.

    The first that enters turns it on, and the last that leaves turns it off. It turns on functions
    for all DTensors of the process, and turning them off twice is a KeyError. Call this on a rank
    before it blocks. Relies on `_enable_custom_loss_ops` and `_disable_custom_loss_ops` of the
    module, and on `_custom_op_handlers`, in which they do so.
    """
    # a program that has not imported it is not inside
    loss: Any = sys.modules.get("torch.distributed.tensor.parallel.loss")
    if loss is None or hasattr(loss, "ranks_inside"):
        return
    enable, disable = loss._enable_custom_loss_ops, loss._disable_custom_loss_ops
    on = loss.customized_loss_ops.keys() <= loss.DTensor._op_dispatcher._custom_op_handlers.keys()
    loss.ranks_inside = 1 if on else 0

    def enter() -> None:
        loss.ranks_inside += 1
        enable()

    def leave() -> None:
        loss.ranks_inside -= 1
        if loss.ranks_inside == 0:
            disable()

    loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enter, leave


@functools.cache
def generator_memory() -> Callable[[], bytes] | None:
    """Return a fast function whose result changes whenever torch's CPU generator draws a number.

    None if its memory looks different.

    Without it, `get_state` must be used, which copies 5 kB: too much for each of a million switches
    between virtual ranks. Relies on `Generator._cdata`, the address of CPUGeneratorImpl, and on its
    memory: a Mersenne twister (seed, how many numbers are left, the next one, 624 words), then the
    normals that are kept for the next call.
    """
    generator = torch.default_generator
    state, seed = generator.get_state(), 0x5EED0F5EED0F5EED
    try:
        generator.manual_seed(seed)
        start = getattr(generator, "_cdata", 0)
        offset = string_at(start, 256).find(seed.to_bytes(8, sys.byteorder)) if start else -1
        if offset < 0:
            return None
        memory = (ctypes.c_char * (318 * 8)).from_address(start + offset)
        look = functools.partial(getattr, memory, "raw")
        seen = {look()}
        # one period of the 624 words, then normals, which come in pairs
        normals = [(torch.randn, torch.float32), (torch.randn, torch.float64)]
        for draw, dtype in [(torch.rand, torch.float32)] * 700 + normals * 2:
            draw((), generator=generator, dtype=dtype, device="cpu")
            seen.add(look())
        return look if len(seen) == 705 else None
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def optimizers_as_on_a_gpu() -> Iterator[None]:
    """Let torch's optimizers treat meta tensors like a GPU's, inside the block.

    They take fused=True for meta tensors. By default they, and the clipping of gradients, take one
    kernel for many tensors, as on a GPU.

    Relies on the functions of torch.utils._foreach_utils that list the devices with such kernels.
    """
    # torch.optim hides the name of its module, which has the same functions
    optimizer, utils = (
        importlib.import_module(name)
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")
    )
    names = [f"_get_{kind}_kernels_supported_devices" for kind in ("fused", "foreach")]
    devices = {name: [*getattr(optimizer, name)(), "meta"] for name in names}
    lists: dict[str, Any] = {name: functools.partial(list, devices[name]) for name in names}
    with mock.patch.multiple(optimizer, **lists), mock.patch.multiple(utils, **lists):
        yield


def is_composite(operation: Any) -> bool:
    """Return whether torch makes an operation (an OpOverload) of others, and so its gradients.

    silu_backward is also a kernel of its own, which the CPU has, and so a GPU. Relies on
    torch._C._dispatch_has_kernel_for_dispatch_key.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operation.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def dispatch_modes() -> list[Any]:
    """Return the modes of this thread that see every operation, the innermost last.

    Relies on `torch.utils._python_dispatch`, which lists them.
    """
    return _python_dispatch._get_current_dispatch_mode_stack()


# a context in which modes such as `with torch.device(…)` don't see uses of tensors: asking one for
# its shape takes a microsecond longer with such a mode. Relies on torch._C having it
no_function_modes = torch._C.DisableTorchFunction


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """A TorchDispatchMode whose __torch_dispatch__ torch calls directly.

    By default torch first turns its compiler off, which takes longer than a small operation of a
    virtual GPU. Relies on `_should_skip_dynamo`, which torch asks when a subclass is defined.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def uncounted_like(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the same shape, dtype and device, which no mode of this thread sees.

    Relies on `torch.utils._python_dispatch`, which turns them off.
    """
    with _python_dispatch._disable_current_modes():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
