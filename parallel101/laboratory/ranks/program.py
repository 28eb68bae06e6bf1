"""Runs the caller's program on a rank, and sends what it returned, or how it failed.

run_rank: join the process group ──▶ call: the program ──▶ record, and result or failure

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
from parallel101.laboratory.ranks.watcher import (
    Watcher,
    before_cpp_aborts,
    before_exits,
    exit_process,
)
from parallel101.laboratory.ranks.wire import FAILURE, RESULT, Failure, Job
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
# What is in a program that needs the first of them: an optimizer, by a trainer perhaps, or DDP. The
# fork server then imports it before the first ranks start, and not each rank anew: with four ranks,
# in 1.2 s in place of 4.2.
USE_DYNAMO = (b"optim", b"trainer", b"distributeddataparallel")


def run_rank(
    job: Job,
    watcher: Watcher,
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
    recorder, wire, failure = watcher.recorder, watcher.wire, None
    if job.recording:
        record_into(recorder)
    try:
        process_groups.own_device(job.backend, local_rank)
        with loopback_explained():
            process_groups.init(job.backend, recorder, store(), recorder.rank, job.world_size)
        program = load()
        process_groups.start_together()
        watcher.outside = ""
        with (
            own_init_accepted(),
            before_exits(watcher.exits),
            before_cpp_aborts(watcher.aborts),
        ):
            value = call(program)
        watcher.outside = "its end, sending back what it returned"
        kind, packed = RESULT, pack_result(value, recorder.rank, wire.plain)
        del value
        recorder.close()
    except BaseException as error:
        failure = failure_of(recorder.rank, error)
        kind, packed = FAILURE, pack_failure(failure, wire.plain)
    record_into(None)
    with contextlib.suppress(OSError):  # nobody reads any more: the watcher finds that out
        watcher.send_record(slow_imports(loaded))
        wire.send_packed(kind, *packed)
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
    except Exception as error:
        kind: type[Exception] = TypeError
        what = "was pickled, but the ranks can't unpickle it"
        advice = "Create it inside the function, or pass what it is made from"
        if isinstance(error, ImportError):
            kind, what = ImportError, "comes from a module that the ranks can't import"
            advice = (
                "The ranks import it by name, as a script would: add its directory to sys.path "
                "before the launch"
            )
        raise kind(f"the function or an argument {what}: {one_line(error)}. {advice}.") from error


def torchrun_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables by which torchrun tells a rank who it is. All ranks are on one machine.

    MASTER_ADDR and MASTER_PORT are for programs that read them: the ranks have met already, and
    nobody listens at that port. (Source:
    torch/distributed/elastic/agent/server/local_elastic_agent.py.)
    """
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", "PARALLEL101_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RUN_ID": "none",
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
            given = signature.bind(*args, **kwargs).arguments
            rank, size = dist.get_rank(), dist.get_world_size()
            # sim_nccl is the simulator under NCCL's rules
            asked, own = str(given.get("backend")), dist.get_backend().removesuffix("_nccl")
            if rank == 0 and not {own, "None"} & {*asked.replace(":", ",").split(",")}:
                sys.stderr.write(
                    f"parallel101: the program asks for backend {asked!r}, and this run uses "
                    f"{own!r} instead\n"
                )
            for name, actual in (("rank", rank), ("world_size", size)):
                if given.get(name, -1) not in (-1, actual):
                    raise ValueError(
                        f"init_process_group({name}={given[name]}) on rank {rank} of a launch, "
                        f"where {name} is {actual}. Pass dist.get_rank() and "
                        "dist.get_world_size(), or neither."
                    )
            has_device = getattr(dist.group.WORLD, "has_device", None)  # on sim, by NCCL's rules
            if given.get("device_id") is not None and has_device is not None:
                has_device()
            if (timeout := given.get("timeout")) is not None:
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


def call(program: tuple[Callable, tuple, dict]) -> Any:
    """Return what the program returns.

    A child that it forks, and that would leave it, exits instead: only its parent is a rank.
    """
    function, args, kwargs = program
    rank = os.getpid()
    try:
        value = function(*args, **kwargs)
    except BaseException:
        if os.getpid() == rank:
            raise
        traceback.print_exc()
        exit_process(1)
    if os.getpid() != rank:
        exit_process(0)
    return value


def slow_imports(before: set[str]) -> list[str]:
    """List modules imported since `before` that the fork server should import too.

    The program's own may change between launches.
    """
    new = sys.modules.keys() - before if before else ()
    return [name for name in new if name in SLOW_IMPORTS or name.startswith("parallel101.")]


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the Failure that tells the launching process of an exception that `rank` raised.

    Its traceback begins with the program's first frame. It is "" if a file of ranks/ raised the
    error: the program's arguments do not fit, or its result can't be pickled.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame, _ in frames]
    ours = next((k for k, name in enumerate(files) if not is_inside(name)), None)
    text, tb = "", error.__traceback__
    if files and (ours is not None or os.path.dirname(files[-1]) != os.path.dirname(__file__)):
        for _ in range(ours or 0):
            tb = tb and tb.tb_next
        text = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    lines = [f"{name}:{line}" for name, (_, line) in zip(files, frames) if not is_library(name)]
    return Failure(
        rank,
        error,
        one_line(error),
        text,
        broken_connection(error) or reports_another(error, rank),
        lines[-1] if lines else "",
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
