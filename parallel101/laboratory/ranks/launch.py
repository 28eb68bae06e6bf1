"""`launch(fn, world_size=4)`: runs a function on every rank and returns what it returned there.

Ranks are processes or virtual.

launch ──▶ processes ──▶ each: join the process group, run fn ──▶ Run: results and record

Under torchrun this process is already a rank: see torchrun.py.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import CHIPS, chip_of
from parallel101.laboratory.ranks.monitor import Monitor
from parallel101.laboratory.ranks.pickling import pack, unpack
from parallel101.laboratory.ranks.processes import Rendezvous, preload, start_ranks
from parallel101.laboratory.ranks.program import SLOW_IMPORTS, USE_DYNAMO
from parallel101.laboratory.ranks.torchrun import in_a_job, join_job
from parallel101.laboratory.ranks.wire import JOB, PROGRAM, RECORD, RESULT, Job, RankRecord
from parallel101.laboratory.record import process_groups
from parallel101.laboratory.record.calls import never_waited
from parallel101.laboratory.record.errors import (
    DeadlockError,
    LaunchTimeout,
    MisuseError,
    RankFailed,
)
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.virtual_gpu import GpuCount

BACKENDS = ("gloo", "nccl", "sim")
RULES = ("gloo", "nccl")
TRACE = (True, False, "payload")  # the last one also records the values of small messages
# the GPUs that a virtual rank may have
GPUS = tuple(chip.name for chip in CHIPS.values() if chip.kernels is not None)
# with trace="payload", messages up to this size are recorded with their values
PAYLOAD_BYTES = 4096
DEFAULT_WORLD_SIZE = 4
TO_SEND_A_RECORD = 5.0  # seconds for a rank of a failed run; a record may have millions of events
MAX_TIMEOUT = 1e9  # seconds: the most that C++ and select() take


@dataclass
class Run:
    """A finished run.

    Attributes:
        results: what the function returned, by rank. GPU tensors come back on the CPU.
        trace: the record, if the run was recorded (a sim run always is), else None.
        backend, world_size: as it ran.
        gpus: what each rank's virtual GPU did, of a run with `device`, else None: `.flops`, `.busy`
            (seconds in which it computed) and `.peak_bytes`, the most memory that was in use.
    """

    results: list[Any] = field(repr=False)
    trace: Trace | None
    backend: str
    world_size: int
    gpus: list[GpuCount] | None = field(default=None, repr=False)
    # the shape of the tensor that `watch` gave each rank
    watched: Any = field(default=None, repr=False)

    def animate(self, title: str | None = None):
        """Return an animation of the run's messages.

        A notebook shows it; elsewhere call `.save("ring.html")`.

        Raises ValueError when the run was not recorded.

        Example:
            >>> run = p101.launch(lambda: p101.all_reduce(torch.ones(4)), backend="sim")
            >>> run.animate().save("ring.html").name
            'ring.html'
        """
        from parallel101.laboratory.viz.collective import collective_scene

        return collective_scene(
            self._recorded("animate"), self.results, title=title, watched=self.watched
        )

    def timeline(self, title: str = "Timeline", *, critical_path: bool = False):
        """Draw every rank's sends, receives, collectives and spans over time.

        With `critical_path`, it shows the chain of messages and compute that ends last, and says
        what is on it. Raises ValueError when the run was not recorded.
        """
        from parallel101.laboratory.viz.timeline import timeline_scene

        return timeline_scene(self._recorded("timeline"), title=title, critical_path=critical_path)

    def traffic(self, title: str = "Who sends to whom", *, within: str | None = None):
        """Draw who sent how much to whom, as squares of ranks × ranks.

        With `within="dispatch"`, only what a rank sent in its last span of that name. Raises
        ValueError when the run was not recorded, or has no such span.
        """
        from parallel101.laboratory.viz.between_ranks import traffic_scene

        return traffic_scene(self._recorded("traffic"), title, within)

    def before_after(self, title: str | None = None):
        """Draw the data that each rank was given and returned, as two matrices of blocks.

        For a run of `p101.watch`; others raise ValueError.
        """
        from parallel101.laboratory.viz.before_after import before_after_scene

        return before_after_scene(self._recorded("before_after"), self.results, self.watched, title)

    def _recorded(self, method: str) -> Trace:
        if self.trace is None:
            raise ValueError(
                f"run.{method}() needs a recorded run, and this run was not recorded: launch it "
                "with trace=True"
            )
        return self.trace


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    backend: str = "gloo",
    trace: bool | str = False,
    timeout: float = 60.0,
    network: Network | None = None,
    rules: str = "gloo",
    device: str | None = None,
    mirrors: MirroredAxes | None = None,
    keep_waiting: bool = False,
    stuck_after: float = 30.0,
    **kwargs: Any,
) -> Run:
    """Run `fn(*args, **kwargs)` on every rank, and wait until all have returned.

    torch.distributed is initialized on each rank.

    Args:
        fn: any callable: a function, a lambda, a notebook cell's function, a closure. Each rank
            gets its own copy. It imports modules anew, so it does not see what this process has
            assigned to a module's variables.
        world_size: the number of ranks; 4 by default. Under torchrun, srun and mpirun it is the
            job's: leave it out, or pass the same number.
        backend: "gloo" (processes, CPU), "nccl" (processes, one GPU each) or "sim" (virtual ranks
            on a virtual clock).
        trace: record every message, and check the calls against each other. "payload" also records
            the values of messages up to 4 KiB. A sim run is always recorded and checked.
        timeout: seconds after which the run is stopped.
        network: on sim, the links between the ranks; None: `Network()`, or with a device those of
            its nodes: NVLink between eight GPUs, and a network card for each
            (`Network.two_level(**cost.Cluster(device, gpus).network_arguments())`).
        rules: on sim, what the program may rely on. "nccl" is only what NCCL guarantees, which
            otherwise takes a GPU per rank to find out. Each communicator has one queue per rank,
            messages in a batch start together, and there are no tags. sim/queues.py has the list.
        device: on sim, the GPU that each rank has, such as "H100". Tensors are then on torch's meta
            device: they have shapes and no values, and no number is computed. Trainers run as they
            are, and their `step` returns 0.0. None: the CPU, with numbers.
        mirrors: on sim, which ranks of a mesh have a thread and stand for the others, in a program
            that does the same on all of them: a `sim.mirrored.MirroredAxes`. `results` are of those
            ranks, and the run is recorded only with `trace`. None: all have one.
        keep_waiting: the program handles the time limits of its process groups itself. A deadlock
            that such a limit ends is only printed, and the run goes on. Without it, a deadlock ends
            the run at once, whatever the limit. (A limit given to one call, as in
            `work.wait(timedelta(seconds=5))`, is always left to the program.)
        stuck_after: seconds without progress after which the ranks that others wait for are
            printed with their Python stacks; again after twice the time, and so on. The run goes
            on. Infinity: never.

    Returns:
        The Run: `.results` by rank, `.trace`, `.animate()`, `.timeline()`; `.gpus` with a device.
        Under torchrun, srun and mpirun every rank gets all results. There `fn` may return what
        torch.load(weights_only=True) accepts: tensors, numbers, strings, containers of them, arrays
        of NumPy, and classes that the program has passed to torch.serialization.add_safe_globals.

    Raises:
        RankFailed: a rank raised an exception, which is the cause, or its process died.
        DeadlockError: ranks wait for each other, or for a rank that has returned. (While another
            thread of the program runs on one of them, it may still post what the others wait for.
            Then only the time limit stops the run.)
        MisuseError: a checked run found calls that do not match.
        LaunchTimeout: the ranks were still running after `timeout` seconds.
        TypeError, ValueError, RuntimeError: the arguments do not work here; no rank was started.

    The errors of a recorded run have `.trace`, with what was recorded until then. Its `.unfinished`
    are the calls that had not ended.

    Example:
        >>> def program(x):
        ...     return x * dist.get_rank()
        >>> run = p101.launch(program, torch.ones(2), world_size=3, backend="sim")
        >>> run.results
        [tensor([0., 0.]), tensor([1., 1.]), tensor([2., 2.])]
    """
    if not callable(fn):
        raise TypeError(
            f"launch() takes a function to run on each rank; got a {type(fn).__name__}: {fn!r}"
        )
    on_sim = {"network": network, "rules": rules, "mirrors": mirrors}
    _check_options(backend, trace, timeout, stuck_after, device, on_sim)
    if mirrors is not None and world_size not in (None, mirrors.world_size):
        raise ValueError(
            f"world_size is {world_size}, and the mesh of mirrors={mirrors} has "
            f"{mirrors.world_size} ranks: leave world_size out"
        )
    job = Job(
        0 if mirrors is None else mirrors.world_size,
        backend,
        min(timeout, MAX_TIMEOUT),
        recording=bool(trace) or (backend == "sim" and mirrors is None),
        payload_bytes=PAYLOAD_BYTES if trace == "payload" else 0,
        keep_waiting=keep_waiting,
        stuck_after=min(stuck_after, MAX_TIMEOUT),
        device=device,
        simulated=on_sim,
    )
    if in_a_job() and backend != "sim":  # on sim each process of the job runs the whole simulation
        results, records = join_job(fn, args, kwargs, job, world_size)
        run = _run(job, results, records)
        _check_waits(records)
        return run
    if "PARALLEL101_RANK" in os.environ:
        raise RuntimeError(
            f"launch() was called inside rank {os.environ['PARALLEL101_RANK']} of another launch. "
            "A rank can't launch ranks: call launch() outside the function that runs on the ranks"
        )
    job.world_size = job.world_size or _world_size(world_size)
    if backend == "nccl":
        _check_gpus(job.world_size)
    if network is None and device is not None:
        cluster = Cluster(chip_of(device), job.world_size)
        network = on_sim["network"] = Network.two_level(**cluster.network_arguments())
    if network is not None:
        network.router(job.world_size)  # raises if its topology is for another number of ranks
        if mirrors is not None:
            mirrors.router(network)
    surroundings = {
        "path": sys.path,
        "directory": os.getcwd(),
        "environ": dict(os.environ),
        "sources": {k: e for k, e in linecache.cache.items() if len(e) == 4 and e[1] is None},
    }
    program = _pack_program(fn, args, kwargs)
    uses_dynamo = any(name in program[0].lower() for name in USE_DYNAMO)
    virtual = ["parallel101.laboratory.ranks.simworker"] * (backend == "sim")
    preload([*SLOW_IMPORTS[:uses_dynamo], *virtual])
    rendezvous = Rendezvous()
    processes = start_ranks(job.processes)
    monitor = Monitor(job)
    for rank, process in zip(monitor.ranks, processes):
        monitor.add_process(rank, process, "" if backend == "sim" else f"[rank {rank.rank}] ")
    explained = False
    try:
        for rank in monitor.ranks:
            # if the process has died already, the monitor reports it
            with contextlib.suppress(OSError):
                assert rank.wire is not None
                rank.wire.send(JOB, (rank.rank, job, rendezvous.path, surroundings))
                rank.wire.send_packed(PROGRAM, *program)
        monitor.watch()
        _check_waits(monitor.records())
        for warning in (text for record in monitor.records() for text in record.warnings):
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        results = [unpack(*packed) for packed in monitor.said(RESULT)]
        if backend == "sim":  # one process sends what all ranks returned, each pickled by itself
            results = [unpack(*packed) for packed in results[0]]
        monitor.let_exit()
        preload(name for record in monitor.records() for name in record.imported)
    except (DeadlockError, RankFailed, LaunchTimeout, KeyboardInterrupt) as error:
        explained = not isinstance(error, KeyboardInterrupt)
        if not explained:
            monitor.report("interrupted: what the ranks did")
        if job.recording:
            monitor.ask(RECORD, TO_SEND_A_RECORD)
        if job.recording or explained:
            error.trace = _trace(job, monitor.records())  # type: ignore[union-attr]
        # IPython and pytest then leave out this frame, which explains nothing
        __tracebackhide__ = True
        raise error.with_traceback(None) from error.__cause__
    finally:
        monitor.close(explained)
        rendezvous.close()
    return _run(job, results, monitor.records())


def _run(job: Job, results: list[Any], records: Sequence[RankRecord]) -> Run:
    trace = _trace(job, records) if job.recording else None
    gpus = list(records[0].gpus) if job.device is not None else None
    return Run(results, trace, job.backend, job.world_size, gpus)


def _trace(job: Job, records: Sequence[RankRecord]) -> Trace:
    events, unfinished, earlier = (
        [event for record in records for event in getattr(record, name)]
        for name in ("events", "unfinished", "earlier")
    )
    return Trace.from_rows(events, job.world_size, job.backend, unfinished, earlier)


def _check_waits(records: Sequence[RankRecord]) -> None:
    """Raise MisuseError for receives for which a run that has returned never waited.

    For such sends, warn. The run must be a checked one.
    """
    calls = [call for record in records for call in record.unwaited]
    if receives := [call for call in calls if call.kind == "recv"]:
        raise MisuseError(never_waited(receives), receives[0].rank)
    if calls:
        warnings.warn(never_waited(calls), RuntimeWarning, stacklevel=3)


def _pack_program(fn: Callable, args: tuple, kwargs: dict) -> tuple[bytes, list]:
    """Pickle the function and its arguments.

    Raises TypeError that names the one that can't be pickled.
    """
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        parts = {"the function": fn}
        parts |= {f"argument {position}": value for position, value in enumerate(args)}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        for name, part in parts.items():
            try:
                pack(part)
            except Exception as reason:
                raise TypeError(
                    f"{name} (a {type(part).__name__}) can't be pickled, so it can't be sent to "
                    f"the ranks: {reason}. Create it inside the function, or pass what it is made "
                    "from."
                ) from error
        raise


def _check_options(
    backend: Any, trace: Any, timeout: Any, stuck_after: Any, device: Any, on_sim: dict[str, Any]
) -> None:
    kind = device.upper() if isinstance(device, str) else device
    for name, value, allowed in (
        ("backend", backend, BACKENDS),
        ("rules", on_sim["rules"], RULES),
        ("trace", trace, TRACE),
        ("device", kind, (*GPUS, None)),
    ):
        if value not in allowed:
            options = ", ".join(map(repr, allowed))
            raise ValueError(f"{name} is {value!r}; it must be one of {options}")
    for name, value in (("timeout", timeout), ("stuck_after", stuck_after)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be a number of seconds above zero")
    network, mirrors = on_sim["network"], on_sim["mirrors"]
    if not isinstance(network, Network | None):
        raise TypeError(
            f"network is a {type(network).__name__}; it must be a parallel101.Network(latency=…, "
            "bandwidth=…)"
        )
    if not isinstance(mirrors, MirroredAxes | None):
        raise TypeError(f"mirrors is a {type(mirrors).__name__}; it must be a MirroredAxes")
    if mirrors is not None and on_sim["rules"] != "gloo":
        raise ValueError(f"mirrors works with rules='gloo' only; got {on_sim['rules']!r}")
    for name, value in (on_sim | {"device": device}).items():
        if value not in (None, "gloo") and backend != "sim":
            raise ValueError(
                f"{name} works with backend='sim' only, and backend is {backend!r}: "
                f"leave {name} out, or use backend='sim'"
            )


def _world_size(value: Any) -> int:
    if value is None:
        return DEFAULT_WORLD_SIZE
    with contextlib.suppress(TypeError):  # also of a tensor of floats, which has __index__
        if not isinstance(value, bool) and operator.index(value) >= 1:
            return operator.index(value)
    error = ValueError if type(value) is int else TypeError
    raise error(f"world_size is {value!r}; it must be a whole number of ranks, 1 or more")


def _check_gpus(size: int) -> None:
    count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if count < size and not (count and process_groups.gpus_are_shared()):
        raise RuntimeError(
            f"backend 'nccl' needs a torch built with NCCL, and one GPU per rank: {size} ranks "
            f"were asked for, and torch can use {count} GPU{'s' * (count != 1)} here. Use fewer "
            "ranks, or backend='gloo' or 'sim'. "
            f"With {process_groups.SHARE_GPUS}=1 in the environment, ranks share a GPU, slowly"
        )
