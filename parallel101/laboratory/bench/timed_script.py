"""The script of a job that is timed (see timed_job.py).

torchrun … -m parallel101.laboratory.bench.timed_script PORT NAME [launch]
"""

from __future__ import annotations

import sys

import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.bench.timed_job import HOUR, train_when_asked

if __name__ == "__main__":
    job = int(sys.argv[1]), sys.argv[2]
    if sys.argv[3:] == ["launch"]:
        p101.launch(train_when_asked, *job, timeout=HOUR.total_seconds())
    else:
        dist.init_process_group("gloo")
        train_when_asked(*job)
        dist.destroy_process_group()
