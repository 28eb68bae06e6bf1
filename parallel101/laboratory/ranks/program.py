"""Runs the caller's program on a rank, and sends what it returned, or how it failed.

run_rank: join the process group ──▶ the program, inside own_init_accepted and forked_children_exit
                                 ──▶ record, and result or failure

The processes of a launch and those of a job run it. Virtual ranks use parts of it (simworker.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from parallel101.laboratory.ranks.pickling import pack, pack_result, unpack
from parallel101.laboratory.ranks.watcher import Watcher, exit_process
from parallel101.laboratory.ranks.wire import FAILURE, RESULT, Failure
from parallel101.laboratory.record import process_groups, torch_private
from parallel101.laboratory.record.errors import broken_connection, one_line, reports_another
from parallel101.laboratory.record.program_lines import is_inside, is_library
from parallel101.spans import record_into

# What torch imports when an optimizer, a DTensor, FSDP2 or a pipeline is first used, a second each;
# and what a test file imports.
SLOW_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "pytest",
)
USE_DYNAMO = (b"optim", b"trainer", b"distributeddataparallel")


def run_rank(
    watcher: Watcher,
    backend: str,
    world_size: int,
    local_rank: int,
    store: Callable[[], dist.Store],
    load: Callable[[], tuple[Callable, tuple, dict]],
    loaded: set[str] = frozenset(),  # type: ignore[assignment]
) -> Failure | None:
    """Join the process group and run the program. Send its record, and its result or failure.

    Args:
        store: returns the store by which the ranks meet.
        load: returns the function and its arguments.
        loaded: modules that were imported before.
    """
    recorder, wire = watcher.recorder, watcher.wire
    if recorder.recording:
        record_into(recorder)
    failure = None
    try:
        process_groups.own_device(backend, local_rank)
        with loopback_explained():
            process_groups.init(backend, recorder, store(), recorder.rank, world_size)
        function, args, kwargs = load()
        process_groups.start_together()
        watcher.outside = ""
        with own_init_accepted(), forked_children_exit(), watcher.uncaught.held():
            value = function(*args, **kwargs)
        watcher.outside = "its end, sending back what it returned"
        packed = pack_result(value, recorder.rank, wire.plain)
        del value
    except BaseException as error:
        failure = failure_of(recorder.rank, error)
    record_into(None)
    with contextlib.suppress(OSError):  # nobody reads any more: the watcher finds that out
        if failure is None:
            recorder.close()
            watcher.send_record(slow_imports(loaded))
            wire.send_packed(RESULT, *packed)
        else:
            watcher.send_record()
            wire.send_packed(FAILURE, *pack_failure(failure, wire.plain))
    return failure


@contextlib.contextmanager
def loopback_explained() -> Iterator[None]:
    """Add advice to gloo's error that another host's address is loopback, inside the block."""
    try:
        yield
    except RuntimeError as error:
        if (address := re.search(r"remote=\[(127\.[0-9.]+|::1)\]", str(error))) is None:
            raise
        raise RuntimeError(
            f"gloo looked for another host's rank at {address[1]}, which is this host itself: "
            "there, the host's own name has this address. Name the interface that connects the "
            "hosts, on all of them, e.g. GLOO_SOCKET_IFNAME=eth0 (`ip -brief address` lists them)"
        ) from error


def unpack_program(body: bytes, buffers: list) -> tuple[Callable, tuple, dict]:
    """Return the function and its arguments.

    Raises ImportError or TypeError, with advice, when a rank can't read what could be pickled.
    """
    try:
        return unpack(body, buffers)
    except ImportError as error:
        advice = (
            "The ranks import it by name, as a script would: add its directory to sys.path before "
            "the launch."
        )
        raise ImportError(
            "the function or an argument comes from a module that the ranks can't import: "
            f"{error}. {advice}"
        ) from error
    except Exception as error:
        advice = "Create it inside the function, or pass what it is made from."
        raise TypeError(
            "the function or an argument was pickled, but the ranks can't unpickle it: "
            f"{one_line(error)}. {advice}"
        ) from error


def torchrun_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables by which torchrun tells a rank who it is. All ranks are on one machine.

    MASTER_ADDR and MASTER_PORT are for programs that read them: the ranks have met already, and
    nobody listens at that port. (Source:
    torch/distributed/elastic/agent/server/local_elastic_agent.py.)
    """
    given, me, size = os.environ.get, str(rank), str(world_size)
    return {
        "RANK": me,
        "LOCAL_RANK": me,
        "GROUP_RANK": "0",
        "ROLE_RANK": me,
        "ROLE_NAME": "default",
        "PARALLEL101_RANK": me,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": given("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": given("MASTER_PORT", "29500"),
        "OMP_NUM_THREADS": given("OMP_NUM_THREADS", "1"),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextlib.contextmanager
def own_init_accepted() -> Iterator[None]:
    """Let a program call init_process_group and destroy_process_group itself, as scripts do.

    Both then do nothing. A rank or world_size that is not the launch's raises ValueError. How the
    program imports the two functions makes no difference.
    """

    def accept(init: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs).arguments
            _tell_other_backend(call.get("backend"))
            for name, actual in (("rank", dist.get_rank()), ("world_size", dist.get_world_size())):
                given = call.get(name, -1)
                if given not in (-1, actual):
                    raise ValueError(
                        f"init_process_group({name}={given}) on rank {dist.get_rank()} of a "
                        f"launch, where {name} is {actual}. Pass dist.get_rank() and "
                        "dist.get_world_size(), or neither."
                    )
            has_device = getattr(dist.group.WORLD, "has_device", None)  # on sim, by NCCL's rules
            if call.get("device_id") is not None and has_device is not None:
                has_device()
            if (timeout := call.get("timeout")) is not None:
                dist.group.WORLD.set_timeout(timeout)  # type: ignore[union-attr]

        return init_process_group

    def keep_world(destroy: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            if group not in (None, dist.group.WORLD):
                destroy(group)

        return destroy_process_group

    instead = torch_private.called_instead
    with (
        instead(c10d.init_process_group, accept),
        instead(c10d.destroy_process_group, keep_world),
        process_groups.batches_on_nccl(),
    ):
        yield


def _tell_other_backend(asked: Any) -> None:
    """Say on rank 0 that the program's own backend is not the one on which it runs."""
    # sim_nccl is the simulator under NCCL's rules
    actual = dist.get_backend().removesuffix("_nccl")
    if (
        asked is not None
        and dist.get_rank() == 0
        and actual not in str(asked).replace(":", ",").split(",")
    ):
        sys.stderr.write(
            f"parallel101: the program asks for backend {str(asked)!r}, and this run uses "
            f"{actual!r} instead\n"
        )


@contextlib.contextmanager
def forked_children_exit() -> Iterator[None]:
    """Let the program fork inside the block.

    A child that would leave this block exits instead, because only its parent is a rank.
    """
    rank = os.getpid()
    try:
        yield
    except BaseException:
        if os.getpid() != rank:
            traceback.print_exc()
            exit_process(1)
        raise
    if os.getpid() != rank:
        exit_process(0)


def will_import(packed: bytes) -> list[str]:
    """List slow modules that a pickled program is likely to import.

    Such a program names an optimizer, a trainer, which has one, or DDP. The fork server then
    imports them once, before the first ranks start, and not each rank anew: with four ranks, in
    1.2 s in place of 4.2.
    """
    lower = packed.lower()
    return ["torch._dynamo"] if any(name in lower for name in USE_DYNAMO) else []


def slow_imports(before: set[str]) -> list[str]:
    """List modules imported since `before` that the fork server should import too.

    The program's own may change between launches.
    """
    return [
        name
        for name in sys.modules.keys() - before
        if name in SLOW_IMPORTS or name.startswith("parallel101.")
    ]


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the Failure that tells the launching process of an exception that `rank` raised."""
    return Failure(
        rank,
        error,
        one_line(error),
        program_traceback(error),
        broken_connection(error) or reports_another(error, rank),
        next(reversed(_places(error)), ""),
    )


def pack_failure(failure: Failure, plain: bool = False) -> tuple[bytes, list]:
    """Pickle a failure. An exception that can't be pickled is sent as its text."""
    failure.error.__traceback__ = None  # its frames hold tensors, works and groups
    try:
        packed = pack(failure, plain)
        unpack(*packed, plain)
    except Exception:
        packed = pack(failure._replace(error=RuntimeError(failure.headline)), plain)
    return packed


def program_traceback(error: BaseException) -> str:
    """Return the traceback from the program's first frame on, without ours before it.

    "" if a file of ranks/ raised the error: the program's arguments do not fit, or its result can't
    be pickled.
    """
    tb = error.__traceback__
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb)]
    ours = next((k for k, name in enumerate(files) if not is_inside(name)), None)
    if ours is None and files and os.path.dirname(files[-1]) == os.path.dirname(__file__):
        return ""
    for _ in range(ours or 0):
        tb = tb and tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip() if tb else ""


def _places(error: BaseException) -> list[str]:
    """Return the program's lines in a traceback, the innermost last."""
    return [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not is_library(frame.f_code.co_filename)
    ]
