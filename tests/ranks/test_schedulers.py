"""Ranks of srun and mpirun join a launch as those of torchrun do. A batch script is no rank.

The variables are those of Slurm 26.05's man pages and of Open MPI's and MPICH's documentation.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import parallel101 as p101
from parallel101.laboratory.ranks.schedulers import torchrun_variables
from parallel101.laboratory.ranks.script import free_port
from parallel101.laboratory.ranks.torchrun import loopback_explained

BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in (("RANK", "1"), ("SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
RANK_1_OF_8 = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


FOUND = {  # the launcher: its variables → what they are as torchrun's
    "srun": (STEP, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}),
    "Open MPI": (OPEN_MPI, RANK_1_OF_8),
    "MPICH": (MPICH, RANK_1_OF_8),
    "mpirun that started its daemon by srun": ({**STEP, **OPEN_MPI}, RANK_1_OF_8),
    "torchrun in a step": ({**STEP, **RANK_1_OF_8}, RANK_1_OF_8),
    "no job": ({}, {}),
    "sbatch": (BATCH_SCRIPT, {}),
    # newer versions number the batch script, and the shell that salloc opens
    "sbatch with a number": ({**STEP, "SLURM_STEP_ID": "-5"}, {}),
    "salloc": ({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}, {}),
    "srun --pty bash": ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {}),
}


@pytest.mark.parametrize(("environ", "found"), FOUND.values(), ids=FOUND)
def test_who_is_a_rank(environ, found):
    assert torchrun_variables(environ) == found


@pytest.mark.parametrize(
    ("environ", "advice"),
    [(STEP, "scontrol show hostnames"), (OPEN_MPI, "mpirun -x"), (MPICH, "mpiexec -genv")],
    ids=["srun", "Open MPI", "MPICH"],
)
def test_a_missing_address_is_explained(environ, advice, monkeypatch):
    for name in RANK_1_OF_8:
        monkeypatch.setenv(name, "")  # so that it is restored: launch sets what torchrun sets
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"(?s)MASTER_ADDR .*not both set.*{advice}"):
        p101.launch(print)


def test_a_host_whose_name_is_loopback_is_explained():
    refused = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:6063$0"
    advice = r"at 127\.0\.1\.1, which is .*GLOO_SOCKET_IFNAME"
    with pytest.raises(RuntimeError, match=advice), loopback_explained():
        raise RuntimeError(f"Gloo connectFullMesh failed with {refused}")
    with pytest.raises(RuntimeError, match="no space"), loopback_explained():
        raise RuntimeError("no space")


# The ranks of both jobs are forks of a process that has imported torch.
JOBS = """
import os, signal, sys, torch.distributed as dist, parallel101 as p101

def raises():
    1 / 0 if dist.get_rank() == 0 else dist.barrier()

def dies():
    os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() == 0 else dist.barrier()

def rank_of(job):
    run = p101.launch(lambda: [dist.get_rank(), os.environ["LOCAL_RANK"]])
    print(run.results, file=sys.stderr, flush=True)
    p101.launch(job)

ends = {}
for job, port in zip((raises, dies), sys.argv[2:]):
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(f"{sys.argv[1]}/{job.__name__}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), MASTER_PORT=port)
            rank_of(job)
            sys.exit()
        ends[pid] = f"{job.__name__}-{rank}"
for _ in range(4):
    pid, status = os.wait()
    print(ends[pid], os.waitstatus_to_exitcode(status))
"""


def test_jobs_whose_rank_0_holds_the_store(tmp_path):
    """All ranks hear that it raised, before the store ends with it. If it dies, they know that."""
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOBS, str(tmp_path), str(free_port()), str(free_port())],
        env={**os.environ, **step},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    ends = ["dies-0 -9", "dies-1 1", "raises-0 1", "raises-1 1"]
    assert sorted(done.stdout.splitlines()) == ends, (done.stderr, said)
    assert all("[[0, '0'], [1, '1']]\n" in text for text in said.values())
    for rank in range(2):
        assert "RankFailed: rank 0 raised ZeroDivisionError" in said[f"raises-{rank}"]
    assert "the connection to the job's store at localhost:" in said["dies-1"]
    assert "rank 0's), or its machine" in said["dies-1"]
