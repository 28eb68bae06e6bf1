"""Jobs of torchrun's do what they are asked to, by name, and leave no process behind."""

from __future__ import annotations

import psutil
import pytest

import parallel101 as p101
from parallel101.cli import main
from parallel101.laboratory.bench.collective_speed import TORCHS, time_rounds, time_torchs
from parallel101.laboratory.bench.peer_jobs import ask, peer_jobs
from parallel101.laboratory.bench.recording_cost import train

pytestmark = pytest.mark.slow


def test_each_job_trains_when_it_is_asked(tmp_path):
    record = ["-m", "parallel101", "run", "--record", str(tmp_path)]
    me = psutil.Process()
    before = {*me.children(recursive=True)}  # of other tests in this process
    with peer_jobs({"launched": ["launch"], "recorded": record}) as port:
        names = ["recorded", "launched", "recorded"]
        took = [ask(port, name, train, count) for count, name in enumerate(names, start=1)]
        family = {*me.children(recursive=True)} - before
    assert all(seconds > 0 and cpu > 0 for seconds, cpu in took)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert len(gone) >= 2 * (1 + 2) and not alive
    # the job that records has trained 1 + 3 steps, and no other job's
    assert main(["merge", str(tmp_path)]) == 0
    trace = p101.Trace.load(tmp_path / "trace.json.gz")
    steps = [span.rank for span in trace.spans("optimizer step")]
    assert sorted(steps) == [0] * 4 + [1] * 4


def test_ranks_of_a_launch_ask_a_job_and_its_errors_are_raised():
    with peer_jobs({TORCHS: []}) as port:
        for name in ("scatter", "all_reduce"):  # two ranks of the job answer three launched ones
            rounds = p101.launch(time_rounds, port, 2, name, 1 << 10, world_size=3).results[0]
            assert [len(turn) for turn in rounds] == [3, 3]
            assert all(min(turn.values()) > 0 for turn in rounds)
        with pytest.raises(RuntimeError, match="missing 2 required positional arguments"):
            ask(port, TORCHS, time_torchs, "scatter")


def test_a_job_that_ends_before_it_is_asked_is_an_error(capfd):
    with (
        pytest.raises(RuntimeError, match="the job 'broken' has ended: see what it printed"),
        peer_jobs({"broken": ["no_such_script.py"]}),
    ):
        pass
    assert "no_such_script.py" in capfd.readouterr().err
