"""Jobs of torchrun's that train the same thing and are timed in turn, to compare their settings.

    this process ── "10 steps" ──▶ TCPStore ──▶ job "torchrun alone": 2 ranks train 10 steps
                 ◀── took ───────           ◀── its rank 0
                 ── "10 steps" ──▶          ──▶ job "recording": the same; …

All jobs are there from the start, and those that are not asked sleep. So the two times of a pair
are measured right after each other. The script of such a job is timed_script.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel101.laboratory.bench.sides import batch_of_rank, ddp, whole_model

HOUR = timedelta(hours=1)
RANKS = 2
WIDTH = 592  # of the model: a step then takes about 50 ms on a core with AVX2
SCRIPT = "parallel101.laboratory.bench.timed_script"


class TimedStep(NamedTuple):
    """The time of one training step on rank 0."""

    seconds: float
    cpu: float  # seconds of CPU time of the whole process


@contextmanager
def timed_jobs(commands: Mapping[str, Sequence[str]]) -> Iterator[JobTimer]:
    """Start jobs inside the with block.

    Args:
        commands: of each job, what torchrun runs: [] is the script itself, ["launch"] the script
            that launches its training, and another list what comes before `-m` and the script.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=HOUR, wait_for_workers=False)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    jobs = []
    try:
        for name, command in commands.items():
            before, after = ([], command) if command == ["launch"] else (command, [])
            script = [*before, "-m", SCRIPT, str(store.port), name, *after]
            job = subprocess.Popen(
                [*torchrun, str(RANKS), *script], env=environ, stdout=subprocess.DEVNULL
            )
            jobs.append(job)
        yield JobTimer(store, dict(zip(commands, jobs)))
        for name in commands:
            store.set(f"{name}/over", "")
        for job in jobs:
            job.wait(60)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()  # torchrun then ends its ranks
                job.wait(60)


class JobTimer:
    """Asks jobs to train, one at a time."""

    def __init__(self, store: dist.TCPStore, jobs: Mapping[str, subprocess.Popen]):
        self.store, self.jobs = store, jobs
        self.turns = dict.fromkeys(jobs, 0)

    def step(self, name: str, count: int) -> TimedStep:
        """Return the time of a step, as the mean over `count` steps.

        Raises RuntimeError if the job has ended.
        """
        turn = self.turns[name] = self.turns[name] + 1
        self.store.set(f"{name}/{turn}", str(count))
        while not self.store.check([f"{name}/{turn}/took"]):
            if self.jobs[name].poll() is not None:
                raise RuntimeError(f"the job {name!r} has ended: see what it printed")
            time.sleep(0.01)
        return TimedStep(*json.loads(self.store.get(f"{name}/{turn}/took")))


def train_when_asked(port: int, name: str) -> None:
    """Train whenever the job is asked to; each rank of a job runs this."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=HOUR)
    step, turn = ddp(whole_model(WIDTH)), 1
    batch = batch_of_rank(True, WIDTH)
    while True:
        while not store.check([key := f"{name}/{turn}"]):
            if store.check([f"{name}/over"]):
                return
            time.sleep(0.02)
        count = int(store.get(key))
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = step(*batch)
            dist.all_reduce(loss)
        took = [(time.perf_counter() - began) / count, (time.process_time() - cpu) / count]
        if dist.get_rank() == 0:
            store.set(f"{key}/took", json.dumps(took))
        turn += 1
