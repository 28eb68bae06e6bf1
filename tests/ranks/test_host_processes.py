"""A rank learns that the process of another rank on its host is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch.distributed as dist

from parallel101.laboratory.ranks.heartbeat import Heartbeats, ended_text
from parallel101.laboratory.ranks.job_messages import to_json


def test_ranks_of_this_host_whose_process_has_ended():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store, here = dist.HashStore(), socket.gethostname()
    heartbeats = Heartbeats(0, 5, store)  # rank 4 has not come yet
    for rank, where in ((1, [here, gone.pid]), (2, [here, os.getpid()]), (3, ["other", gone.pid])):
        store.set(f"heartbeat/{rank}", to_json([0.0, *where]))
    assert heartbeats.ended() == {1} and heartbeats.unknown == {4}
    assert ended_text({1}).startswith(f"rank 1 (on {here}) has ended before its program")
