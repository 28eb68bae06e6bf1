"""`launch(fn, world_size=4)`: run a function once a rank, on real processes or virtual ones, and hand back what they returned.

launch ──▶ ranks (processes) ──▶ each: join the group, run fn ──▶ results, record
               torchrun's, where this process is already one of them (see join)
"""

from __future__ import annotations

import linecache
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel101.ranks.monitor import Monitor
from parallel101.ranks.processes import preload, start_ranks
from parallel101.ranks.rendezvous import MeetingPlace
from parallel101.ranks.run import Run
from parallel101.ranks.torchrun import in_a_job, join
from parallel101.ranks.wire import JOB, PROGRAM, pack, unpack
from parallel101.ranks.worker import Job
from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed
from parallel101.record.trace import Trace
from parallel101.record.where import shown
from parallel101.sim.network import Network

BACKENDS = ("gloo", "nccl", "sim")
PAYLOAD = 4096  #  bytes: messages up to this size keep their values when trace="payload"
DEFAULT_WORLD_SIZE = 4
LONGEST = 1e9  #  seconds: what C++ and select() still take for a number


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    backend: str = "gloo",
    trace: bool | str = False,
    timeout: float = 60.0,
    network: Network | None = None,
    **kwargs: Any,
) -> Run:
    """Run `fn(*args, **kwargs)` once a rank, with torch.distributed initialised, and wait for all of them.

    Args:
        fn: any callable: a function, a lambda, a notebook cell's function, a closure. Each rank gets its own copy, and imports anew the
            modules it comes from: what was assigned to a module's variables since its import is not seen there.
        world_size: how many ranks, 4 unless said. Under torchrun it is the job's: leave it out, or let it agree.
        backend: "gloo" (processes, CPU), "nccl" (processes, one GPU each) or "sim" (virtual ranks on a virtual clock).
        trace: record every message and check the calls against each other; "payload" also keeps the values of messages of up to 4 KiB.
            A sim run is always recorded and checked.
        timeout: seconds after which the run is ended.
        network: on sim, the links between the ranks.

    Returns:
        The Run: `.results` by rank, `.trace`, `.animate()`, `.timeline()`.

    Raises:
        RankFailed: a rank raised (its exception is the cause) or died.
        DeadlockError: ranks wait for each other, or for one that has returned. (While a thread that the program started is at work on one
            of them, it may still post what the others wait for: then only the time limit ends the run.)
        MisuseError: a checked run saw calls that do not fit together.
        LaunchTimeout: the time was over.
        TypeError, ValueError, RuntimeError: the launch itself can't be; nothing was started.

    Errors of a recorded run carry what was recorded up to then as `.trace`; its `.unfinished` are the calls that had not ended.
    """
    _check(fn, backend, trace, timeout, network)
    timeout = min(timeout, LONGEST)
    payload_bytes = PAYLOAD if trace == "payload" else 0
    if in_a_job() and backend != "sim":  #  virtual ranks are nobody's processes: each of the job's runs the whole simulation
        return join(fn, args, kwargs, world_size=world_size, backend=backend, trace=trace, timeout=timeout, payload_bytes=payload_bytes)
    if "PARALLEL101_RANK" in os.environ:
        raise RuntimeError(
            f"launch() was called inside rank {os.environ['PARALLEL101_RANK']} of another launch; ranks can't launch ranks of their own"
        )
    size = _world_size(DEFAULT_WORLD_SIZE if world_size is None else world_size)
    _enough_gpus(backend, size)
    if network is not None:
        network.router(size)  #  says at once if its topology is for another number of ranks
    folder = _folder()
    packed = _pack_call(fn, args, kwargs)
    recording = bool(trace) or backend == "sim"
    place = MeetingPlace(size) if backend != "sim" else None
    processes = start_ranks(1 if backend == "sim" else size)
    explained = False
    names = [""] if backend == "sim" else [f"[rank {r}] " for r in range(size)]
    monitor = Monitor(processes, timeout, names, recording, on_gloo=backend == "gloo")
    try:
        for state in monitor.states:
            job = Job(
                rank=state.rank,
                world_size=size,
                backend=backend,
                meeting=None if place is None else place.address,
                recording=recording,
                checked=recording,
                payload_bytes=payload_bytes,
                network=network,
                path=sys.path,
                folder=folder,
                environ=dict(os.environ),
                local_rank=state.rank,
                sources={name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None},
            )
            try:
                state.wire.send(JOB, job)
                state.wire.send_packed(PROGRAM, *packed)
            except OSError:
                pass  #  it died already: the monitor will say how
        monitor.watch()
        results = [unpack(*state.result) for state in monitor.states if state.result is not None]
        monitor.dismiss()
        preload(monitor.imported)
    except (DeadlockError, MisuseError, RankFailed, LaunchTimeout) as error:
        if recording:
            monitor.collect_events()
        error.trace = _trace(monitor, size, backend)  # type: ignore[union-attr]
        explained = __tracebackhide__ = True  #  how it came to be known here is nothing to read about (IPython, pytest)
        raise error.with_traceback(None) from error.__cause__
    except KeyboardInterrupt as interrupt:
        monitor.ask_where(0.3)
        for rank, where in (pair for state in monitor.states for pair in state.places or []):
            print(f"interrupted: rank {rank} was at {shown(where)}", file=sys.stderr)
        __tracebackhide__ = True
        raise interrupt.with_traceback(None) from None
    finally:
        monitor.close(explained)
        if place is not None:
            place.close()
    return Run(results[0] if backend == "sim" else results, _trace(monitor, size, backend) if recording else None, backend, size)


