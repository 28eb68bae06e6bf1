"""Reference solutions of homework 9."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A GPT (this is given).

    width        h, the features of a token
    layers       L
    heads        a
    vocabulary   V
    time         s, the tokens of a sample
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    time: int


@dataclass(frozen=True)
class Layout:
    """How the model is laid out (this is given).

    dp, tp, pp     d, t and P: the GPUs along each axis
    microbatch     b, samples of one microbatch
    microbatches   M, of each replica in a step
    chunks         v, the stages on each GPU of a pipeline
    recompute      "none", or "full": each layer's backward begins with a second forward pass
    zero_stage     0 to 3 (exercise 25a: at most 2; 25b: 0)
    sequence_parallel
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatch: int = 1
    microbatches: int = 1
    chunks: int = 1
    recompute: str = "none"
    zero_stage: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Cluster:
    """GPUs, and the links between them (this is given).

    flops          the peak of one GPU, in floating-point operations per second
    efficiency     the share of the peak that matrix products reach
    node           GPUs of one node
    nvlink         GB/s (10⁹ bytes) from one GPU to its node's switch, one way
    network        Gbit/s (10⁹ bits) from one node to the others, one way: all network cards
                   together. Each GPU has an equal share of it.
    """

    flops: float
    efficiency: float
    node: int
    nvlink: float
    network: float


def step_seconds(shape, layout, cluster):
    b, s, h = layout.microbatch, shape.time, shape.width
    visits = layout.microbatches * shape.layers / layout.pp  # of a microbatch to a layer
    forward = b * s * (2 * 12 * h**2 + 4 * s * h)
    again = layout.recompute == "full"

    def all_reduce(nbytes, n, reach):
        inside = reach <= cluster.node
        bandwidth = cluster.nvlink * 1e9 if inside else cluster.network * 1e9 / 8 / cluster.node
        return 2 * (n - 1) / n * nbytes / bandwidth

    reached = cluster.flops * cluster.efficiency
    matmul = visits * (3 + again) * forward / layout.tp / reached
    tp = visits * (4 + 2 * again) * all_reduce(2 * b * s * h, layout.tp, layout.tp)
    bubble = (layout.pp - 1) / (layout.chunks * layout.microbatches) * (matmul + tp)
    weights = 12 * h**2 * shape.layers / layout.pp / layout.tp
    dp = all_reduce(4 * weights, layout.dp, layout.tp * layout.dp)

    model = 3 * forward * shape.layers * layout.microbatches * layout.dp
    gpus = layout.dp * layout.tp * layout.pp
    mfu = model / (matmul + tp + bubble + dp) / (gpus * cluster.flops)
    return {"matmul": matmul, "tp": tp, "bubble": bubble, "dp": dp, "mfu": mfu}


def checkpoint_interval(gpus, hours_between_failures, write, restart):
    between = hours_between_failures * 3600 / gpus
    interval = math.sqrt(2 * write * between)
    lost = write / interval + (interval / 2 + restart) / between
    return {"interval": interval, "lost": lost}


def stragglers(gpus, q, slowdown):
    slow = 1 - (1 - q) ** gpus
    return {"slow": slow, "step": 1 + slow * (slowdown - 1)}


def memory(shape, layout):
    h, t = shape.width, layout.tp
    layers = shape.layers / layout.pp
    parameters = (shape.vocabulary * h + 12 * h**2 * layers) / t
    sbh = shape.time * layout.microbatch * h
    outside = t if layout.sequence_parallel else 1
    whole = 8 * sbh / outside + 24 * sbh / t
    if layout.chunks > 1:
        in_flight = layers / layout.chunks * (layout.pp * layout.chunks + layout.pp - 1)
    else:
        in_flight = layers * min(layout.pp, layout.microbatches)
    activations = in_flight * whole
    if layout.recompute == "full":
        activations = in_flight * 2 * sbh / outside + whole
    return {
        "weights": 2 * parameters,
        "gradients": 4 * parameters / (layout.dp if layout.zero_stage >= 2 else 1),
        "optimizer": 12 * parameters / (layout.dp if layout.zero_stage >= 1 else 1),
        "activations": activations,
    }


def choose_layout(shape, gpus, memory, batch, evaluate):
    best, fastest = None, math.inf
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            dp = gpus // (tp * pp)
            for microbatch in (1, 2, 4, 8):
                if dp == 0 or batch % (dp * microbatch):
                    continue
                for recompute, zero in (*(("none", stage) for stage in range(4)), ("full", 2)):
                    if recompute == "full" and best is not None:
                        break
                    layout = {
                        "dp": dp,
                        "tp": tp,
                        "pp": pp,
                        "microbatch": microbatch,
                        "microbatches": batch // (dp * microbatch),
                        "chunks": shape.layers // pp if pp > 1 else 1,
                        "recompute": recompute,
                        "zero_stage": zero,
                        "sequence_parallel": tp > 1,
                    }
                    try:
                        step = evaluate(**layout)
                    except ValueError:
                        continue
                    if step["bytes"] <= memory and step["seconds"] < fastest:
                        best, fastest = layout, step["seconds"]
    return best
