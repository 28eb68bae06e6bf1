"""A rank learns how the processes of the other ranks on its host have ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from parallel101.laboratory.ranks import process_watch
from parallel101.laboratory.ranks.job_messages import to_json
from parallel101.laboratory.ranks.process_watch import ProcessWatch, ended_text

pytestmark = pytest.mark.skipif(not process_watch.ON_LINUX, reason="needs a pidfd")


def process(ends):
    """A process that ends when its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {ends}"], stdin=subprocess.PIPE
    )


def test_how_processes_end():
    here = socket.gethostname()
    killed = process(f"os.kill(os.getpid(), {signal.SIGKILL.value})")
    left = process("os._exit(0)")
    fetched = process("")
    fetched.communicate()  # nobody can know its exit status any more
    store = dist.HashStore()
    for rank, (host, pid) in enumerate(
        [
            (here, os.getpid()),
            (here, killed.pid),
            (here, left.pid),
            (here, fetched.pid),
            ("another host", killed.pid),
        ]
    ):
        store.set(f"process/{rank}", to_json([host, pid, None]))
    watch = ProcessWatch(0, 6, store)  # rank 5 has not come yet
    watch.start()
    try:
        watch.look()
        assert watch.ended == {3: None}
        for child in (killed, left):
            child.stdin.close()
        deadline = time.monotonic() + 60
        while len(watch.ended) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        watch.stop()
        for child in (killed, left):
            child.kill()
            child.wait()
    assert watch.ended == {1: -signal.SIGKILL, 2: 0, 3: None} and watch.unknown == {5}
    text = ended_text(watch.ended)
    assert f"rank 1 (on {here}) was killed by SIGKILL (exit code -9)" in text
    assert f"rank 2 (on {here}) exited with code 0 before its function returned" in text
    assert f"rank 3 (on {here}) has ended before its program" in text
