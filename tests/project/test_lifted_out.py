"""The subject can be lifted out: without the laboratory, in an empty place, it trains under
torchrun, and equals one process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.project.test_arrows import PACKAGE, SUBJECT

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel101.collectives import all_reduce
from parallel101.layers import AllSumReduce
from parallel101.models.mlp import MLP
from parallel101.sharding import plan
from parallel101.trainers.one_axis import DataParallelTrainer, ShardedTrainer

def run(build):
    model = MLP([4, 8, 8, 4], dtype=torch.float64)
    trainer = build(model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), clip_norm=0.5)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(10, 4)
    return trainer.fit([(x, x.sin())] * 3, progress=False).losses

for where in "one process", "two ranks":
    for build in DataParallelTrainer, ShardedTrainer:
        print(f"{where}, {build.__name__}: {run(build)}\\n", end="", flush=True)
    if where == "one process":
        dist.init_process_group("gloo")
mine = {name for name in sys.modules if name.startswith("parallel101.")}
assert {name.split(".")[1] for name in mine} <= set(SUBJECT), mine
imported = all_reduce.__code__.co_filename
assert imported.startswith(os.getcwd()), "the copy, and not the package that is installed"
halves = plan("A[I_X] → A[I]", {"X": 2}, I=2)
assert halves.run(torch.tensor([float(dist.get_rank())])).tolist() == [0.0, 1.0]
print(f"sum {all_reduce(torch.ones(1)).item()}\\n", end="", flush=True)
mesh = dist.init_device_mesh("cpu", (2,))
print(f"sum {AllSumReduce(mesh, axes=(0,))(torch.ones(1)).item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def copied(place: Path) -> Path:
    """What a student copies, with a script that uses it."""
    (place / "parallel101").mkdir()
    (place / "parallel101" / "__init__.py").touch()
    for name in SUBJECT:
        source = PACKAGE / name
        if source.is_dir():
            shutil.copytree(
                source, place / "parallel101" / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif source.with_suffix(".py").exists():
            shutil.copy(source.with_suffix(".py"), place / "parallel101")
    script = place / "train.py"
    script.write_text(f"SUBJECT = {SUBJECT!r}\n{SCRIPT}")
    return script


def test_the_subject_alone_trains_under_torchrun(tmp_path):
    script = copied(tmp_path)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    options = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"  # a free port
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    done = subprocess.run(
        [*torchrun, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed.count("sum 2.0") == 4, "a collective and a layer, on two ranks"
    losses = defaultdict(list)
    for line in printed:
        if ": " in line:
            name, values = line.split(": ")
            losses[name].append([round(float(n), 9) for n in values.strip("[]").split(",")])
    for trainer in "DataParallelTrainer", "ShardedTrainer":
        alone, together = losses[f"one process, {trainer}"], losses[f"two ranks, {trainer}"]
        assert len(alone) == len(together) == 2 and alone[0] == alone[1]
        assert together == alone
