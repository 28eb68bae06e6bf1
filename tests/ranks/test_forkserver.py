"""The fork server: the modules that ranks find imported, and the memory that a fork copies."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import parallel101 as p101
from parallel101.laboratory.ranks import processes
from parallel101.laboratory.ranks.processes import kill, start_method, start_ranks, stop_server

pytestmark = pytest.mark.skipif(start_method() != "fork server", reason="ranks are spawned here")


# Linux puts memory into large pages on request from 6.1 on, if it was built with them
CAN_COLLAPSE = Path("/sys/kernel/mm/transparent_hugepage").exists() and [
    int(number) for number in os.uname().release.split(".")[:2]
] >= [6, 1]


def test_a_lost_fork_server_is_replaced_and_imports_slow_modules_for_the_next_ranks(
    monkeypatch, tmp_path
):
    def program(*names):
        had = [name in sys.modules for name in names]
        return had, [importlib.import_module(name) is None for name in names]

    p101.launch(int, world_size=1)
    processes._server.process.kill()
    processes._server.process.wait()
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # an entry that is no string
    names = "parallel101.cost.hardware", "torch.distributed.tensor", "tabnanny"
    runs = [p101.launch(program, *names, world_size=1).results[0][0] for _ in range(2)]
    assert runs == [[False, False, False], [True, True, False]], (
        "a module of the program's own may change between launches"
    )


def test_a_list_of_modules_may_be_long():
    """A rank that draws or plans imports 200 of this package's: 6 KB of names."""
    processes.preload([*(f"not_installed_{i:04}" for i in range(1000)), "tabnanny"])
    assert p101.launch(lambda: "tabnanny" in sys.modules, world_size=2).results == [True, True]


@pytest.mark.skipif(not CAN_COLLAPSE, reason="this system has no large pages")
def test_memory_is_put_into_large_pages():
    program = """
import re
from parallel101.laboratory.ranks.forkserver import PIECE, use_large_pages, written_memory
def large():
    return int(re.search("AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1])
kept = [bytes(1000) for _ in range(64_000)]  # as torch's import leaves it: on the heap
before, pieces = large(), written_memory()
for start, stop in pieces:
    assert 0 < stop - start <= PIECE
    use_large_pages(start, stop)
print(before, large())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after > before + 16 * 1024, "KiB"


def test_a_rank_can_be_killed_as_soon_as_it_is_started():
    for _ in range(10):
        (rank,) = start_ranks(1)
        assert os.getpgid(rank.pid) == rank.pid
        kill(rank)
        rank.close()


def test_a_fork_that_the_system_refuses(monkeypatch):
    refuse_once = """import errno, os
fork = os.fork
def refused():
    os.fork = fork
    raise BlockingIOError(errno.EAGAIN, 'no')
os.fork = refused
"""
    p101.launch(int, world_size=1)
    before = len(os.listdir("/dev/fd"))
    stop_server()
    with monkeypatch.context() as patched:
        whole = processes._python_code
        patched.setattr(processes, "_python_code", lambda code: whole(refuse_once + code))
        told = "2 ranks need a process each"
        with pytest.raises(BlockingIOError, match=told):
            p101.launch(int, world_size=2)
    assert p101.launch(int, world_size=2).results == [0, 0]
    assert len(os.listdir("/dev/fd")) <= before
