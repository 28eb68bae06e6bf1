"""A rank that doesn't come is reported with its stack while the run goes on, on all starters.

A FIFO blocks the rank, as a full disk or a dead worker's queue does, or SIGSTOP stops it. The test
opens the other end, or continues it, when it has seen the report. Then the run must succeed.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import line_of
from tests.ranks.job import Job

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


class Reactions(io.StringIO):
    """A stderr that calls a function when certain words have been written, one after the other."""

    def __init__(self, *reactions):
        super().__init__()
        self.reactions = list(reactions)

    def write(self, text):
        count = super().write(text)
        if self.reactions and self.reactions[0][0] in self.getvalue():
            # a thread, because opening a FIFO blocks
            threading.Thread(target=self.reactions.pop(0)[1]).start()
        return count


def report(text, head):
    """The lines of one report."""
    lines = text[text.index(head) :].splitlines()
    end = next((i for i, line in enumerate(lines) if i and not line.startswith("  ")), len(lines))
    return "\n".join(lines[:end])


def total(fifo):
    if dist.get_rank() == 1:
        wait_for(fifo)
    x = torch.ones(2)
    dist.all_reduce(x)
    return x[0].item()


def wait_for(fifo):
    open(fifo).close()


def release(fifo):
    with open(fifo, "w"):
        pass


STUCK = "parallel101: no progress for"
ASKED = "parallel101: what the ranks do now (SIGUSR1)"


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_report_names_the_line_of_the_rank_that_does_not_come_and_the_run_goes_on(
    backend, fifo, monkeypatch
):
    shown = Reactions(
        (STUCK, lambda: os.kill(os.getpid(), signal.SIGUSR1)), (ASKED, lambda: release(fifo))
    )
    monkeypatch.setattr(sys, "stderr", shown)
    before = signal.getsignal(signal.SIGUSR1)
    results = p101.launch(total, fifo, world_size=3, backend=backend, stuck_after=0.5).results
    assert results == [3.0, 3.0, 3.0] and signal.getsignal(signal.SIGUSR1) == before
    for told in (report(shown.getvalue(), head) for head in (STUCK, ASKED)):
        whom = "rank 1" if backend == "gloo" else r"ranks 1 and 2"
        who = r"(rank 0 waits|ranks 0 and 2 wait)"
        assert re.search(rf"{who} in all_reduce for {whom}, at .*all_reduce\(x\)", told)
        assert f"rank 1 is at {line_of(wait_for, 'open(fifo)')}: open(fifo).close()" in told
        assert f"line {line_of(total, 'wait_for(fifo').rpartition(':')[2]}, in total" in told
        assert "of a core: it " in told  # what it does depends on its start, on a busy machine
    assert "worker.py" not in shown.getvalue(), "a stack has the program's frames only"


STOPPED = "parallel101: a signal has stopped rank 1. To continue: kill -CONT "


def stops(pids):
    if (rank := dist.get_rank()) == 1:
        Path(pids).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))
    return rank


def test_a_rank_that_a_signal_has_stopped_is_named(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    shown = Reactions((STOPPED, lambda: os.kill(int(pid.read_text()), signal.SIGCONT)))
    monkeypatch.setattr(sys, "stderr", shown)
    assert p101.launch(stops, str(pid), world_size=3).results == [0, 1, 2]
    line = f"ranks 0 and 2 wait in all_reduce for rank 1, at {line_of(stops, 'all_reduce')}"
    assert f"{STOPPED}{pid.read_text()}\n  {line}" in shown.getvalue()


# Rank 0 is stopped, then rank 1, which then does not come to a collective. Later nobody waits in
# one, and rank 0 returns first.
SCRIPT = """
    import os, signal, sys, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if (rank := dist.get_rank()) == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        open("fifo").close()
    dist.all_reduce(torch.ones(2))
    sys.stderr.write("begun\\n")
    open(f"fifo {rank}").close()
"""


def test_in_a_job(fifo, tmp_path):
    """The report and another one after SIGUSR1 to a rank, also as a file; after Ctrl-C, a line."""
    for rank in range(2):
        os.mkfifo(tmp_path / f"fifo {rank}")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    job = Job(tmp_path, ["run", "--record", "kept", "--stuck-after", "0.3", "train.py"])
    blocked = 'rank 1 is at train.py:11: open("fifo").close()'
    ask_rank_1 = lambda: job.signal(signal.SIGUSR1, 1)  # noqa: E731
    text = job.react(
        (STOPPED.replace("rank 1", "rank 0"), lambda: job.signal(signal.SIGCONT, 0)),
        (STOPPED, lambda: job.signal(signal.SIGCONT, 1)),
        (blocked, ask_rank_1),
        (ASKED, lambda: release(fifo)),
        ("begun", lambda: None),
        ("begun", ask_rank_1),
        (ASKED, lambda: release(f"{fifo} 0")),
        ("rank 0 has returned", lambda: job.signal(signal.SIGINT)),  # as torchrun after Ctrl-C
    )
    assert job.exitcodes[1] != 0
    waits = "rank 0 waits in all_reduce for rank 1, at train.py:12: dist.all_reduce"
    assert waits in report(text, STOPPED)
    # a report that came before did not know where rank 1 was
    for told in (
        report(text[text.rindex(STUCK, 0, text.index(blocked)) :], STUCK),
        report(text, ASKED),
    ):
        assert waits in told and blocked in told
    told = report(text[text.rindex(ASKED) :], ASKED)
    # on one line, if both had the same stack when they were asked
    alone = [f"rank {rank} is at train.py:14: open(" for rank in (0, 1)]
    assert "ranks 0 and 1 are at train.py:14: open(" in told or all(one in told for one in alone)
    told = report(text[text.rindex(STUCK) :], STUCK)
    assert "rank 0 has returned" in told and "rank 1 is at train.py:14: open(" in told
    assert re.search(r'KeyboardInterrupt|"train.py", line 14|interrupted at train.py:14', text)
    kept = (tmp_path / "kept" / "reports.txt").read_text()
    assert kept.count(ASKED) == 2 and STUCK in kept
    files = ["rank-0.json.gz", "rank-1.json.gz", "reports.txt"]
    assert sorted(os.listdir(tmp_path / "kept")) == files
