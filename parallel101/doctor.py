"""Says what works on this machine, by trying it, and what to do about what does not.

Each check is one small function that looks or tries and returns one row. The last ones bring real ranks to life, so that
a green table means: the lessons will run here.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import textwrap
import time
import webbrowser
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = "2.11"
TESTED_TORCH = "2.13.0"
MARKS = {"works": "✓", "fails": "✗", "absent": "–"}


class Row(NamedTuple):
    """What one check found. `state` is "works", "fails" or "absent" (not there, and the course does without)."""

    state: str
    found: str
    advice: str = ""
    name: str = ""  #  of the check, as CHECKS has it


def main(as_json: bool = False) -> int:
    """Run every check and print the table, row by row, or JSON. Returns 0 when nothing fails (what is absent is not needed)."""
    rows = []
    for row in examine():
        rows.append(row)
        if not as_json:
            print(as_text(row), flush=True)
    failing = [row.name for row in rows if row.state == "fails"]
    if as_json:
        print(
            json.dumps({"ok": not failing, "checks": [{"name": row.name, **row._asdict()} for row in rows]}, indent=2, ensure_ascii=False)
        )
    else:
        print(f"\nNot working: {', '.join(failing)}. The arrows say what to do." if failing else "\nAll that the lessons need works here.")
    return 1 if failing else 0


def as_text(row: Row) -> str:
    """One row of the table, its advice below it."""
    lines = textwrap.wrap(row.found, 100) or [""]
    if row.advice:
        lines += textwrap.wrap(f"→ {row.advice}", 100, subsequent_indent="  ")
    first = f"{MARKS[row.state]} {row.name:<12}  "
    return first + f"\n{' ' * len(first)}".join(lines)


def examine() -> Iterator[Row]:
    """Every check in turn. A check that itself breaks is a row that fails, and never the end of the table."""
    for name, check in CHECKS.items():
        try:
            yield check()._replace(name=name)
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            yield Row("fails", told, "If the message does not help, report it with what `parallel101 doctor --json` prints.", name)


def check_python() -> Row:
    found = f"{platform.python_version()} at {sys.executable}, on {platform.platform(terse=True)}"
    if sys.version_info < OLDEST_PYTHON:
        return Row("fails", found, "parallel101 needs Python 3.10 or newer: make PYTHON=/path/to/a/newer/python3")
    return Row("works", found)


def check_torch() -> Row:
    from packaging.version import Version

    get = f"pip install torch=={TESTED_TORCH} (Linux without a GPU: add --index-url https://download.pytorch.org/whl/cpu)"
    try:
        found = version("torch")
        import torch
    except PackageNotFoundError:
        return Row("fails", "not installed", get)
    except (ImportError, OSError) as error:
        return Row("fails", f"{found} is installed and cannot be imported: {error}", get)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if Version(torch.__version__) < Version(OLDEST_TORCH):
        return Row("fails", f"{found}, and parallel101 needs {OLDEST_TORCH} or newer", get)
    same = Version(torch.__version__).public == TESTED_TORCH
    return Row("works", f"{found} ({built} build)" + ("" if same else f"; the course is tested with {TESTED_TORCH}"))


def check_gloo() -> Row:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return Row("works", "in this build of torch: real ranks on this machine's cores")
    return Row("fails", "not in this build of torch", "Install torch from PyPI or from pytorch.org; their builds have it.")


def check_nccl() -> Row:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return Row("absent", "not in this build of torch: backend='nccl' needs a CUDA build on Linux, and gloo and sim do not")
    if not torch.cuda.is_available():
        return Row("absent", "in this build of torch, with no GPU to use it on")
    return Row("works", "version " + ".".join(map(str, torch.cuda.nccl.version())))


def check_gpus() -> Row:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        advice = "This build of torch could use one: does nvidia-smi list a GPU, and is its driver new enough?" if built else ""
        return Row("absent", "none that torch can use. Every lesson runs without: ranks on gloo and on sim", advice)
    count = torch.cuda.device_count()
    names = ", ".join(f"{torch.cuda.get_device_name(i)} ({torch.cuda.mem_get_info(i)[1] / 2**30:.0f} GiB)" for i in range(count))
    if count == 1:
        advice = (
            "NCCL gives each rank a GPU of its own. With one GPU: launch(…, backend='nccl', world_size=1) runs, and shows that a program "
            "works on CUDA tensors. Two ranks or more do not run on nccl, and no traffic between GPUs can be seen: run them on gloo or "
            "sim, where the program is the same."
        )
        return Row("works", f"1: {names}", advice)
    return Row("works", f"{count}: {names}; up to {count} ranks on nccl")


def check_loopback() -> Row:
    import psutil

    names = [name for name, addresses in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in addresses)]
    advice = "Ranks of one machine meet at 127.0.0.1. In a container: ip link set lo up. Else: does a firewall close it?"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=2) as client:
            there, _ = server.accept()
            with there:
                client.sendall(b"?")
                there.settimeout(2)
                assert there.recv(1) == b"?"
    except OSError as error:
        return Row("fails", f"no connection over 127.0.0.1: {error}", advice)
    return Row("works", f"{', '.join(names) or 'an interface without a name'} (127.0.0.1), a byte sent and received")


def check_fork_server() -> Row:
    if hasattr(os, "fork"):
        return Row("works", "this system can fork: ranks start from a process that has already imported torch")
    advice = "Works all the same, and each launch takes as long as importing torch. Under WSL 2 it is fast."
    return Row("absent", f"{platform.system()} cannot fork: each rank is a new process", advice)


def sum_of_ranks() -> float:
    """A rank's first collective: the sum of all ranks' numbers, by torch's own all-reduce."""
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def check_launch(backend: str) -> Row:
    """Two ranks that sum their numbers: the first launch, and a second one that finds everything warm."""
    import parallel101

    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        results = list(parallel101.launch(sum_of_ranks, world_size=2, backend=backend, timeout=30.0).results)
        seconds.append(time.perf_counter() - began)
        if results != [1.0, 1.0]:
            return Row("fails", f"the sum of ranks 0 and 1 came out as {results}, and should be [1.0, 1.0]", "Please report this.")
    return Row("works", f"2 ranks summed their numbers in {seconds[0]:.2f} s, and again in {seconds[1]:.2f} s")


def check_machine() -> Row:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{os.cpu_count()} cores, {memory.total / 2**30:.1f} GiB of memory, {memory.available / 2**30:.1f} free"
    return Row("works", found)


def check_jupyter() -> Row:
    missing = []
    found = []
    for package in ("jupyterlab", "ipykernel", "ipywidgets"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Row("fails", f"{', '.join(missing)} not installed", f"pip install {' '.join(missing)}")
    return Row("works", ", ".join(found))


def find_chromium() -> str | None:
    """A browser that tests can drive over DevTools, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)


def check_browser() -> Row:
    try:
        found = find_chromium() or webbrowser.get().name
    except webbrowser.Error:
        advice = "On a machine without a screen: parallel101 lab --no-browser, and open the address it prints from your own machine."
        return Row("absent", "none found", advice)
    return Row("works", found)


CHECKS: dict[str, Callable[[], Row]] = {
    "Python": check_python,
    "machine": check_machine,
    "torch": check_torch,
    "gloo": check_gloo,
    "NCCL": check_nccl,
    "GPUs": check_gpus,
    "loopback": check_loopback,
    "fork server": check_fork_server,
    "launch, gloo": lambda: check_launch("gloo"),
    "launch, sim": lambda: check_launch("sim"),
    "Jupyter": check_jupyter,
    "browser": check_browser,
}
