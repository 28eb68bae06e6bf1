"""However a launch ends, it leaves no process, open file, socket, thread or file behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.pictures import fresh_kernel
from parallel101.laboratory.ranks import processes
from parallel101.laboratory.ranks.wire import Wire
from tests.ranks.failing import fails

ENDINGS = {
    "result": lambda: torch.ones(3),
    "exception": lambda: 1 / 0 if dist.get_rank() == 1 else dist.barrier(),
    "death": lambda: os._exit(1) if dist.get_rank() == 1 else dist.barrier(),
    "deadlock": lambda: dist.recv(torch.empty(1), 1 - dist.get_rank()),
    "with a child": lambda: subprocess.Popen(["sleep", "1000"]).pid,
}


def state():
    """This process's descendants, descriptors, threads and files.

    (Of a launch only the fork server may stay.)
    """
    gc.collect()
    me = psutil.Process()
    return (
        sorted(child.pid for child in me.children(recursive=True)),
        me.num_fds(),
        threading.active_count(),
        os.listdir(tempfile.gettempdir()),
    )


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_nothing_is_left(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    gc.freeze()  # so that collecting garbage takes no half second each time
    p101.launch(lambda: None, world_size=2, backend=backend)
    before = state()
    for ending in ENDINGS if backend == "gloo" else ("exception", "deadlock"):
        with contextlib.suppress(RuntimeError):
            p101.launch(ENDINGS[ending], world_size=2, backend=backend, trace=True)
        assert state() == before, ending
    again = p101.launch(lambda: dist.get_rank(), world_size=2, backend=backend)
    assert again.results == [0, 1]
    gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_processes_that_a_rank_forks_do_not_delay_the_end():
    """They hold its end of every pipe.

    Whether they return or go on, the launch ends when its ranks do, and a death is reported. (A
    launch gives each rank that does not exit 5 s.)
    """

    def program(child_returns, end):
        rank, mine = dist.get_rank(), os.getpid()
        if os.fork() == 0 and not child_returns:
            while True:
                signal.pause()
        if end and rank == 1:
            os._exit(3)
        dist.barrier() if os.getpid() == mine else None
        return rank, os.getpid() == mine

    def loads():
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
        data = torch.utils.data.DataLoader(range(8), batch_size=2, **options)
        return sum(int(batch.sum()) for batch in data)

    began = time.monotonic()
    for child_returns in (True, False):
        run = p101.launch(program, child_returns, False, world_size=2)
        assert run.results == [(0, True), (1, True)]
    assert fails(p101.RankFailed, lambda: program(False, True), world_size=2).exitcode == 3
    assert time.monotonic() - began < 5
    assert p101.launch(loads, world_size=2).results == [28, 28]


SCRIPT = """
    import os, sys, time, traceback, parallel101 as p101

    def program():
        print("at work", os.getpid(), flush=True)
        while True:
            time.sleep(0.05)

    for _ in range(2):
        try:
            p101.launch(program, world_size=2)
        except KeyboardInterrupt:
            traceback.print_exc()
"""


def _gone(pids, within=5.0):
    def alive(pid):
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


CELL = """import time, parallel101 as p101
def sleeps():
    while 1: time.sleep(.1)
def divides():
    1 / 0
try:
    p101.launch(sleeps, world_size=1, timeout=0.5)
except p101.LaunchTimeout as error:
    assert "rank 0 is at cell [2], line 3: while 1: time.sleep(.1)" in str(error), error
p101.launch(divides, world_size=1)"""


@pytest.mark.skipif(processes.start_method() != "fork server", reason="ranks are spawned here")
def test_a_notebook_starts_the_fork_server_with_the_import_and_names_its_cells():
    program = """import parallel101, psutil, sys
assert len(psutil.Process().children()) == {} and 'torch' not in sys.modules"""
    subprocess.run([sys.executable, "-c", program.format(0)], check=True)
    before = psutil.Process().children()
    with fresh_kernel() as run:
        run(program.format(1))  # raises if an assert fails there
        (kernel,) = {*psutil.Process().children()} - {*before}
        servers = kernel.children()
        with pytest.raises(RuntimeError) as failed:
            run(CELL)
        assert kernel.children() == servers, "the launches have used it"
    assert _gone([server.pid for server in servers], within=30)
    told = re.sub(r"\x1b\[[0-9;]*m", "", str(failed.value))  # without colours
    assert "---> 10 p101.launch(divides, world_size=1)" in told
    assert "RankFailed: rank 0 raised ZeroDivisionError" in told
    assert "launch.py" not in told, "the cell's own frames only"


def test_ranks_end_after_an_interrupt_and_when_the_launching_process_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, str(script)], **streams, start_new_session=True)
    at_work = lambda: [int(process.stdout.readline().split()[-1]) for _ in range(2)]  # noqa: E731
    interrupted = at_work()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    killed = at_work()
    assert _gone(interrupted)
    family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    err = process.communicate(timeout=60)[1]
    assert err.count("KeyboardInterrupt") == 1
    assert re.search("interrupted: what the ranks did\n  ranks? 0( and 1)? (is|are) at", err)
    assert _gone(killed + family)


@pytest.mark.skipif(processes.start_method() != "fork server", reason="ranks are spawned here")
def test_an_interrupt_between_request_and_answer_does_not_confuse_the_next_launch(monkeypatch):
    p101.launch(lambda: None, world_size=1)

    send = socket.send_fds

    def interrupted(*request):
        send(*request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            p101.launch(lambda: None, world_size=2)
    assert p101.launch(dist.get_rank, world_size=2).results == [0, 1]


def test_an_interrupt_while_a_result_is_read_is_an_interrupt(monkeypatch):
    """The rest of the result stays in the socket, and is not read as a frame."""
    exactly = Wire._exactly

    def interrupted(self, count):
        if count == 40_000:
            raise KeyboardInterrupt
        return exactly(self, count)

    p101.launch(lambda: None, world_size=1)
    monkeypatch.setattr(Wire, "_exactly", interrupted)
    with pytest.raises(KeyboardInterrupt):
        p101.launch(lambda: torch.zeros(10_000), world_size=2)
    monkeypatch.undo()
    assert p101.launch(lambda: dist.get_rank(), world_size=2).results == [0, 1]
