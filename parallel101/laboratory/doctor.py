"""`parallel101 doctor`: checks what works on this machine, and says how to fix what does not.

Each check is a row of `CHECKS`: a short function that tries something and returns what it found,
and what to do if it fails. The checks named "launch" start real ranks, so if all checks pass, the
lessons run here. This module imports torch only inside the checks: doctor must also run where torch
is missing.
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
from importlib.metadata import version

from parallel101.extras import missing_packages
from parallel101.laboratory.viz.chromium import find_chromium

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = "2.13"
TESTED_TORCH = "2.13.0"  # what constraints.txt installs, and the lessons are tested with
# with which the tests have been tried; CONTRIBUTING says how to try another
TRIED_TORCH = (TESTED_TORCH, "2.14.1", "2.15.0")
MARKS = {"works": "✓", "fails": "✗", "absent": "–"}


class Absent(Exception):
    """What a check looks for is not on this machine, but no lesson needs it."""


def main(as_json: bool = False) -> int:
    """Run all checks and print each row as soon as it is known, or all rows as JSON.

    Returns 1 if a check failed, otherwise 0.
    """
    rows = []
    for row in run_checks():
        rows.append(row)
        if not as_json:
            advice = textwrap.wrap(f"→ {row['advice']}", 100, subsequent_indent="  ")
            lines = textwrap.wrap(row["found"], 100) + (advice if row["advice"] else [])
            first = f"{MARKS[row['state']]} {row['name']:<12}  "
            print(first + f"\n{' ' * len(first)}".join(lines), flush=True)
    failed = [row["name"] for row in rows if row["state"] == "fails"]
    if as_json:
        print(json.dumps({"ok": not failed, "checks": rows}, indent=2, ensure_ascii=False))
    elif failed:
        print(f"\nNot working: {', '.join(failed)}. The lines that begin with → say what to do.")
    elif any(row["name"] == "Jupyter" and row["state"] == "absent" for row in rows):
        print("\nLaunches work on this machine. The lessons need what is missing above.")
    else:
        print("\nEverything that the lessons need works on this machine.")
    return 1 if failed else 0


def run_checks() -> Iterator[dict[str, str]]:
    """Yield a row for each check: name, state, what was found, and advice.

    The state is "works", "fails" or "absent". A check that raises fails, and the checks after it
    still run.
    """
    for name, (check, advice) in CHECKS.items():
        state, found = "works", ""
        try:
            found = check()
        except Absent as error:
            state, found = "absent", str(error)
        except Exception as error:
            state, found = "fails", " ".join(f"{type(error).__name__}: {error}".split())
        advice = "" if state == "works" else advice
        yield {"name": name, "state": state, "found": found, "advice": advice}


# ── The checks: each returns what it found, and raises if that doesn't work


def check_python() -> str:
    found = f"{platform.python_version()} at {sys.executable}, on {platform.platform(terse=True)}"
    if sys.version_info < OLDEST_PYTHON:
        raise RuntimeError(f"{found}, but parallel101 needs Python 3.10 or newer")
    return found


def check_machine() -> str:
    import psutil

    memory, gib = psutil.virtual_memory(), 2**30
    return (
        f"{os.cpu_count()} cores, {memory.total / gib:.1f} GiB of memory, "
        f"{memory.available / gib:.1f} GiB free"
    )


def check_torch() -> str:
    import torch
    from torch.torch_version import TorchVersion

    found = torch.__version__
    if TorchVersion(found) < OLDEST_TORCH:
        raise RuntimeError(f"{found}, but parallel101 needs {OLDEST_TORCH} or newer")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    note, plain = "", found.partition("+")[0]
    if plain not in TRIED_TORCH:
        tried = " and ".join(TRIED_TORCH)
        note = f"; the tests have been tried with {tried}, not with this version"
    elif plain != TESTED_TORCH:
        note = f"; all tests have passed with it, and the lessons are tested with {TESTED_TORCH}"
    return f"{found} ({build} build){note}"


def check_gloo() -> str:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise RuntimeError("not part of this build of torch")
    return "part of this build of torch: ranks can run on the CPU"


def check_nccl() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        raise Absent(
            "not part of this build of torch. backend='nccl' needs a CUDA build on Linux; gloo "
            "and sim work without"
        )
    if not torch.cuda.is_available():
        raise Absent("part of this build of torch, but there is no GPU to use it with")
    return "version " + ".".join(map(str, torch.cuda.nccl.version()))


def check_gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Absent("none that torch can use. All lessons run without a GPU, on gloo and sim")
    count, cuda = torch.cuda.device_count(), torch.cuda
    names = ", ".join(
        f"{cuda.get_device_name(i)} ({cuda.mem_get_info(i)[1] / 2**30:.0f} GiB)"
        for i in range(count)
    )
    if count > 1:
        return f"{count}: {names}; up to {count} ranks on nccl"
    return (
        f"1: {names}. With one GPU, backend='nccl' runs one rank only, because NCCL needs a GPU "
        "for each rank. PARALLEL101_SHARE_GPUS=1 lets several ranks share this GPU: good for "
        "trying a program, but slow, and its times mean nothing. On gloo and sim, the program "
        "stays the same."
    )


def check_loopback() -> str:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2),
    ):
        return "connections over 127.0.0.1 work"


def check_fork_server() -> str:
    if not hasattr(os, "fork"):
        raise Absent(f"{platform.system()} cannot fork: each rank starts as a new process")
    return "this system can fork: ranks start from a process that has already imported torch"


def sum_of_ranks() -> float:
    """Return the sum of all ranks' numbers, computed by torch's own all-reduce."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def check_launch(backend: str) -> str:
    """Launch two ranks that add their numbers.

    The second launch is faster, because the fork server already runs.
    """
    import parallel101

    times = [time.perf_counter()]
    for _ in range(2):
        run = parallel101.launch(sum_of_ranks, world_size=2, backend=backend, timeout=30.0)
        times.append(time.perf_counter())
        if (sums := list(run.results)) != [1.0, 1.0]:
            raise RuntimeError(f"two ranks added 0 and 1 and got {sums}")
    first, second = (f"{end - start:.2f} s" for start, end in zip(times, times[1:]))
    return f"two ranks started and added their numbers in {first}; the second time in {second}"


