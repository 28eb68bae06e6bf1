"""The subject can be lifted out: without the laboratory, in an empty place, it trains under
torchrun, and equals one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_arrows import PACKAGE, SUBJECT

# It starts the ranks as torchrun does, but by a fork: torch is imported once.
SCRIPT = """
import json
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallel101.collectives import all_reduce
from parallel101.layers import AllSumReduce
from parallel101.models.mlp import MLP
from parallel101.sharding import plan
from parallel101.trainers.one_axis import DataParallelTrainer, ShardedTrainer

def train(build):
    model = MLP([4, 8, 8, 4], dtype=torch.float64)
    trainer = build(
        model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), clip_norm=0.5,
        verify=build is ShardedTrainer,
    )
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(10, 4)
    return trainer.fit([(x, x.sin())] * 3, progress=False).losses

def program():
    alone = [train(build) for build in (DataParallelTrainer, ShardedTrainer)]
    dist.init_process_group("gloo")
    together = [train(build) for build in (DataParallelTrainer, ShardedTrainer)]
    halves = plan("A[I_X] → A[I]", {"X": 2}, I=2)
    whole = halves.run(torch.tensor([float(dist.get_rank())]))
    mesh = dist.init_device_mesh("cpu", (2,))
    sums = [all_reduce(torch.ones(1)), AllSumReduce(mesh, axes=(0,))(torch.ones(1))]
    dist.destroy_process_group()
    modules = [name for name in sys.modules if name.startswith("parallel101.")]
    return alone, together, whole.tolist(), [sum.item() for sum in sums], modules

if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="lifted_out", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="fork",
    )
    results = elastic_launch(config, program)()
    print(json.dumps([all_reduce.__code__.co_filename, *results.values()]))
"""


def test_the_subject_alone_trains_under_torchrun(tmp_path):
    (tmp_path / "parallel101").mkdir()
    (tmp_path / "parallel101" / "__init__.py").touch()
    for name in SUBJECT:  # what a student copies
        source = PACKAGE / name
        if source.is_dir():
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tmp_path / "parallel101" / name, ignore=without)
        else:
            shutil.copy(source.with_suffix(".py"), tmp_path / "parallel101")
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    how = {"cwd": tmp_path, "env": environ | {"OMP_NUM_THREADS": "1"}, "timeout": 120}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    imported, *ranks = json.loads(done.stdout)
    assert Path(imported).is_relative_to(tmp_path), "the copy, and not the installed package"
    assert len(ranks) == 2
    for alone, together, whole, sums, modules in ranks:
        for one, two in zip(alone, together, strict=True):
            assert len(one) == 3 and two == pytest.approx(one, rel=1e-9)
        assert (whole, sums) == ([0.0, 1.0], [2.0, 2.0]), "a plan, a collective and a layer"
        assert {name.split(".")[1] for name in modules} <= set(SUBJECT)
