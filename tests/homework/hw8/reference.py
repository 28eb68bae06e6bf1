"""Reference solutions of homework 8."""

import math
import statistics
from collections import Counter

import torch
import torch.distributed as dist

# ---- 23 ----


def group_along(sizes, axes):
    """The group of the ranks that differ from this one only along these axes."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    names = list(sizes)
    last = [names.index(axis) for axis in axes]
    rows = ranks.movedim(last, list(range(-len(last), 0))).reshape(
        -1, math.prod(sizes[axis] for axis in axes)
    )
    mine = None
    for row in rows.tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            mine = group
    return mine


def train_on_mesh(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    data, tensor = group_along(sizes, ("dp", "cp")), group_along(sizes, ("tp",))
    rank = dist.get_rank()
    dp, cp = rank // (sizes["cp"] * sizes["tp"]), rank // sizes["tp"] % sizes["cp"]
    norms = []
    for batch in batches:
        x, y = (t.chunk(sizes["dp"])[dp].chunk(sizes["cp"], 1)[cp] for t in batch)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        squares = torch.zeros(2, dtype=torch.float64)  # of whole parameters, and of parts
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= sizes["dp"] * sizes["cp"]
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)
            squares[int(name in cut)] += p.grad.square().sum()
        dist.all_reduce(squares[1:], group=tensor)
        norms.append(math.sqrt(squares.sum()))
        for p in model.parameters():
            p.grad *= min(1.0, max_norm / norms[-1])
        optimizer.step()
    return norms


# ---- 24a ----


def bus_bandwidth(kind, start, given, result, clock, repeats):
    n = dist.get_world_size()
    start().wait()
    began = clock()
    for _ in range(repeats):
        start().wait()
    seconds = (clock() - began) / repeats
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1}.get(kind, (n - 1) / n)
    return factor * max(given.nbytes, result.nbytes) / seconds


# ---- 24b to 24d ----


def find_hang(record):
    n = len(record)

    def what(rank, k):
        row = record[rank][k]
        to = None if row["peer"] is None else (row["peer"] - rank) % n
        return row["line"], row["group"], to

    for k in range(max(map(len, record))):
        found = {rank: what(rank, k) for rank in range(n) if k < len(record[rank])}
        usual = Counter(found.values()).most_common(1)[0][0]
        for rank in range(n):
            if rank not in found and record[rank][-1]["end"] is not None:
                return rank, usual[0], "missing call"
            if rank in found and found[rank] != usual:
                line, group, _ = found[rank]
                if line != usual[0]:
                    return rank, usual[0], "missing call"
                return rank, line, "wrong peer" if group == usual[1] else "different order"


def find_slow(record):
    def totals(name, value):
        return [sum(value(row) for row in own if row["call"] == name) for own in record]

    def seconds(row):
        return row["end"] - row["posted"]

    for name, value, cause in (
        ("load", seconds, "slow compute"),
        ("forward", seconds, "slow compute"),
        ("send", lambda row: row["nbytes"], "large message"),
    ):
        by_rank = totals(name, value)
        rank = max(range(len(record)), key=by_rank.__getitem__)
        if by_rank[rank] > 1.5 * statistics.median(by_rank):
            return rank, next(row["line"] for row in record[rank] if row["call"] == name), cause
    for rank, own in enumerate(record):
        calls = [row["call"] for row in own]
        if calls.index("recv") < calls.index("send"):
            return rank, own[calls.index("send")]["line"], "late send"


def find_wrong(record):
    n = len(record)
    for k, rows in enumerate(zip(*record)):
        usual, agree = Counter(tuple(row["value"]) for row in rows).most_common(1)[0]
        odd = [rank for rank, row in enumerate(rows) if tuple(row["value"]) != usual]
        if agree == 1 or not odd:
            continue
        rank, row = odd[0], rows[odd[0]]
        before = [old for old in record[rank][:k] if old["name"] == row["name"]][-1]
        if row["name"] == "weights":
            return rank, row["line"], "skipped update"
        if row["value"] == record[rank][k - 1]["value"]:
            return rank, row["line"], "not summed"
        if row["value"] == before["value"]:
            return rank, row["line"], "stale gradient"
        assert math.isclose(n * row["value"][0], usual[0])
        return rank, row["line"], "divided twice"
