"""What every test may rely on: plots without a screen, one thread, readable test ids, and skips
that give the reason.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from parallel101.laboratory.record.process_groups import gpus_are_shared
from parallel101.laboratory.viz.chromium import find_chromium

os.environ.setdefault("MPLBACKEND", "Agg")
# One thread for torch's operations, here and in the processes that tests start: `pytest -n 2`
# occupies the cores with whole tests. Threads that wait for each other spin: with two in each of
# two workers on two cores, training a small GPT takes three times as long.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as `parallel101 lessons` does: importing nbformat then takes no two seconds
# a shell lets what it starts in the background ignore Ctrl-C, and so would what tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
MOST_RANKS = 5  # no test uses more real ranks


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Return the id of a value that a test is parametrised over, or None where pytest's own id is
    good enough.

    All pytest-xdist workers must collect the same ids. So an id holds no time, no memory address
    and nothing in the order of a hash.
    """
    if (
        val is None
        or isinstance(val, (str, int, float, complex))
        or getattr(val, "__name__", "").isidentifier()
    ):
        return None
    options = val.items() if isinstance(val, dict) else ()
    text = ", ".join(f"{name}={value!r}" for name, value in options) or repr(val)
    known = isinstance(val, (dict, list, tuple, torch.dtype)) and " at 0x" not in text
    if known and len(text) <= 80:
        return text.removeprefix("torch.")
    raise pytest.Collector.CollectError(
        f"no readable test id can be made from {argname}={text:.80}; pass ids=[…] or "
        "pytest.param(…, id=…)"
    )


# what only repeats with other values what a test shows that stays: `make thorough` runs it
REPEATS = set((Path(__file__).parent / "thorough.txt").read_text().splitlines())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only repeats, unless it is named."""
    repeats = REPEATS - set(config.args)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in repeats])
    items[:] = [item for item in items if item.nodeid not in repeats]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a browser that can be driven over DevTools."""
    found = find_chromium()
    if found is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return found


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.nccl(MOST_RANKS))])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of real ranks: gloo, and NCCL if this machine has a GPU for every rank."""
    return request.param


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are. With SHARE_GPUS=1, one is enough."""
    for mark in item.iter_markers("nccl"):
        (ranks,), gpus = mark.args, torch.cuda.device_count()
        if gpus < ranks and not (gpus and gpus_are_shared()):
            pytest.skip(f"NCCL needs one GPU per rank: {ranks} ranks, {gpus} GPUs")
