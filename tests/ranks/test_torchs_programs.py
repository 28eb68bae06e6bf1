"""What others write with torch alone gives plain torch's numbers in every launch: on gloo, on
recorded and checked gloo, and on sim under NCCL's rules.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parallel101 as p101

LAUNCHES = {  # name → what they leave out, options of launch
    "gloo": ([], {}),
    "recorded gloo": ([], {"trace": True}),
    # NCCL has no sparse all-reduce; test_no_faults.py has one on sim
    "sim, NCCL's rules": (["DDP, sparse"], {"backend": "sim", "rules": "nccl"}),
}


@pytest.mark.slow
def test_every_program_gives_plain_torchs_numbers_in_every_launch(tmp_path):
    # takes a second, which collecting the tests need not take
    from .torchs_programs import PROGRAMS, RANKS, run_all

    plain = [sys.executable, "-m", "tests.ranks.torchs_programs", str(tmp_path)]
    with subprocess.Popen(plain, cwd=Path(__file__).parents[2]) as process:
        runs = {
            where: p101.launch(run_all, without, world_size=RANKS, timeout=150, **options)
            for where, (without, options) in LAUNCHES.items()
        }
    assert process.returncode == 0
    found = {where: run.results for where, run in runs.items()}
    kinds = {event.kind for event in runs["recorded gloo"].trace.events}
    assert {"broadcast", "all_reduce", "all_gather", "reduce_scatter", "send", "recv"} <= kinds
    for rank in range(RANKS):
        expected = torch.load(tmp_path / f"{rank}.pt")
        for where, (without, _) in LAUNCHES.items():
            assert set(found[where][rank]) == set(PROGRAMS) - set(without)
            for name, tensors in found[where][rank].items():
                message = f"{name} on {where}, rank {rank}: {{}}"
                torch.testing.assert_close(
                    tensors, expected[name], rtol=1e-12, atol=1e-14, msg=message.format
                )
                assert tensors
