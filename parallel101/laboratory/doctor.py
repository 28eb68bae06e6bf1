"""`parallel101 doctor`: checks what works on this machine, and says how to fix what does not.

Each check is one short function that tries something and returns a row of the table. The checks
named "launch" start real ranks, so if all checks pass, the lessons run here. This module imports
torch only inside the checks: doctor must also run where torch is missing.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import textwrap
import time
import webbrowser
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from parallel101.extras import missing_packages
from parallel101.laboratory.viz.chromium import find_chromium

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = "2.13"
TESTED_TORCH = "2.13.0"  # what constraints.txt installs, and the lessons are tested with
# with which the tests have been tried; CONTRIBUTING says how to try another
TRIED_TORCH = (TESTED_TORCH, "2.14.1", "2.15.0")
MARKS = {"works": "✓", "fails": "✗", "absent": "–"}


class CheckResult(NamedTuple):
    """The result of one check.

    `state` is "works", "fails" or "absent": not on this machine, but no lesson needs it.
    """

    state: str
    found: str
    advice: str = ""
    name: str = ""  # of the check; run_checks fills it in


works, fails, absent = (partial(CheckResult, state) for state in MARKS)


def main(as_json: bool = False) -> int:
    """Run all checks and print each row as soon as it is known, or all rows as JSON.

    Returns 1 if a check failed, otherwise 0.
    """
    rows = []
    for row in run_checks():
        rows.append(row)
        if not as_json:
            print(as_text(row), flush=True)
    failed = [row.name for row in rows if row.state == "fails"]
    if as_json:
        print(
            json.dumps(
                {"ok": not failed, "checks": [row._asdict() for row in rows]},
                indent=2,
                ensure_ascii=False,
            )
        )
    elif failed:
        print(f"\nNot working: {', '.join(failed)}. The lines that begin with → say what to do.")
    elif any(row.name == "Jupyter" and row.state == "absent" for row in rows):
        print("\nLaunches work on this machine. The lessons need what is missing above.")
    else:
        print("\nEverything that the lessons need works on this machine.")
    return 1 if failed else 0


def as_text(row: CheckResult) -> str:
    """Return a row of the table as text, with its advice below it."""
    lines = textwrap.wrap(row.found, 100) or [""]
    if row.advice:
        lines += textwrap.wrap(f"→ {row.advice}", 100, subsequent_indent="  ")
    first = f"{MARKS[row.state]} {row.name:<12}  "
    return first + f"\n{' ' * len(first)}".join(lines)


def run_checks() -> Iterator[CheckResult]:
    """Run the checks one after the other.

    A check that raises becomes a failed row, and the checks after it still run.
    """
    for name, check in CHECKS.items():
        try:
            yield check()._replace(name=name)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            advice = "If this message does not help, report it with `parallel101 doctor --json`."
            yield fails(message, advice, name)


def check_python() -> CheckResult:
    found = f"{platform.python_version()} at {sys.executable}, on {platform.platform(terse=True)}"
    if sys.version_info < OLDEST_PYTHON:
        return fails(
            found,
            "parallel101 needs Python 3.10 or newer. Run make PYTHON=/path/to/a/newer/python3",
        )
    return works(found)


def check_machine() -> CheckResult:
    import psutil

    memory = psutil.virtual_memory()
    return works(
        f"{os.cpu_count()} cores, {memory.total / 2**30:.1f} GiB of memory, "
        f"{memory.available / 2**30:.1f} GiB free"
    )


def check_torch() -> CheckResult:
    advice = (
        f"Run pip install torch=={TESTED_TORCH} (on Linux without a GPU, add --index-url "
        "https://download.pytorch.org/whl/cpu)"
    )
    try:
        found = version("torch")
        import torch
        from torch.torch_version import TorchVersion
    except PackageNotFoundError:
        return fails("not installed", advice)
    except (ImportError, OSError) as error:
        return fails(f"{found} is installed, but cannot be imported: {error}", advice)
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        return fails(f"{found}, but parallel101 needs {OLDEST_TORCH} or newer", advice)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    mine = torch.__version__.partition("+")[0]
    if mine == TESTED_TORCH:
        note = ""
    elif mine in TRIED_TORCH:
        note = f"; all tests have passed with it, and the lessons are tested with {TESTED_TORCH}"
    else:
        note = (
            f"; the tests have been tried with {' and '.join(TRIED_TORCH)}, not with this version"
        )
    return works(f"{found} ({build} build){note}")


def check_gloo() -> CheckResult:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return works("part of this build of torch: ranks can run on the CPU")
    return fails(
        "not part of this build of torch",
        "Install torch from PyPI or from pytorch.org: these builds have gloo.",
    )


def check_nccl() -> CheckResult:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return absent(
            "not part of this build of torch. backend='nccl' needs a CUDA build on Linux; gloo "
            "and sim work without"
        )
    if not torch.cuda.is_available():
        return absent("part of this build of torch, but there is no GPU to use it with")
    return works("version " + ".".join(map(str, torch.cuda.nccl.version())))


def check_gpus() -> CheckResult:
    import torch

    if not torch.cuda.is_available():
        advice = (
            "If this machine has a GPU: check that nvidia-smi lists it and that its driver is new "
            "enough for this build of torch."
        )
        return absent(
            "none that torch can use. All lessons run without a GPU, on gloo and sim",
            advice if torch.version.cuda else "",
        )
    count = torch.cuda.device_count()
    names = ", ".join(
        f"{torch.cuda.get_device_name(i)} ({torch.cuda.mem_get_info(i)[1] / 2**30:.0f} GiB)"
        for i in range(count)
    )
    if count == 1:
        advice = (
            "With one GPU, backend='nccl' runs one rank only, because NCCL needs a GPU for each "
            "rank. PARALLEL101_SHARE_GPUS=1 lets several ranks share this GPU: good for trying a "
            "program, but slow, and its times mean nothing. On gloo and sim, the program stays the "
            "same."
        )
        return works(f"1: {names}", advice)
    return works(f"{count}: {names}; up to {count} ranks on nccl")


def check_loopback() -> CheckResult:
    advice = (
        "Ranks on one machine connect through 127.0.0.1. In a container, run ip link set lo up. Or "
        "does a firewall block it?"
    )
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return works("connections over 127.0.0.1 work")
    except OSError as error:
        return fails(f"no connection over 127.0.0.1: {error}", advice)


def check_fork_server() -> CheckResult:
    if hasattr(os, "fork"):
        return works(
            "this system can fork: ranks start from a process that has already imported torch",
        )
    advice = (
        "Everything works, but each launch takes as long as importing torch. Launches are fast "
        "under WSL 2."
    )
    return absent(f"{platform.system()} cannot fork: each rank starts as a new process", advice)


def sum_of_ranks() -> float:
    """Return the sum of all ranks' numbers, computed by torch's own all-reduce."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def check_launch(backend: str) -> CheckResult:
    """Launch two ranks that add their numbers.

    The second launch is faster, because the fork server already runs.
    """
    import parallel101

    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        run = parallel101.launch(sum_of_ranks, world_size=2, backend=backend, timeout=30.0)
        seconds.append(time.perf_counter() - began)
        if (sums := list(run.results)) != [1.0, 1.0]:
            return fails(f"two ranks added 0 and 1 and got {sums}", "Please report this.")
    return works(
        f"two ranks started and added their numbers in {seconds[0]:.2f} s; the second time in "
        f"{seconds[1]:.2f} s"
    )


