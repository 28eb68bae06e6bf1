"""Homework 9: lay out a large model on many GPUs, by estimates.

Nothing is trained here and no messages are sent. Each function computes numbers about a training
run: bytes, seconds, shares. n GPUs are numbered as in lesson 11: GPUs along tp are neighbours, then
come those along dp, then those along pp.
"""

from collections.abc import Callable
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


def memory(shape: Shape, layout: Layout) -> dict[str, float]:
    """Count the bytes that a GPU of the pipeline's first stage holds at the peak of a step.

        first of 3 stages   F0 F1 F2 ·  ·  B0 F3 B1 …     what a forward pass keeps
        last of 3 stages    ·  ·  F0 B0 F1 B1 F2 B2 …     is freed by its backward pass

    Parameters: the embedding has V · h, and each layer 12h². tp cuts all of them. Leave out biases,
    norms and positions. There are at least two stages, and the output layer is on the last one.

    Precision: weights are in bf16 and gradients in fp32. Adam keeps two averages and the master
    weights, all in fp32. ZeRO-1 cuts the optimizer's state over dp, and ZeRO-2 the gradients, too.

    Activations are in bf16. For each microbatch, a layer keeps

        inputs of the two norms, of query-key-value, and of the MLP       4 of (b, s, h)
        query, key, value, and what attention returns                     4 of (b, s, h)
        the MLP's features before and after GELU                          2 of (b, s, 4h)

    tp cuts the second and the third row, which are between a column layer and a row layer. Sequence
    parallel also cuts the first row, along time (backward gathers it again). Attention is fused, so
    it keeps no (s, s) matrix.
    With full recomputation, a layer keeps its input only (which sequence parallel cuts), until its
    backward pass computes everything again, one layer at a time.

    The schedule is 1F1B, or for v > 1 the interleaved one. Then M is a multiple of P, and at least
    2P.

    Returns:
        "weights", "gradients", "optimizer", "activations": bytes.

    Points: two fifths for "activations", one fifth for each of the others.
    """
    raise NotImplementedError("memory is not written yet")


def step_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> dict[str, float]:
    """Estimate the time of a training step, as you would on paper.

        first of 3 stages   F0 F1 F2 ·  ·  B0 F3 B1 … B3   ┐ all-reduce of
        last of 3 stages    ·  ·  F0 B0 F1 B1 F2 B2 …      ┘ the gradients

        F, B                matrix products, and all-reduces along tp

    Only these parts take time, and none of them overlaps with another:

    1. Matrix products of the layers. The weight matrices of a layer have 12h² numbers together. In
       attention, queries are multiplied by keys, and weights by values: all s² pairs, although half
       of them are masked. A backward pass takes twice the operations of its forward pass. Products
       run at `efficiency` of the peak, and tp divides each of them evenly.
    2. All-reduces along tp, of a microbatch's activations in bf16, (b, s, h). Attention has one in
       the forward pass and one in the backward pass, and so does the MLP. A second forward pass
       repeats those of the first.
    3. The bubble of 1F1B, or of the interleaved schedule if v > 1: how long a GPU waits in a step
       for other stages.
    4. One all-reduce along dp of the GPU's gradients, once a step, in fp32.

    Each all-reduce is a ring without latency. It runs at NVLink's speed if all its GPUs are in one
    node, and otherwise at the network's.

    Returns:
        "matmul", "tp", "bubble" and "dp": seconds of these parts on one GPU, in one step;
        "mfu": the model FLOPs utilization of a step that takes the sum of all four. Recomputation
        isn't the model's own work.

    L is a multiple of P · v, and the heads are a multiple of t. Leave out the embedding, the output
    layer and everything smaller.

    Points: one fifth for each of the five numbers.
    """
    raise NotImplementedError("step_seconds is not written yet")


def choose_layout(
    shape: Shape, gpus: int, memory: float, batch: int, evaluate: Callable[..., dict[str, float]]
) -> Layout:
    """Choose a layout for a model on a cluster: it fits, and its MFU is high.

    Args:
        shape: of the model.
        gpus: how many there are, in nodes of 8. The layout uses all of them: dp · tp · pp = gpus.
        memory: bytes of each GPU.
        batch: samples of a step: batch = microbatch · microbatches · dp.
        evaluate: evaluate(dp=…, tp=…, pp=…, microbatch=…, microbatches=…, …) predicts a step, and
            returns a dict: "seconds"; "mfu"; "bytes", at the peak, on the fullest GPU. Its
            arguments are Layout's fields. An invalid layout raises a ValueError that says why, and
            doesn't use up a call. You have 400 calls.

    Returns:
        A Layout, or a dict with its fields, whose "bytes" are at most `memory`. Its MFU is compared
        with that of the best layout that the planner of parallel101 finds for this model and
        cluster: 95 % earns full points, 85 % none, linear in between.

    The grader draws models and clusters that you haven't seen. `evaluate` is lesson 11's quick
    model, with latencies and all small kernels, and gradients in bf16.

    Points: 30 % value, 70 % mfu. Value means that the layout uses all GPUs, and fits.
    """
    raise NotImplementedError("choose_layout is not written yet")


def checkpoint_interval(
    gpus: int, hours_between_failures: float, write: float, restart: float
) -> dict[str, float]:
    """Choose how often to write a checkpoint.

        ───────── interval ─────────┤write├───────── interval ──── ✗ restart ├─ again ─┤ …

    Args:
        gpus: the GPUs of the run. When one fails, all stop.
        hours_between_failures: the mean time between failures of one GPU, in hours.
        write: seconds to write a checkpoint, during which nobody computes.
        restart: seconds from a failure until the run computes again, from the latest checkpoint.

    Returns:
        "interval": seconds of computing between two checkpoints, so that the least time is lost;
        "lost": the share of time lost with this interval: to writing, repeating and restarting.

    Use Young's approximation, which assumes that failures are much rarer than all these times:
    divide the time of a write by the interval, and the time that a failure costs by the time
    between two failures. A failure is equally likely at any moment of an interval.

    Points: half for each of the two numbers.
    """
    raise NotImplementedError("checkpoint_interval is not written yet")


def stragglers(gpus: int, q: float, slowdown: float) -> dict[str, float]:
    """Estimate what slow GPUs cost in synchronous training.

    Args:
        gpus: the GPUs of the run. A step ends when the slowest is done.
        q: the probability that a GPU is slow in a step, the same for each GPU and each step.
        slowdown: how many times longer a slow GPU takes.

    Returns:
        "slow": the probability that a step has a slow GPU;
        "step": the mean time of a step, relative to one without slow GPUs.

    Each of the two numbers earns half of the points.
    """
    raise NotImplementedError("stragglers is not written yet")
