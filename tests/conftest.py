"""What every test may rely on: plots without a screen, and skips that say why."""

from __future__ import annotations

import os

import pytest
import torch

from parallel101.doctor import find_chromium

os.environ.setdefault("MPLBACKEND", "Agg")
MOST_RANKS = 5  #  no test of real ranks has more


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a browser that can be driven over DevTools."""
    found = find_chromium()
    if found is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return found


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.nccl)])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of real ranks: gloo, and NCCL where this machine has a GPU for each of five ranks."""
    if request.param == "nccl" and torch.cuda.device_count() < MOST_RANKS:
        pytest.skip(f"NCCL needs one GPU a rank, {MOST_RANKS} here; this machine has {torch.cuda.device_count()}")
    return request.param
