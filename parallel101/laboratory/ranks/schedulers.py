"""Ranks that srun or mpirun started: their launcher's variables, as torchrun's.

    | | srun | Open MPI | MPICH, Intel MPI |
    | RANK | SLURM_PROCID | OMPI_COMM_WORLD_RANK | PMI_RANK |
    | WORLD_SIZE | SLURM_STEP_NUM_TASKS | OMPI_COMM_WORLD_SIZE | PMI_SIZE |
    | LOCAL_RANK | SLURM_LOCALID | OMPI_COMM_WORLD_LOCAL_RANK | MPI_LOCALRANKID |

A batch script is no rank. Slurm sets SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS in it too, but
SLURM_STEP_NUM_TASKS only in a step that srun started. A job of one process is none either, so in
`srun --pty bash` a launch starts its ranks by itself.

Sources: Slurm's man pages srun(1) and sbatch(1), and its src/common/env.c (env_array_for_step,
env_array_for_batch_job); Open MPI's docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html.
For MPICH's launcher no reference was found; its names are those that other programs rely on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Slurm numbers from here on what is no step of srun's: a batch script, an interactive shell
# (slurm/slurm.h)
FIRST_SPECIAL_STEP = 0xFFFFFFF0

TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
# the others' names of these, as far as they have one
# mpirun before srun: it may use srun to start its daemons, and these have a step's variables
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
SRUN = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as far as known.

    Empty if it is not a rank of a job.
    """
    for names in (TORCHRUN, OPEN_MPI, MPICH, SRUN):
        variables = {own: environ[name] for own, name in zip(TORCHRUN, names) if name in environ}
        no_job = names is not TORCHRUN and variables.get("WORLD_SIZE") == "1"
        no_step = names is SRUN and not _in_a_step(environ)
        if {"RANK", "WORLD_SIZE"} <= variables.keys() and not (no_job or no_step):
            return variables
    return {}


def _in_a_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def advice_on_address() -> str:
    """Return advice on setting MASTER_ADDR and MASTER_PORT, by the launcher of this process."""
    if _in_a_step(os.environ):
        return (
            "In the batch script, before srun:\n"
            '  export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "  export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))"
        )
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return "Pass them on: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500. HOST is rank 0's"
    if "PMI_RANK" in os.environ:
        return (
            "Set them: mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500, with rank 0's host"
        )
    return "Start this script with torchrun, or unset RANK and WORLD_SIZE"
