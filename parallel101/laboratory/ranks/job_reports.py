"""Reports in a job of torchrun of ranks that keep the others waiting.

    rank 0    asks: "stacks/asked" is now 3 ──▶ the job's store ──▶ every rank, within a second
    all ranks answer: "stacks/3/<rank>"     ──▶ the job's store ──▶ rank 0: its stderr, and
                                                         reports.txt in the record's folder

Rank 0 asks when ranks have waited for long (see stuck.py), and any rank that gets SIGUSR1 asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from parallel101.laboratory.ranks.job_messages import from_json, to_json
from parallel101.laboratory.ranks.rank_stack import (
    StackReader,
    ask_by_signal,
    no_stack_on_signal,
    stack_of_dump,
    stack_on_signal,
)
from parallel101.laboratory.ranks.run_diagnosis import RunDiagnosis
from parallel101.laboratory.ranks.stuck import REPORTS, report_lines
from parallel101.laboratory.record.recorder import RankRecorder
from parallel101.laboratory.record.wait_for import RankStatus, WaitForGraph

LOOK = 1.0  # seconds between two looks at whether a rank has asked
TO_ANSWER = 2.5  # seconds for all ranks to answer
TO_DUMP = 0.5  # seconds for a rank to write its stack when a signal has asked for it


class JobReports:
    """Answers for one rank, and on rank 0 writes the reports. One thread uses it.

    Args:
        recorder: of the rank.
        store: of the launch.
        diagnosis: on rank 0, with the status of all ranks.
    """

    def __init__(self, recorder: RankRecorder, store: dist.Store, diagnosis: RunDiagnosis):
        self.recorder, self.store, self.diagnosis = recorder, store, diagnosis
        self.size = len(diagnosis.graph.ranks)
        self.rank = recorder.rank
        self.said = False  # that this rank was interrupted
        self.returned = False  # its program has returned
        self.reader = StackReader(recorder)
        self.answered = self.reported = 0  # requests, by number
        self.own = 0  # how many of them came from the detector
        self.by_hand = 0  # how many of the others were reported
        self.next_look = self.until = 0.0
        self.silent: list[int] = []  # ranks that a signal has asked
        stderr = sys.__stderr__ or sys.stderr
        # a file in memory, which rank 0 reads if it is on the same host (Linux)
        self.dump = os.memfd_create("stack") if hasattr(os, "memfd_create") else None
        stack_on_signal(stderr if self.dump is None else self.dump, stderr)
        store.set(f"process/{self.rank}", to_json([socket.gethostname(), os.getpid(), self.dump]))
        if diagnosis.folder is not None and self.rank == 0:
            (diagnosis.folder / REPORTS).unlink(missing_ok=True)  # of an earlier run

    def look(self) -> None:
        """Answer requests and, on rank 0, write the reports. Call it ten times a second."""
        self.reader.look()
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + LOOK
            self._answer()
        if self.rank:
            return
        if self.answered > self.reported:
            self._collect(now)
        elif now >= self.diagnosis.stuck.due(now, self.diagnosis.graph):
            self.own += 1
            self.ask()
            self._answer()

    def ask(self) -> None:
        """Ask for a report of what all ranks do."""
        self.next_look = 0.0
        self.store.add("stacks/asked", 1)

    def interrupted(self, frame: FrameType | None = None) -> None:
        """Write what this rank does, once, because Ctrl-C has come.

        `frame`: where its program is, if its own thread calls this.
        """
        if self.said:
            return
        self.said = True
        stack = self.reader.read(interrupted=frame)
        graph = WaitForGraph(self.size)
        graph.ranks[self.rank] = RankStatus(None, self.returned)
        if (waiting := self.recorder.waiting) is not None:
            # what the other ranks have posted is not known here
            call = waiting.call(stack.place)
            peer = f" for rank {call.peers[0]}" if len(call.peers) == 1 else ""
            stack = stack._replace(waits=f"in {call.kind}{peer}")
        lines = report_lines(graph, {self.rank: stack}, [self.rank])
        self.diagnosis.say("\n  ".join([f"[rank {self.rank}] interrupted", *lines]))

    def close(self) -> None:
        """End the reports: the launch is over."""
        no_stack_on_signal()
        if self.dump is not None:
            os.close(self.dump)

    def _answer(self) -> None:
        if (asked := self.store.add("stacks/asked", 0)) > self.answered:
            self.answered = asked
            self.store.set(f"stacks/{asked}/{self.rank}", to_json(self.reader.read()))
            self.until = time.monotonic() + TO_ANSWER

    def _collect(self, now: float) -> None:
        """Report, on rank 0, as soon as all ranks have answered, or have had the time to."""
        keys = {rank: f"stacks/{self.answered}/{rank}" for rank in range(self.size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if len(there) < self.size and now < self.until:
            return
        missing = [rank for rank in keys if rank not in there]
        if missing and not self.silent:
            self.silent, self.until = missing, now + TO_DUMP
            for pid, _ in self._processes_here(missing).values():
                ask_by_signal(pid)
            return
        stacks = {rank: from_json(self.store.get(key)) for rank, key in there.items()}
        for rank, (pid, file) in self._processes_here(missing).items():
            if dump := _dump_of(pid, file):
                stacks[rank] = stack_of_dump(rank, dump, pid)
        for key in there.values():
            self.store.delete_key(key)
        # a rank may have asked in the same moment as the detector
        by_hand, self.by_hand = self.by_hand, self.answered - self.own
        self.reported, self.silent = self.answered, []
        asked = "parallel101: what the ranks do now (SIGUSR1)" if self.by_hand > by_hand else ""
        self.diagnosis.report(stacks, asked)

    def _processes_here(self, ranks: Sequence[int]) -> dict[int, tuple[int, int | None]]:
        """Return the process id and the file for the stack of each of these ranks on this host."""
        processes = {}
        for rank in ranks:
            if self.store.check([f"process/{rank}"]):
                host, pid, file = from_json(self.store.get(f"process/{rank}"))
                if host == socket.gethostname():
                    processes[rank] = pid, file
        return processes


def write_report(text: str) -> None:
    """Write a report on stderr."""
    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _dump_of(pid: int, file: int | None) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/{file}").read_text(errors="replace") if file else ""
    return ""
