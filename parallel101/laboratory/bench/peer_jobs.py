"""Jobs of torchrun's beside a benchmark: they run what they are asked to, and sleep otherwise.

    who asks ── "f, arguments" ──▶ TCPStore ──▶ every rank of the job calls f(*arguments)
             ◀── its result ────           ◀── rank 0 of the job

So a benchmark measures its own ranks and a job's in turn, each in its own processes.

    torchrun … -m parallel101.laboratory.bench.peer_jobs PORT NAME BACKEND [launch]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import parallel101 as p101

HOUR = timedelta(hours=1)


@contextmanager
def peer_jobs(
    commands: Mapping[str, Sequence[str]], *, ranks: int = 2, backend: str = "gloo"
) -> Iterator[int]:
    """Start jobs inside the with block, and yield the port of the store through which one asks.

    Args:
        commands: of each job, what torchrun runs: [] is this file itself, ["launch"] this file,
            which launches its work, and another list what comes before `-m` and this file.

    Raises RuntimeError if a job ends before it can be asked.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=HOUR, wait_for_workers=False)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    started: dict[str, subprocess.Popen] = {}
    try:
        for name, command in commands.items():
            before, after = ([], command) if command == ["launch"] else (command, [])
            script = [*before, "-m", "parallel101.laboratory.bench.peer_jobs", str(store.port)]
            script = [*torchrun, str(ranks), *script, name, backend, *after]
            started[name] = subprocess.Popen(script, env=environ, stdout=subprocess.DEVNULL)
        for name, job in started.items():
            while not store.check([f"{name}/ready"]):
                if job.poll() is not None:
                    raise RuntimeError(f"the job {name!r} has ended: see what it printed")
                time.sleep(0.01)
        yield store.port
        for name, job in started.items():
            store.set(f"{name}/{store.add(f'{name}/turns', 1)}", "")
            job.wait(60)
    finally:
        for job in started.values():
            if job.poll() is None:
                job.terminate()  # torchrun then ends its ranks
                job.wait(60)


def ask(port: int, job: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function, of a module, returns on rank 0 of a job whose ranks all call it.

    Raises RuntimeError if it fails on a rank.
    """
    store = dist.TCPStore("127.0.0.1", port, timeout=HOUR)
    key = f"{job}/{store.add(f'{job}/turns', 1)}"
    store.set(key, json.dumps([function.__module__, function.__name__, arguments]))
    answer = json.loads(store.get(f"{key}/answer"))
    if "failed" in answer:
        raise RuntimeError(f"a rank of the job {job!r} failed:\n{answer['failed']}")
    return answer["result"]


def serve(port: int, job: str) -> None:
    """Answer until the jobs end; each rank of a job calls this."""
    store, turn = dist.TCPStore("127.0.0.1", port, timeout=HOUR), 1
    store.set(f"{job}/ready", "")
    while question := store.get(f"{job}/{turn}"):
        module, name, arguments = json.loads(question)
        try:
            result = getattr(import_module(module), name)(*arguments)
        except Exception:
            store.set(f"{job}/{turn}/answer", json.dumps({"failed": traceback.format_exc()}))
            raise
        if dist.get_rank() == 0:
            store.set(f"{job}/{turn}/answer", json.dumps({"result": result}))
        turn += 1


def join(backend: str, local_rank: int, **options: Any) -> None:
    """Join torch's process group with one thread and, on NCCL, one GPU, as ranks of `launch` do."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    dist.init_process_group(backend, **options)


if __name__ == "__main__":
    port, name, backend = int(sys.argv[1]), *sys.argv[2:4]
    if sys.argv[4:] == ["launch"]:
        p101.launch(serve, port, name, backend=backend, timeout=HOUR.total_seconds())
    else:
        join(backend, int(os.environ["LOCAL_RANK"]))
        serve(port, name)
        dist.destroy_process_group()
