"""Peak bytes on each rank while a model is trained, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one stage of the pipeline, at the peak of a step.

    Attributes:
        weights, gradients, optimizer: the model states. optimizer includes master weights.
        activations: what is kept for backward, and what an operation needs besides.
        buffers: gradients in flight, gathered layers, temporaries of the optimizer.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def step_memory(shape: ModelShape, layout: ParallelLayout) -> tuple[StageMemory, ...]:
    """Return the peak bytes of each rank along pp."""
    h, s, b, t = shape.width, shape.time // layout.cp, layout.microbatch, layout.tp
    ffn, kv = shape.feed_forward or 4 * h, shape.kv_heads or shape.heads
    attention = h * h * 2 + 2 * h * h * kv // shape.heads
    mlp = (3 if shape.gated else 2) * h * ffn
    if shape.experts:
        mlp = mlp * shape.experts // layout.ep
    layer = (attention + mlp) // t + 4 * h
    item = 4 if layout.precision == "fp32" else 2
    grad_item = 4 if layout.gradient_dtype == "fp32" else item
    state = 12 if "mixed" in layout.precision else 2 * item
    n = layout.dp * layout.cp * layout.ep
    stages = []
    for stage in range(layout.pp):
        layers = shape.layers / layout.pp
        ends = (stage == 0) + (stage == layout.pp - 1)
        ends = 1 if layout.pp == 1 and shape.tied else ends
        parameters = layers * layer + ends * shape.vocabulary * h / t
        weights = parameters * item / (n if layout.zero_stage == 3 else 1)
        gradients = parameters * grad_item / (n if layout.zero_stage >= 2 else 1)
        optimizer = parameters * state / (n if layout.zero_stage >= 1 else 1)
        sbh, outside = s * b * h, t if layout.sequence_parallel else 1
        inside = (2 + 2 * kv / shape.heads) * h + (3 if shape.gated else 2) * ffn
        kept = item * s * b * (4 * h / outside + inside / t)
        if shape.attention == "unfused" and layout.recompute == "none":
            kept += 2 * item * shape.heads * s * s * b / t
        whole = kept
        if layout.recompute == "full":
            kept = item * sbh / outside
        held = min(layout.microbatches, layout.pp - stage)
        if layout.chunks > 1:
            held *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
        activations = held * layers * kept + (whole if layout.recompute == "full" else 0)
        if stage == layout.pp - 1:
            activations += (item + 8) * s * b * shape.vocabulary / t
        buffers = 2 * layer * item if layout.zero_stage >= 2 else 0.0
        stages.append(StageMemory(weights, gradients, optimizer, activations, buffers))
    return tuple(stages)
