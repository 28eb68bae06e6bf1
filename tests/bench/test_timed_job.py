"""Jobs of torchrun's are timed in turn, by name, and leave no process behind."""

from __future__ import annotations

import psutil
import pytest

import parallel101 as p101
from parallel101.cli import main
from parallel101.laboratory.bench.timed_job import RANKS, timed_jobs

pytestmark = pytest.mark.slow


def test_each_job_trains_when_it_is_asked(tmp_path, capsys):
    record = ["-m", "parallel101", "run", "--record", str(tmp_path)]
    me = psutil.Process()
    before = {*me.children(recursive=True)}  # of other tests in this process
    with timed_jobs({"launched": ["launch"], "recorded": record}) as timer:
        names = ["recorded", "launched", "recorded"]
        took = [timer.step(name, count) for count, name in enumerate(names, start=1)]
        family = {*me.children(recursive=True)} - before
    assert all(job.poll() == 0 for job in timer.jobs.values())
    assert timer.turns == {"launched": 1, "recorded": 2}
    for step in took:
        assert step.seconds > 0 and step.cpu > 0
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert len(gone) >= 2 * (1 + RANKS) and not alive
    # the job that records has trained 1 + 3 steps, and no other job's
    assert main(["merge", str(tmp_path)]) == 0
    trace = p101.Trace.load(tmp_path / "trace.json.gz")
    steps = [span.rank for span in trace.spans("optimizer step")]
    assert sorted(steps) == [0] * 4 + [1] * 4


def test_to_ask_a_job_that_has_ended_is_an_error(capfd):
    with (
        pytest.raises(RuntimeError, match="the job 'broken' has ended: see what it printed"),
        timed_jobs({"broken": ["no_such_script.py"]}) as timer,
    ):
        timer.step("broken", 1)
    assert "no_such_script.py" in capfd.readouterr().err
    assert timer.jobs["broken"].poll() not in (None, 0)
