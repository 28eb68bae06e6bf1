"""Ranks that torch.multiprocessing.spawn starts beside a launch.

They time torch's own calls on request, and sleep otherwise.

    launched rank 0 ── ask ──▶ TCPStore ──▶ every spawned rank times `calls` calls
                    ◀── took ──          ◀── spawned rank 0: seconds per call

So both sides are measured in turn in one run, and each side has its own settings.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel101.laboratory.bench.process import configure_spawned_rank

Timed = Callable[..., float]  # (*what, calls) → seconds per call; every spawned rank calls it
HOUR = timedelta(hours=1)


@contextmanager
def spawned_ranks(timed: Timed, ranks: int, backend: str) -> Iterator[int]:
    """Start ranks that answer `ask` inside the with block.

    Yields the port of the store through which they are asked.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=HOUR, wait_for_workers=False)
    context = mp.spawn(
        _serve, (timed, ranks, backend, store.port), nprocs=ranks, join=False, daemon=True
    )
    try:
        yield store.port
        store.set(f"ask {store.add('turn', 1)}", "")
        while not context.join():  # join returns when one rank has ended; wait for all
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def ask(port: int, *what: Any, calls: int) -> float:
    """Return what `timed(*what, calls=calls)` returns on spawned rank 0.

    Every launched rank calls this.

    Raises:
        RuntimeError: `timed` failed on a spawned rank.
    """
    seconds = torch.zeros((), dtype=torch.float64)
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", port, timeout=HOUR)
        turn = store.add("turn", 1)
        store.set(f"ask {turn}", json.dumps({"what": what, "calls": calls}))
        took = json.loads(store.get(f"took {turn}"))
        if "failed" in took:
            raise RuntimeError(f"a spawned rank failed:\n{took['failed']}")
        seconds.fill_(took["seconds"])
    dist.broadcast(seconds, 0)
    return seconds.item()


def _serve(rank: int, timed: Timed, ranks: int, backend: str, port: int) -> None:
    configure_spawned_rank(rank, backend)
    store = dist.TCPStore("127.0.0.1", port, timeout=HOUR)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=ranks
    )
    turn = 1
    while asked := store.get(f"ask {turn}"):
        question = json.loads(asked)
        try:
            seconds = timed(*question["what"], calls=question["calls"])
        except Exception:
            store.set(f"took {turn}", json.dumps({"failed": traceback.format_exc()}))
            raise
        if rank == 0:
            store.set(f"took {turn}", json.dumps({"seconds": seconds}))
        turn += 1
    dist.destroy_process_group()
