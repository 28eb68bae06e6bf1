"""The thread that watches over one rank of a torchrun job: there is no launching process, so the ranks report to the job's store.

    every rank ── where it stands, what it has posted ──▶ store ──▶ rank 0: deadlock? misuse? too late? ── verdict ──▶ store ──▶ every rank

A rank that is blocked for ever can't be woken (gloo has no way to): it prints what happened, its process ends, and torchrun ends the job.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time

import torch.distributed as dist

from parallel101.backends.record import Ledger, Posted
from parallel101.errors import LaunchTimeout, named
from parallel101.ranks.blocked import Gaze
from parallel101.trace.board import Board, Standing
from parallel101.trace.calls import Call
from parallel101.trace.checks import Referee
from parallel101.trace.where import shown, where

TICK = 0.1  #  seconds between two looks
GRACE = 1.0  #  seconds for a rank to end by itself once the run has failed


class JobWatcher(threading.Thread):
    """Publishes where this rank stands; on rank 0, reads where all stand; ends a rank that can't go on.

    Args:
        ledger: of the rank that is watched over.
        store: a connection of its own to the store of this launch.
        size: ranks of the job.
        timeout: seconds the launch may take.
        calls: to which a checked run appends what this rank posts.
    """

    def __init__(self, ledger: Ledger, store: dist.Store, size: int, timeout: float, calls: list[Call]):
        super().__init__(daemon=True, name="parallel101 job watcher")
        self.ledger, self.store, self.size, self.timeout, self.calls = ledger, store, size, timeout, calls
        self.gaze = Gaze(ledger)
        #  any rank can tell when the time is over: rank 0 may not have come to this launch at all
        self.deadline = time.monotonic() + timeout + (0.0 if ledger.rank == 0 else GRACE)
        self.done = threading.Event()  #  this rank's function has returned
        self.over = threading.Event()
        self.board = Board(size)
        self.referee = Referee()
        self.told = self.batches = 0  #  calls that were published, and in how many batches
        self.heard = [0] * size  #  batches of them that were read, by rank
        self.announced = False  #  the verdict is this rank's
        self._publish(Standing())

    def run(self) -> None:
        seen: Posted | None = None
        reported: Posted | None = None
        while not self.over.wait(TICK):
            try:
                waiting = self.gaze.blocked_in()
                if not self.done.is_set() and waiting is not reported and (waiting is None or waiting is seen):
                    self._publish(self._standing(waiting))
                    reported = waiting
                seen = waiting
                self._tell_calls()
                if self.ledger.rank == 0:
                    self._look()
                if time.monotonic() > self.deadline:
                    self.announce(self._too_late())
                if (failure := self.verdict(within=0.0)) is not None:
                    self._end(failure)
            except (RuntimeError, OSError):
                return  #  the store is gone, and the job with it

    def stop(self) -> None:
        """The launch is over. (A thread that is still in the store when Python ends would take the process down.)"""
        self.over.set()
        self.join(GRACE)

    def verdict(self, within: float) -> BaseException | None:
        """What some rank has announced, or announces in the next seconds."""
        deadline = time.monotonic() + within
        while not self.store.check(["verdict"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        return pickle.loads(bytes.fromhex(self.store.get("verdict").decode()))

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that the run has failed, unless somebody has already."""
        ours = pickle.dumps(error).hex()
        self.announced = self.store.compare_set("verdict", "", ours).decode() == ours

    def returned(self) -> None:
        """This rank's function has returned. Waits until all have, or raises what went wrong elsewhere."""
        self.done.set()
        self._publish(Standing(None, True, *self.ledger.report()))
        self.store.add("returned", 1)
        while self.store.add("returned", 0) < self.size:
            if (failure := self.verdict(within=0.001)) is not None:
                raise failure

    def _standing(self, waiting: Posted | None) -> Standing:
        call = None if waiting is None else waiting.call(self._place())
        return Standing(call, False, *self.ledger.report())

    def _place(self) -> str:
        return where(sys._current_frames().get(self.ledger.thread))

    def _publish(self, standing: Standing) -> None:
        self.store.set(f"standing/{self.ledger.rank}", pickle.dumps(standing))  # type: ignore[arg-type]  #  bytes will do

    def _tell_calls(self) -> None:
        if new := self.calls[self.told :]:
            self.store.set(f"calls/{self.ledger.rank}/{self.batches}", pickle.dumps(new))  # type: ignore[arg-type]
            self.told += len(new)
            self.batches += 1

    def _look(self) -> None:
        """On rank 0: whatever can be known of all ranks."""
        self.board.ranks = self._standings()
        if (misuse := self.referee.verdict()) is not None:
            self.announce(misuse)
        elif (found := self.board.deadlock(time.monotonic())) is not None:
            self.announce(found)
        for rank in range(self.size) if self.ledger.tell is not None else ():
            while self.store.check([f"calls/{rank}/{self.heard[rank]}"]):
                for call in pickle.loads(self.store.get(f"calls/{rank}/{self.heard[rank]}")):
                    self.referee.hear(call)
                self.heard[rank] += 1

    def _standings(self) -> list[Standing]:
        keys = [f"standing/{rank}" for rank in range(self.size)]
        if self.store.check(keys):
            return [pickle.loads(data) for data in self.store.multi_get(keys)]
        return [pickle.loads(self.store.get(key)) if self.store.check([key]) else Standing() for key in keys]

    def _too_late(self) -> LaunchTimeout:
        said = [f"the ranks were still at work after {self.timeout:g} s (launch(..., timeout=seconds) allows more):"]
        for rank, standing in enumerate(self._standings()):
            if standing.returned:
                said.append(f"  rank {rank} had returned")
            elif standing.blocked is not None:
                said.append(f"  rank {rank} waited in {standing.blocked.kind}, at {shown(standing.blocked.where)}")
            elif not self.store.check([f"standing/{rank}"]):
                said.append(f"  rank {rank} had not come to this launch: every process of the job must make the same launches")
        return LaunchTimeout("\n".join(said))

    def _end(self, error: BaseException) -> None:
        """The run has failed. This rank's own thread raises if it can; if it is blocked, the process ends."""
        if self.over.wait(GRACE):
            return
        if self.announced:
            sys.stderr.write(f"[rank {self.ledger.rank}] {named(error)}\n")
        if isinstance(error, LaunchTimeout):
            sys.stderr.write(f"[rank {self.ledger.rank}] was at {shown(self._place())}\n")
        sys.stderr.flush()
        os._exit(1)