def _trace(monitor: Monitor, size: int, backend: str) -> Trace:
    rows: list[tuple] = []
    unfinished: list[tuple] = []
    for state in monitor.states:
        rows += state.events or []
        unfinished += state.unfinished
    return Trace.from_rows(rows, size, backend, unfinished)


def _pack_call(fn: Callable, args: tuple, kwargs: dict) -> tuple[bytes, list]:
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        parts = [
            ("the function", fn),
            *((f"argument {i}", a) for i, a in enumerate(args)),
            *((f"argument {k!r}", v) for k, v in kwargs.items()),
        ]
        for name, part in parts:
            try:
                pack(part)
            except Exception as reason:
                raise TypeError(
                    f"{name} (a {type(part).__name__}) can't be pickled, so it can't travel to the ranks: {reason}. "
                    "Make it inside the function, or pass what it is made from."
                ) from error
        raise


def _check(fn: Any, backend: Any, trace: Any, timeout: Any, network: Any) -> None:
    if not callable(fn):
        raise TypeError(f"launch() takes a function to run on each rank; got a {type(fn).__name__}: {fn!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it may be one of {', '.join(map(repr, BACKENDS))}")
    if trace not in (True, False, "payload"):
        raise ValueError(f"trace is {trace!r}; it may be True, False or 'payload' (which keeps small messages' values too)")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds above zero")
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"network is a {type(network).__name__}; it is made by parallel101.Network(latency=…, bandwidth=…)")
    if network is not None and backend != "sim":
        raise ValueError(f"network belongs to backend='sim', where links are virtual; on {backend!r} they are what they are")


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RuntimeError("this process's working folder was deleted, and ranks work there too; cd to another one first") from None


def _world_size(value: Any) -> int:
    if isinstance(value, bool | str):
        raise TypeError(f"world_size is {value!r}; it is a whole number of ranks, 1 or more")
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"world_size is {value!r}; it is a whole number of ranks, 1 or more") from None
    if size < 1:
        raise ValueError(f"world_size is {size}; there must be at least 1 rank")
    return size


def _enough_gpus(backend: str, size: int) -> None:
    if backend != "nccl":
        return
    if not dist.is_nccl_available():
        raise RuntimeError(
            "backend 'nccl' needs a torch that was built with NCCL, and this one is not (a CPU build); use backend='gloo' or 'sim'"
        )
    have = torch.cuda.device_count()
    if have < size:
        raise RuntimeError(
            f"backend 'nccl' needs one GPU a rank: {size} ranks, and this machine has {have} GPU{'s' * (have != 1)}. "
            "Use fewer ranks, or backend='gloo' or 'sim'; `parallel101 doctor` tells what one GPU can do."
        )
