"""Tells which ranks of a job are alive, and whether its store answers.

    rank 1, twice a second ──▶ the store: heartbeat/1 = the time, its host and its process
    rank 0                 ──▶ a connection has broken: does rank 1 still have a heartbeat?
                           ──▶ of the ranks of its own host: is there still a process?

A rank without a heartbeat may be stopped, or its machine may be gone for a while. It counts as lost
only after a connection has broken.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

import psutil
import torch.distributed as dist

from parallel101.laboratory.ranks.job_messages import from_json, to_json
from parallel101.laboratory.ranks.wire import Failure
from parallel101.laboratory.record.units import ranks_text

BEAT_EVERY = 0.4  # seconds
LOOK_EVERY = 1.0  # seconds
# seconds without one after which a rank is lost, once a connection has broken; longer on a machine
# that has far more work than cores
LOST_AFTER = 1.4


class Heartbeats:
    """Sends a rank's own heartbeat, and looks at those of the others and at their processes."""

    def __init__(self, rank: int, size: int, store: dist.Store):
        self.rank, self.size, self.store = rank, size, store
        self.next_beat = self.next_look = 0.0
        self.unknown = set(range(size)) - {rank}  # ranks that have not said where they run
        self.pids: dict[int, int] = {}  # of the others on this host

    def beat(self) -> None:
        """Put a heartbeat into the store, if it is time."""
        if (now := time.monotonic()) >= self.next_beat:
            self.next_beat = now + BEAT_EVERY
            self.store.set(
                f"heartbeat/{self.rank}", to_json([now, socket.gethostname(), os.getpid()])
            )

    def texts(self) -> list[bytes]:
        """Return the newest heartbeat of each rank."""
        return texts_of("heartbeat", self.size, self.store)

    def lost(self, before: Sequence[bytes]) -> dict[int, str]:
        """Return ranks without a heartbeat since `before`, a result of `texts`, with hosts."""
        return {
            rank: str(from_json(text)[1])
            for rank, text in enumerate(self.texts())
            if text and text == before[rank] and rank != self.rank
        }

    def ended(self) -> set[int]:
        """Return the ranks of this host whose process is gone.

        Which ranks are on this host is looked up at `next_look`, until all are known.
        """
        if self.unknown and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_EVERY
            for rank, text in enumerate(self.texts()):
                if text and rank in self.unknown:
                    self.unknown.remove(rank)
                    _, host, pid = from_json(text)
                    if host == socket.gethostname():
                        self.pids[rank] = pid
        return {rank for rank, pid in self.pids.items() if not psutil.pid_exists(pid)}


def lost_after() -> float:
    """Return the seconds without a heartbeat after which a rank is lost.

    They count once a connection has broken.
    """
    work_per_core = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    return LOST_AFTER * max(1.0, work_per_core / 2)


def ended_text(ended: Iterable[int]) -> str:
    """Return a line for each rank whose process has ended."""
    how = (
        "has ended before its program: its process was killed by a signal, or has called os._exit. "
        "The report of its launcher (torchrun, srun, mpirun) has the exit code"
    )
    return "\n  ".join(f"rank {rank} (on {socket.gethostname()}) {how}" for rank in sorted(ended))


def texts_of(name: str, size: int, store: dist.Store) -> list[bytes]:
    """Return the value that each rank has put into the store under this name; b"" if none yet."""
    keys = [f"{name}/{rank}" for rank in range(size)]
    if store.check(keys):
        return store.multi_get(keys)
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def loss_text(lost: Mapping[int, str], failure: Failure) -> str:
    """Return the message for lost ranks, found by a rank whose connection broke."""
    hosts = ", ".join(sorted(set(lost.values())))
    return (
        f"lost {ranks_text(lost)} (on {hosts}): a connection broke, and since then no heartbeat "
        "has come. The process was killed (perhaps out of memory: see the machine's log), or the "
        f"machine has stopped or lost its network.\n  {raised_text(failure)}"
    )


def raised_text(failure: Failure) -> str:
    return f"rank {failure.rank} raised {failure.headline}\n\n{failure.traceback}"


def silence_text(seconds: float, place: str) -> str:
    """Return the report of a store that does not answer, with the rank's place. The run goes on."""
    return (
        f"the job's store at {_store_address()} has not answered for {seconds:g} s. Its machine "
        f"may have stopped, or the network to it. This rank is at {place}"
    )


def store_loss_text(rank_was: str) -> str:
    """Return the message for a store whose connection has broken, with what the rank was doing."""
    return (
        f"the connection to the job's store at {_store_address()} has broken: the process that "
        "held it has ended (torchrun's on the first host, or rank 0's), or its machine.\n  "
        f"{rank_was}"
    )


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
