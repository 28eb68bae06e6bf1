"""Under torchrun this process is a rank already: `launch` joins the job, and every rank gets all results.

    torchrun --nproc-per-node 4 script.py      four processes run script.py; each launch() in it is one program on all of them

There is no launching process here to see what goes wrong: the ranks watch over each other (see jobwatcher).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel101.backends import real
from parallel101.backends.record import Ledger
from parallel101.errors import DeadlockError, MisuseError, RankFailed, broken_connection, named
from parallel101.ranks.jobwatcher import GRACE, JobWatcher
from parallel101.ranks.run import Run
from parallel101.ranks.setup import own_setup_accepted
from parallel101.ranks.wire import unpack
from parallel101.ranks.worker import no_copy_of_a_rank, pack_result, story
from parallel101.trace.calls import Call
from parallel101.trace.checks import Referee
from parallel101.trace.events import Trace
from parallel101.trace.spans import record_into

_store: list[dist.Store] = []
_launches = 0


def in_a_job() -> bool:
    """Whether somebody (torchrun) has made this process a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "PARALLEL101_RANK" not in os.environ


def join(
    fn: Callable, args: tuple, kwargs: dict, *, world_size: int | None, backend: str, trace: bool | str, timeout: float, payload_bytes: int
) -> Run:
    """Run fn as this process's rank of the job; see `launch`. Raises ValueError when world_size is not the job's, or there is no job."""
    rank, size = _rank_and_size()
    if world_size is not None and world_size != size:
        raise ValueError(
            f"world_size is {world_size!r}, but this job has {size} ranks (WORLD_SIZE); leave it out, or start {world_size} processes"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already; launch() does that itself: call it first, or use your own group without launch()"
        )
    global _launches
    _launches += 1
    store = dist.PrefixStore(f"parallel101/{_launches}", _job_store(timeout))
    calls: list[Call] = []
    ledger = Ledger(rank, recording=bool(trace), payload_bytes=payload_bytes, tell=calls.append if trace else None)
    other: dist.Store = store.clone()  # type: ignore[attr-defined]  #  a connection of its own: one call at a time blocks one
    watcher = JobWatcher(ledger, other, size, timeout, calls)
    watcher.start()
    if trace:
        record_into(ledger)
    try:
        real.own_device(backend, int(os.environ.get("LOCAL_RANK", rank)))
        hook = sys.excepthook
        real.init(backend, ledger, store, rank, size)
        if _launches > 1:
            sys.excepthook = hook  #  torch puts "[rank0]:" before a traceback's lines, once more at every init
        try:
            with own_setup_accepted(), no_copy_of_a_rank(), _told_when_killed():
                real.start_together()
                value = fn(*args, **kwargs)
            body, buffers = pack_result(value, rank)
        except BaseException as error:
            if broken_connection(error) and (cause := watcher.verdict(within=GRACE)) is not None:
                raise cause from None  #  another rank is gone, and said why
            if isinstance(error, DeadlockError | MisuseError):
                watcher.announce(error)
                raise
            failure = RankFailed(f"rank {rank} raised {named(error)}\n\n{story(error)}".rstrip(), rank)
            watcher.announce(failure)
            raise failure from error
        ledger.close()
        watcher.returned()
        gathered: list[Any] = [None] * size
        about = pickle.dumps((calls, ledger.events, ledger.unfinished, ledger.groups))
        dist.all_gather_object(gathered, (body, [bytes(buffer.raw()) for buffer in buffers], about))
    finally:
        record_into(None)
        watcher.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
    parts = [pickle.loads(about) for _, _, about in gathered]
    _see_misuse([call for calls, *_ in parts for call in calls])
    results = [unpack(body, [bytearray(buffer) for buffer in buffers]) for body, buffers, _ in gathered]
    return Run(results, _trace(parts, size, backend) if trace else None, backend, size)


def _rank_and_size() -> tuple[int, int]:
    """This process's rank and the job's size, from what torchrun sets. Raises ValueError where that can't be."""
    rank, size, port = (_whole(os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank is None or size is None or not 0 <= rank < size:
        wrong = "a rank is a whole number from 0 to below the world size"
    elif not os.environ.get("MASTER_ADDR"):
        wrong = "MASTER_ADDR, where the ranks meet, is missing"
    elif port is None or not 0 <= port < 1 << 16:
        wrong = f"MASTER_PORT is {os.environ.get('MASTER_PORT', '')!r}, which is no port"
    else:
        return rank, size
    job = " and ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE"))
    raise ValueError(f"RANK and WORLD_SIZE are set, as torchrun sets them: {job}, but {wrong}; unset them to launch here")


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


@contextlib.contextmanager
def _told_when_killed() -> Iterator[None]:
    """Inside, a rank that C code aborts says on stderr where it was."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.disable()


def _job_store(timeout: float) -> dist.Store:
    """The job's own store, met once a process."""
    if not _store:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        _store.append(store)
    return _store[0]


def _see_misuse(calls: list[Call]) -> None:
    referee = Referee()
    for call in sorted(calls, key=lambda c: c.seq):
        referee.hear(call)
    if (verdict := referee.verdict()) is not None:
        raise verdict


def _trace(parts: list, size: int, backend: str) -> Trace:
    groups: dict[str, list[int]] = {"world": list(range(size))}
    for *_, own in parts:
        groups.update(own)
    events, unfinished = ([row for part in parts for row in part[kind]] for kind in (1, 2))
    return Trace.from_rows(events, size, backend, groups, unfinished)
