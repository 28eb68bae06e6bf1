"""Odd but correct solutions of homework 9: they keep full points."""

import math
from dataclasses import dataclass

import torch


def step_seconds__by_counting(shape, layout, cluster):
    """Each product, each pass and each message by itself, in loops; tensors in place of numbers."""
    b, s, h, t = layout.microbatch, shape.time, shape.width, layout.tp
    products = [
        (b * s, h, 3 * h // t),
        *[(b * s, h // t, s)] * 2,
        (b * s, h // t, h),
        (b * s, h, 4 * h / t),
        (b * s, 4 * h / t, h),
    ]
    one_forward = sum(2 * m * k * n for m, k, n in products)
    ring = {}
    for axis, n, reach in (("tp", t, t), ("dp", layout.dp, t * layout.dp)):
        share = cluster.network / cluster.node * 1e9 / 8
        link = share if reach > cluster.node else cluster.nvlink * 1e9
        ring[axis] = (n - 1) / n / link * 2
    passes = ["forward", "backward", "backward"] + ["forward"] * (layout.recompute == "full")
    compute = send = 0.0
    for kind in passes:
        for _ in range(shape.layers // layout.pp):
            compute += one_forward / cluster.flops / cluster.efficiency
            # a backward pass takes as long as two forwards, and sends as much as one
            send += 2 * 2 * b * s * h * ring["tp"] / (2 if kind == "backward" else 1)
    slot = (compute + send) / layout.chunks
    said = {
        "dp": torch.tensor(4 * 12 * h * h * shape.layers / (t * layout.pp) * ring["dp"]).double(),
        "matmul": compute * layout.microbatches,
        "tp": send * layout.microbatches,
        "bubble": slot * (layout.pp - 1),
    }
    gpus = layout.dp * layout.tp * layout.pp
    work = 72 * b * layout.microbatches * layout.dp * shape.layers * s * h**2 * (1 + s / (6 * h))
    return said | {"mfu": work / sum(said.values()) / gpus / cluster.flops, "unit": "seconds"}


def checkpoint_interval__searched(gpus, hours_between_failures, write, restart):
    """The minimum, found by halving where the derivative changes its sign."""
    rate = gpus / (hours_between_failures * 3600)
    low, high = 1e-3, 1e9
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        rises = rate / 2 > write / middle**2
        low, high = (low, middle) if rises else (middle, high)
    return {"lost": write / low + rate * (low / 2 + restart), "interval": low}


def stragglers__by_logarithm(gpus, q, slowdown):
    fast = math.exp(gpus * math.log1p(-q))
    return {"slow": 1 - fast, "step": fast + (1 - fast) * slowdown}


def memory__by_replay(shape, layout):
    """Goes through the first GPU's schedule, action by action, and counts what is kept."""
    stages, chunks, total = layout.pp, layout.chunks, layout.microbatches * layout.chunks
    warm_up = min(total, stages - 1 if chunks == 1 else (stages - 1) * 2 + (chunks - 1) * stages)
    actions = "F" * warm_up + "FB" * (total - warm_up) + "B" * warm_up
    now = peak = 0
    for action in actions:
        now += 1 if action == "F" else -1
        peak = max(peak, now)
    tensors = [(1, False)] * 4 + [(1, True)] * 4 + [(4, True)] * 2
    token = sum(
        2 * shape.width * size / (layout.tp if inside or layout.sequence_parallel else 1)
        for size, inside in tensors
    )
    tokens = shape.time * layout.microbatch
    here = shape.layers // (stages * chunks)
    if layout.recompute == "full":
        cut = layout.tp if layout.sequence_parallel else 1
        activations = tokens * (token + peak * here * 2 * shape.width / cut)
    else:
        activations = peak * here * tokens * token
    numbers = shape.vocabulary * shape.width + shape.layers // stages * 12 * shape.width**2
    held = {"weights": 2, "gradients": 4, "optimizer": 4 + 4 + 4}
    cut = {"weights": 3, "gradients": 2, "optimizer": 1}
    states = {
        name: numbers * size / layout.tp / (layout.dp if layout.zero_stage >= cut[name] else 1)
        for name, size in held.items()
    }
    return {**states, "activations": activations, "total": sum(states.values()) + activations}


@dataclass
class Mine:
    """A layout of one's own."""

    dp: int
    tp: int
    pp: int
    microbatch: int
    microbatches: int
    chunks: int
    zero_stage: int
    recompute: str
    sequence_parallel: bool


AGAIN = ("none", "full")


def divisors(number, most):
    return [k for k in range(1, most + 1) if number % k == 0]


def choose_layout__climbs(shape, gpus, memory, batch, evaluate):
    """Goes uphill from many starts, a change of one thing at a time, and never asks twice."""
    known = {}
    axes = (
        divisors(math.gcd(gpus, shape.heads), 8),
        divisors(gpus, 32),
        divisors(batch, 8),
        (False, True),
        (0, 1, 2, 3),
        AGAIN,
    )

    def layout_of(tp, pp, b, many, zero, again):
        dp = gpus // (tp * pp)
        chunks = shape.layers // pp if many and pp > 1 else 1
        return Mine(dp, tp, pp, b, batch // (dp * b), chunks, zero, again, tp > 1)

    def score(point):
        if point not in known:
            try:
                step = evaluate(**vars(layout_of(*point)))
                over = max(0.0, step["bytes"] / memory - 1)
                known[point] = step["mfu"] if not over else -over
            except (ValueError, ZeroDivisionError):
                known[point] = -math.inf
        return known[point]

    found = []
    for start in [(t, p, 1, True, z, "none") for t in axes[0] for p in (1, 4) for z in (2, 3)]:
        here = None
        there = start
        while here != there:
            here = there
            near = [(*here[:k], x, *here[k + 1 :]) for k, values in enumerate(axes) for x in values]
            there = max([here, *near], key=score)
        found.append(here)
    return layout_of(*max(found, key=score))