def check_numpy() -> CheckResult:
    if "numpy" not in missing_packages("lessons"):
        return works(version("numpy"))
    return absent(
        "not installed. parallel101 works without it. torch warns that it's missing, and torch's "
        "collectives of objects, such as all_gather_object, fail on real ranks",
        "If your program uses them: pip install numpy",
    )


def check_jupyter() -> CheckResult:
    if missing := missing_packages("lessons"):
        return absent(
            f"not installed: {', '.join(missing)}. Only notebooks, the lessons' pages, plots and "
            "explorers need them",
            'To install them: pip install "parallel101[lessons]"',
        )
    found = ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib")
    return works(", ".join(f"{package} {version(package)}" for package in found))


def check_browser() -> CheckResult:
    try:
        found = find_chromium() or webbrowser.get().name
    except webbrowser.Error:
        advice = (
            "On a machine without a screen, run parallel101 lab --no-browser and open the address "
            "that it prints on your own computer."
        )
        return absent("none found", advice)
    return works(found)


CHECKS: dict[str, Callable[[], CheckResult]] = {
    "Python": check_python,
    "machine": check_machine,
    "torch": check_torch,
    "gloo": check_gloo,
    "NCCL": check_nccl,
    "GPUs": check_gpus,
    "loopback": check_loopback,
    "fork server": check_fork_server,
    "NumPy": check_numpy,
    "launch, gloo": lambda: check_launch("gloo"),
    "launch, sim": lambda: check_launch("sim"),
    "Jupyter": check_jupyter,
    "browser": check_browser,
}
