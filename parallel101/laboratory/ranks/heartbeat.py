"""Tells which ranks of a job are alive, and whether its store answers.

    rank 1, twice a second ──▶ the store: heartbeat/1 = a count, and the name of its host
    rank 0                 ──▶ reads all: "no heartbeat from rank 1 (on node1) for 10 s"

A rank without a heartbeat may be stopped, or its machine may be gone for a while. So this only
reports it. A rank without one after a connection has broken counts as lost.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch.distributed as dist

from parallel101.laboratory.ranks.diagnosis import rank_lines, work_per_core
from parallel101.laboratory.ranks.job_messages import from_json, to_json
from parallel101.laboratory.ranks.wire import Failure
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.record.wait_for import RankStatus

BEAT_EVERY = 0.4  # seconds
LOOK_EVERY = 1.0  # seconds
SILENT_FOR = 10  # looks without a heartbeat after which a rank is reported
# seconds without one after which a rank is lost, once a connection has broken; longer on a machine
# that has far more work than cores
LOST_AFTER = 1.4


class Heartbeat:
    """Sends a rank's own heartbeat and, on rank 0, checks those of all ranks."""

    def __init__(self, rank: int, size: int, store: dist.Store):
        self.rank, self.size, self.store = rank, size, store
        self.count, self.due = 0, 0.0
        self.seen = [b""] * size
        self.unchanged = [0] * size  # by rank: looks since its last heartbeat
        self.reported: set[int] = set()
        self.next_look = 0.0

    def beat(self) -> None:
        """Put one into the store, if it is time."""
        if time.monotonic() >= self.due:
            self.count, self.due = self.count + 1, time.monotonic() + BEAT_EVERY
            self.store.set(f"heartbeat/{self.rank}", to_json([self.count, socket.gethostname()]))

    def newly_silent(self) -> dict[int, str]:
        """Return ranks that have been silent for SILENT_FOR looks, with their hosts.

        Each silence is returned once. Looks are counted and not seconds, because this process
        itself may have been stopped.
        """
        if time.monotonic() < self.next_look:
            return {}
        self.next_look = time.monotonic() + LOOK_EVERY
        texts = self.texts()
        for rank, text in enumerate(texts):
            self.unchanged[rank] = self.unchanged[rank] + 1 if text == self.seen[rank] else 0
        self.seen = texts
        silent = {rank for rank, looks in enumerate(self.unchanged) if looks >= SILENT_FOR}
        self.reported &= silent
        # a look later than it could be, so that the ranks of one host are reported together
        if all(self.unchanged[rank] == SILENT_FOR for rank in silent - self.reported):
            return {}
        new, self.reported = sorted(silent - self.reported), silent
        return {rank: _host(texts[rank]) for rank in new if texts[rank]}

    def texts(self) -> list[bytes]:
        """Return the newest heartbeat of each rank."""
        return texts_of("heartbeat", self.size, self.store)

    def lost(self, before: Sequence[bytes]) -> dict[int, str]:
        """Return ranks without a heartbeat since `before`, a result of `texts`, with hosts."""
        return {
            rank: _host(text)
            for rank, text in enumerate(self.texts())
            if text and text == before[rank] and rank != self.rank
        }


def lost_after() -> float:
    """Return the seconds without a heartbeat after which a rank is lost.

    They count once a connection has broken.
    """
    return LOST_AFTER * max(1.0, work_per_core() / 2)


class StoreWatch(threading.Thread):
    """Reports that the job's store does not answer. The run goes on.

    While a call of the store does not return, the thread that called it can't say anything.

    Attributes:
        answers: count it up whenever the store has answered.
    """

    def __init__(self, rank: int, place: Callable[[], str]):
        super().__init__(daemon=True, name="parallel101 store watch")
        self.rank, self.place = rank, place
        self.answers = 0
        self.over = threading.Event()

    def run(self) -> None:
        seen, unchanged = -1, 0
        while not self.over.wait(LOOK_EVERY):
            unchanged = unchanged + 1 if self.answers == seen else 0
            seen = self.answers
            if unchanged == SILENT_FOR:
                write_line(
                    self.rank,
                    f"the job's store at {_store_address()} has not answered for {SILENT_FOR} s. "
                    "Its machine may have stopped, or the network to it. This rank is at "
                    f"{shown(self.place())}",
                )

    def stop(self) -> None:
        self.over.set()
        if self.ident is not None:
            self.join(LOOK_EVERY)


def texts_of(name: str, size: int, store: dist.Store) -> list[bytes]:
    """Return the value that each rank has put into the store under this name; b"" if none yet."""
    keys = [f"{name}/{rank}" for rank in range(size)]
    if store.check(keys):
        return store.multi_get(keys)
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def silence_text(silent: Mapping[int, str], statuses: Sequence[RankStatus]) -> str:
    """Return a report on silent ranks, given their hosts, and on the ranks that wait for them."""
    others = [RankStatus() if rank in silent else status for rank, status in enumerate(statuses)]
    advice = (
        "A machine may have stopped, or lost its network. If its other ranks go on, a process may "
        "be stopped, or be busy in C code that keeps Python from running."
    )
    first = f"no heartbeat from {_who(silent)} for {SILENT_FOR} s"
    return "\n  ".join([first, *rank_lines(others, {}), advice])


def loss_text(lost: Mapping[int, str], failure: Failure) -> str:
    """Return the message for lost ranks, found by a rank whose connection broke."""
    return (
        f"lost {_who(lost)}: a connection broke, and since then no heartbeat has come. The process "
        "was killed (perhaps out of memory: see the machine's log), or the machine has stopped or "
        f"lost its network.\n  {raised_text(failure)}"
    )


def raised_text(failure: Failure) -> str:
    return f"rank {failure.rank} raised {failure.headline}\n\n{failure.traceback}"


def store_loss_text(rank_was: str) -> str:
    """Return the message for a store whose connection has broken, with what the rank was doing."""
    return (
        f"the connection to the job's store at {_store_address()} has broken: the process that "
        "held it has ended (torchrun's on the first host, or rank 0's), or its machine.\n  "
        f"{rank_was}"
    )


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def write_line(rank: int, text: str) -> None:
    """Write a line of a rank on stderr."""
    sys.stderr.write(f"[rank {rank}] {text}\n")
    sys.stderr.flush()


def _who(ranks: Mapping[int, str]) -> str:
    return f"{ranks_text(ranks)} (on {_names(ranks.values())})"


def _names(hosts: Collection[str]) -> str:
    return ", ".join(sorted(set(hosts)))


def _host(heartbeat: bytes) -> str:
    return str(from_json(heartbeat)[1])