def check_numpy() -> str:
    if "numpy" in missing_packages("lessons"):
        raise Absent(
            "not installed. parallel101 works without it. torch warns that it's missing, and "
            "torch's collectives of objects, such as all_gather_object, fail on real ranks"
        )
    return version("numpy")


def check_jupyter() -> str:
    if missing := missing_packages("lessons"):
        raise Absent(
            f"not installed: {', '.join(missing)}. Only notebooks, the lessons' pages, plots and "
            "explorers need them"
        )
    shown = ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib")
    return ", ".join(f"{package} {version(package)}" for package in shown)


def check_browser() -> str:
    try:
        return str(find_chromium() or webbrowser.get().name)
    except webbrowser.Error:
        raise Absent("none found") from None


REPORT = "If this message does not help, report it with `parallel101 doctor --json`."
LOOPBACK = (
    "Ranks on one machine connect through 127.0.0.1. In a container, run ip link set lo up. Or "
    "does a firewall block it?"
)
TORCH = (
    f"Run pip install torch=={TESTED_TORCH} (on Linux without a GPU, add --index-url "
    "https://download.pytorch.org/whl/cpu)"
)
FORK = "Launches work, but each takes as long as importing torch. They are fast under WSL 2."
GPUS = "If there is a GPU, does nvidia-smi list it, and is its driver new enough for a CUDA build?"
BROWSER = (
    "On a machine without a screen, run parallel101 lab --no-browser and open the address that it "
    "prints on your own computer."
)
# name → the check, and what to do if what it looks for is missing or doesn't work
CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "Python": (check_python, "Run make PYTHON=/path/to/a/newer/python3"),
    "machine": (check_machine, REPORT),
    "torch": (check_torch, TORCH),
    "gloo": (check_gloo, "Install torch from PyPI or from pytorch.org: their builds have gloo."),
    "NCCL": (check_nccl, ""),
    "GPUs": (check_gpus, GPUS),
    "loopback": (check_loopback, LOOPBACK),
    "fork server": (check_fork_server, FORK),
    "NumPy": (check_numpy, "If your program uses them: pip install numpy"),
    "launch, gloo": (partial(check_launch, "gloo"), REPORT),
    "launch, sim": (partial(check_launch, "sim"), REPORT),
    "Jupyter": (check_jupyter, 'To install them: pip install "parallel101[lessons]"'),
    "browser": (check_browser, BROWSER),
}
