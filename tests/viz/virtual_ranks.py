"""A message-passing machine in eighty lines, so that pictures can be tested on records of algorithms that really ran.

A rank is a generator: `got = yield Exchange(sends=[(dst, values)], receives=[src])` posts all of it and goes on when all
is done. Values come out of the moves, and the events out of the values. With `jitter` the clock is as uneven as a wall's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch

from parallel101.analysis.provenance import origin_tensor
from parallel101.record.trace import Event, Trace


class Exchange(NamedTuple):
    sends: list = []  # noqa: RUF012  (never changed)
    receives: list = []  # noqa: RUF012


class _Post(NamedTuple):
    time: float
    values: list | None
    number: int  #  which exchange of its rank it belongs to


Program = Callable[[int, int, list], Generator]


def run(program: Program, world_size: int, numel: int, *, jitter: float = 0.0, seed: int = 0, payload: bool = True, backend: str = "sim"):
    """Run program(rank, world_size, its origin values) on every rank. Returns (trace, results)."""
    noise = random.Random(seed)
    ranks = [program(r, world_size, origin_tensor(r, world_size, numel).tolist()) for r in range(world_size)]
    clock = [noise.uniform(0, jitter) for _ in range(world_size)]
    results: list = [None] * world_size
    open_posts: list[dict] = [{} for _ in range(world_size)]  #  what each rank waits for: (kind, peer, k) -> _Post
    finished: list[list] = [[] for _ in range(world_size)]
    waiting = [False] * world_size
    alive = [True] * world_size
    got: list[dict] = [{} for _ in range(world_size)]
    counters: dict[tuple, int] = {}
    events: list[Event] = []
    asked: list[Exchange] = [Exchange()] * world_size

    def resume(rank: int):
        answer = [got[rank][key] for key in sorted(got[rank])] if waiting[rank] else None
        waiting[rank], got[rank], finished[rank] = False, {}, []
        try:
            asked[rank] = ranks[rank].send(answer)
        except StopIteration as stop:
            alive[rank] = False
            results[rank] = None if stop.value is None else torch.tensor(stop.value, dtype=torch.int64)
            return
        waiting[rank] = True
        for kind, posts in (("send", asked[rank].sends), ("recv", [(src, None) for src in asked[rank].receives])):
            for index, (peer, values) in enumerate(posts):
                number = counters.get((kind, rank, peer), 0)
                counters[kind, rank, peer] = number + 1
                open_posts[rank][kind, peer, number] = _Post(clock[rank], None if values is None else list(values), index)

    while any(alive):
        moved = False
        for rank in range(world_size):
            if alive[rank] and not open_posts[rank]:
                if waiting[rank] and finished[rank]:
                    clock[rank] = max(finished[rank])
                resume(rank)
                moved = True
        for src in range(world_size):
            for (kind, dst, number), send in list(open_posts[src].items()):
                receive = open_posts[dst].get(("recv", src, number))
                if kind != "send" or receive is None:
                    continue
                start = max(send.time, receive.time)
                end = start + 1.0 + noise.uniform(0, jitter)
                nbytes = 8 * len(send.values)
                kept = send.values if payload else None
                for who, kind_, peer, post in ((src, "send", dst, send), (dst, "recv", src, receive)):
                    begin, shape = start if backend == "sim" else post.time, (len(send.values),)
                    event = Event(
                        who, kind_, peer, 0, nbytes, begin, end, "algorithm.py:1", post.time, "world", number, shape, "int64", kept
                    )
                    events.append(event)
                    finished[who].append(end)
                    del open_posts[who][kind_, peer, number]
                got[dst][receive.number] = send.values
                moved = True
        assert moved, "deadlock"
    return Trace(events, world_size, backend), results
