"""Which processes are ranks of srun and mpirun. (They join a launch: faults.py, test_hosts.py.)

The variables are those of Slurm 26.05's man pages and of Open MPI's and MPICH's documentation.
"""

from __future__ import annotations

import pytest

import parallel101 as p101
from parallel101.laboratory.ranks.program import loopback_explained
from parallel101.laboratory.ranks.schedulers import torchrun_variables

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
