"""Jobs of torchrun's do what they are asked to, by name, and leave no process behind."""

from __future__ import annotations

import sys

import psutil
import pytest

import parallel101 as p101
from parallel101.cli import main
from parallel101.laboratory.bench.collective_speed import TORCHS, time_rounds, time_torchs
from parallel101.laboratory.bench.peer_jobs import ask, peer_jobs
from parallel101.laboratory.bench.recording_cost import train


@pytest.mark.slow
def test_each_job_does_what_it_is_asked_and_its_errors_are_raised(tmp_path):
    record = ["-m", "parallel101", "run", "--record", str(tmp_path)]
    me = psutil.Process()
    before = {*me.children(recursive=True)}  # of other tests in this process
    with peer_jobs({TORCHS: ["launch"], "recorded": record}, ranks=1) as port:
        family = {*me.children(recursive=True)} - before
        names = ["recorded", TORCHS, "recorded"]
        took = [ask(port, name, train, count) for count, name in enumerate(names, start=1)]
        # the rank of a job answers two launched ones
        (turn,) = p101.launch(time_rounds, port, 1, "scatter", 1 << 10, world_size=2).results[0]
        with pytest.raises(RuntimeError, match="missing 2 required positional arguments"):
            ask(port, TORCHS, time_torchs, "scatter")
    assert all(seconds > 0 and cpu > 0 for seconds, cpu in took)
    assert len(turn) == 3 and min(turn.values()) > 0
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert len(gone) >= 2 * (1 + 1) and not alive
    # the job that records has trained 1 + 3 steps, and no other job's
    assert main(["merge", str(tmp_path)]) == 0
    trace = p101.Trace.load(tmp_path / "trace.json.gz")
    assert len(trace.spans("optimizer step")) == 4


def test_a_job_that_ends_before_it_is_asked_is_an_error(tmp_path, monkeypatch, capfd):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "no $*" >&2\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (
        pytest.raises(RuntimeError, match="the job 'broken' has ended: see what it printed"),
        peer_jobs({"broken": ["script.py"]}, ranks=3),
    ):
        pass
    started = "no -m torch.distributed.run --standalone --nproc-per-node 3 script.py -m "
    assert started in capfd.readouterr().err
