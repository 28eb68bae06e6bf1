"""Reports in a job of torchrun of ranks that keep the others waiting.

    rank 0    asks: "stacks/asked" is now 3 ──▶ the job's store ──▶ every rank, within a second
    all ranks answer: "stacks/3/<rank>"     ──▶ the job's store ──▶ rank 0: its stderr, and
                                                         reports.txt in the record's folder

Rank 0 asks when ranks have waited for long (see stuck.py), and any rank that gets SIGUSR1 asks.
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch.distributed as dist

from parallel101.laboratory.ranks.job_messages import from_json, to_json
from parallel101.laboratory.ranks.rank_stack import StackReader
from parallel101.laboratory.ranks.run_diagnosis import RunDiagnosis
from parallel101.laboratory.ranks.stuck import REPORTS

LOOK = 1.0  # seconds between two looks at whether a rank has asked
TO_ANSWER = 2.5  # seconds for all ranks to answer


class JobReports:
    """Answers for one rank, and on rank 0 writes the reports. One thread uses it.

    Args:
        stacks: reads the rank's.
        store: of the launch.
        diagnosis: on rank 0, with the status of all ranks.
    """

    def __init__(self, stacks: StackReader, store: dist.Store, diagnosis: RunDiagnosis):
        self.stacks, self.store, self.diagnosis = stacks, store, diagnosis
        self.rank, self.size = stacks.recorder.rank, len(diagnosis.graph.ranks)
        self.answered = self.reported = 0  # requests, by number
        self.no_progress = False  # rank 0 has asked, and no user
        self.next_look = self.until = 0.0
        if diagnosis.folder is not None and self.rank == 0:
            (diagnosis.folder / REPORTS).unlink(missing_ok=True)  # of an earlier run

    def look(self) -> None:
        """Answer requests and, on rank 0, write the reports. Call it ten times a second."""
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + LOOK
            self._answer()
        if self.rank:
            return
        if self.answered > self.reported:
            self._collect(now)
        elif now >= self.diagnosis.stuck.due(now, self.diagnosis.graph):
            self.no_progress = True
            self.ask()
            self._answer()

    def ask(self) -> None:
        """Ask for a report of what all ranks do."""
        self.next_look = 0.0
        self.store.add("stacks/asked", 1)

    def _answer(self) -> None:
        if (asked := self.store.add("stacks/asked", 0)) > self.answered:
            self.answered = asked
            self.store.set(f"stacks/{asked}/{self.rank}", to_json(self.stacks.read()))
            self.until = time.monotonic() + TO_ANSWER

    def _collect(self, now: float) -> None:
        """Report, on rank 0, as soon as all ranks have answered, or have had the time to."""
        keys = {rank: f"stacks/{self.answered}/{rank}" for rank in range(self.size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if len(there) < self.size and now < self.until:
            return
        stacks = {rank: from_json(self.store.get(key)) for rank, key in there.items()}
        for key in there.values():
            self.store.delete_key(key)
        head = "" if self.no_progress else "parallel101: what the ranks do now (SIGUSR1)"
        self.reported, self.no_progress = self.answered, False
        self.diagnosis.report(stacks, head)


def write_report(text: str) -> None:
    """Write a report on stderr."""
    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
