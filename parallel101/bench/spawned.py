"""Ranks as torch itself starts them, beside a launch: they time torch's own call when asked, and wait without a core otherwise.

    launched rank 0 ── ask ──▶ TCPStore ──▶ every spawned rank times `calls` calls
                    ◀── took ──          ◀── spawned rank 0: seconds a call

So both sides are measured turn by turn in one run, and neither has the other's settings.
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

from parallel101.bench.ranks import as_launch_does

Timed = Callable[..., float]  # (*what, calls) → seconds a call, called by every spawned rank
HOUR = timedelta(hours=1)


@contextmanager
def spawned_ranks(timed: Timed, ranks: int, backend: str) -> Iterator[int]:
    """Ranks of torch.multiprocessing.spawn that serve `ask` while inside; gives the port of the store they are asked through."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=HOUR, wait_for_workers=False)
    context = mp.spawn(_serve, (timed, ranks, backend, store.port), nprocs=ranks, join=False, daemon=True)
    try:
        yield store.port
        store.set(f"ask {store.add('turn', 1)}", "")
        while not context.join():  # until the last of them has ended
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def ask(port: int, *what: Any, calls: int) -> float:
    """Called by every launched rank: what `timed(*what, calls=calls)` gives on the spawned ones. RuntimeError: it failed there."""
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
    as_launch_does(rank, backend)
    store = dist.TCPStore("127.0.0.1", port, timeout=HOUR)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)
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
