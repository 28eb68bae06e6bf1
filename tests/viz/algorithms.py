"""Textbook algorithms for `virtual_ranks`, and wrong ones: each moves real values between ranks."""

from __future__ import annotations

from tests.viz.virtual_ranks import Exchange


def parts(n: int, p: int) -> list[slice]:
    """n elements in p balanced, possibly empty, parts."""
    return [slice((n // p) * i + min(i, n % p), (n // p) * (i + 1) + min(i + 1, n % p)) for i in range(p)]


def add(a: list, b: list) -> list:
    return [x + y for x, y in zip(a, b, strict=True)]


def ring_all_reduce(rank, n, x, twice=None, lost=None):
    """The ring, which can be told to err: at `twice` = (rank, step) it adds what it got two times, at `lost` it copies it."""
    x, cut, right, left = list(x), parts(len(x), n), (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        out, into = cut[(rank - step) % n], cut[(rank - step - 1) % n]
        (got,) = yield Exchange([(right, x[out])], [left])
        if (rank, step) == lost:
            x[into] = got
        else:
            x[into] = add(x[into], got)
            if (rank, step) == twice:
                x[into] = add(x[into], got)
    for step in range(n - 1):
        out, into = cut[(rank + 1 - step) % n], cut[(rank - step) % n]
        (got,) = yield Exchange([(right, x[out])], [left])
        x[into] = got
    return x


def ring_reduce_scatter(rank, n, x):
    x, cut, right, left = list(x), parts(len(x), n), (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        out, into = cut[(rank - step - 1) % n], cut[(rank - step - 2) % n]
        (got,) = yield Exchange([(right, x[out])], [left])
        x[into] = add(x[into], got)
    return x[cut[rank]]


def ring_all_gather(rank, n, x):
    parts_, right, left = {rank: x}, (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        (got,) = yield Exchange([(right, parts_[(rank - step) % n])], [left])
        parts_[(rank - step - 1) % n] = got
    return sum((parts_[r] for r in range(n)), [])


def bidirectional_all_gather(rank, n, x):
    half, right, left = len(x) // 2, (rank + 1) % n, (rank - 1) % n
    up, down = {rank: x[:half]}, {rank: x[half:]}
    for step in range(n - 1):
        a, b = yield Exchange([(right, up[(rank - step) % n]), (left, down[(rank + step) % n])], [left, right])
        up[(rank - step - 1) % n], down[(rank + step + 1) % n] = a, b
    return sum((up[r] + down[r] for r in range(n)), [])


def binomial_broadcast(rank, n, x):
    mask = 1
    while mask < n:
        mask *= 2
    have = rank == 0
    while mask > 1:
        mask //= 2
        if have and rank + mask < n:
            yield Exchange([(rank + mask, x)], [])
        elif not have and rank % mask == 0 and rank & mask:
            (x,) = yield Exchange([], [rank - mask])
            have = True
    return x


def binomial_reduce(rank, n, x):
    mask = 1
    while mask < n:
        if rank & mask:
            yield Exchange([(rank - mask, x)], [])
            return []
        if rank + mask < n:
            (got,) = yield Exchange([], [rank + mask])
            x = add(x, got)
        mask *= 2
    return x


def flat_scatter(rank, n, x):
    cut = parts(len(x), n)
    if rank == 0:
        for peer in range(1, n):
            yield Exchange([(peer, x[cut[peer]])], [])
        return x[cut[0]]
    (got,) = yield Exchange([], [0])
    return got


def eager_scatter(rank, n, x):
    """All sends posted at once: the root's way out still lets one message through at a time."""
    cut = parts(len(x), n)
    if rank == 0:
        yield Exchange([(peer, x[cut[peer]]) for peer in range(1, n)], [])
        return x[cut[0]]
    (got,) = yield Exchange([], [0])
    return got


def flat_gather(rank, n, x):
    if rank:
        yield Exchange([(0, x)], [])
        return []
    got = yield Exchange([], list(range(1, n)))
    return sum(got, list(x)) if n > 1 else x


def recursive_doubling_all_reduce(rank, n, x):
    mask = 1
    while mask < n:
        (got,) = yield Exchange([(rank ^ mask, x)], [rank ^ mask])
        x, mask = add(x, got), mask * 2
    return x


def recursive_doubling_all_gather(rank, n, x):
    have, mask = {rank: x}, 1
    while mask < n:
        keys = sorted(have)
        (got,) = yield Exchange([(rank ^ mask, sum((have[k] for k in keys), []))], [rank ^ mask])
        for index, key in enumerate(keys):
            have[key ^ mask] = got[index * len(x) : (index + 1) * len(x)]
        mask *= 2
    return sum((have[k] for k in sorted(have)), [])


def direct_all_to_all(rank, n, x):
    cut, got_from = parts(len(x), n), {}
    got_from[rank] = x[cut[rank]]
    for shift in range(1, n):
        (got,) = yield Exchange([((rank + shift) % n, x[cut[(rank + shift) % n]])], [(rank - shift) % n])
        got_from[(rank - shift) % n] = got
    return sum((got_from[r] for r in range(n)), [])


def chain_broadcast(rank, n, x):
    cut = parts(len(x), n)
    if rank == 0:
        for piece in cut:
            yield Exchange([(1, x[piece])], []) if n > 1 else Exchange()
        return x
    out, held = [], None
    for _ in cut:
        sends = [(rank + 1, held)] if held is not None and rank + 1 < n else []
        (held,) = yield Exchange(sends, [rank - 1])
        out += held
    if rank + 1 < n:
        yield Exchange([(rank + 1, held)], [])
    return out
