"""The same script by `python script.py` and by `torchrun`: two launches in one program, every rank gets all results."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import os, sys, threading, torch, torch.distributed as dist, parallel101 as p101

    def total():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        return x.item(), torch.full((2,), dist.get_rank())

    first = p101.launch(total, world_size=int(sys.argv[1]), trace=True)
    second = p101.launch(lambda k: k + dist.get_rank(), 10, world_size=int(sys.argv[1]))
    if "fail" in sys.argv:
        p101.launch(lambda: 1 / 0 if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    if "deadlock" in sys.argv:
        p101.launch(lambda: dist.recv(torch.empty(1), 1 - dist.get_rank()), world_size=2)
    if "misuse" in sys.argv:
        op = lambda: (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank()]
        p101.launch(lambda: dist.all_reduce(torch.ones(2), op=op()), world_size=2, trace=True)
    if "changed" in sys.argv:
        def change():
            x = torch.ones(4)
            work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
            x.mul_(2)
            work.wait()
        try:
            p101.launch(change, world_size=2, trace=True)
        except p101.MisuseError as error:
            sys.exit(f"caught: {error}")
    if "sizes" in sys.argv:  #  gloo waits for ever
        p101.launch(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), world_size=2, trace=True)
    if "order" in sys.argv:
        calls = [dist.barrier, lambda: dist.all_reduce(torch.ones(1))]
        p101.launch(lambda: [call() for call in calls[:: 1 - 2 * dist.get_rank()]], world_size=2)
    if "result" in sys.argv:
        p101.launch(lambda: (i for i in range(3)) if dist.get_rank() == 1 else None, world_size=2)
    if "absent" in sys.argv and os.environ["RANK"] == "1":
        p101.launch(total, world_size=2, timeout=1)
    if "abort" in sys.argv:
        p101.launch(lambda: os.abort() if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    watchers = [thread.name for thread in threading.enumerate() if "parallel101" in thread.name]
    assert not watchers, f"{watchers} would be stopped in the middle of something as Python ends"
    sim = p101.launch(lambda: dist.get_rank(), world_size=3, backend="sim")
    values = [value for value, _ in first.results], [t.tolist() for _, t in first.results]
    line = f"{values} {second.results} {len(first.trace.events)} {sim.results}\\n"
    sys.stdout.write(line)
"""
SAID = "([3.0, 3.0], [[0, 0], [1, 1]]) [10, 11] 2 [0, 1, 2]"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def _run(*command):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=environ)


def _torchrun(*arguments):
    return _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments)


def test_by_python(script):
    done = _run(script, "2")
    assert done.stdout.splitlines() == [SAID], done.stderr


def test_by_torchrun(script):
    done = _torchrun(script, "2")
    assert done.stdout.splitlines() == [SAID, SAID], done.stderr


def test_a_world_size_that_is_not_the_jobs(script):
    done = _torchrun(script, "3")
    assert done.returncode
    assert "world_size is 3, but this job has 2 ranks" in done.stderr


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fail", "rank 1 raised ZeroDivisionError"),
        ("deadlock", "rank 0 waits in recv from rank 1"),
        ("misuse", "different reductions: sum and max"),
        ("changed", "caught: rank 0 changed a tensor"),
        ("sizes", "different shapes: (2,) and (3,)"),
        ("order", "all_reduce on rank 1"),
        ("result", "rank 1 returned a generator that can't be pickled"),
        ("absent", "rank 0 had not come to this launch"),
        ("abort", f'script.py", line {SCRIPT[: SCRIPT.index("os.abort")].count(chr(10)) + 1} in <lambda>'),
    ],
)
def test_failures_end_the_job_with_their_story(script, how, said):
    done = _torchrun(script, "2", how)
    assert done.returncode
    assert said in done.stderr
