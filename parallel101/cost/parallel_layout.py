"""A model's layout on GPUs: the sizes of the mesh's axes, and the trainer's options.

`stage_layers` gives the number of a model's layers on each pipeline stage.

    80 layers, 16 stages    5 5 5 … 5
    126 layers, 16 stages   7 8 8 … 8 7     the embedding and the head count as a layer each
    126 layers, 128 stages  0 1 1 … 1 0     16 ranks with 8 chunks: two stages without layers

The embedding is on the first stage, the final norm and the head on the last. The last rows are
those of Llama 3 405B, one layer fewer on the first and on the last stage: "The Llama 3 Herd of
Models" (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from parallel101.cost.model_shape import ModelShape, check_known, check_whole

# how many running averages of the gradients an optimizer keeps, each as large as the weights
AVERAGES = {"adamw": 2, "momentum": 1, "sgd": 0}
KNOWN: dict[str, tuple[Any, ...]] = {
    "optimizer": tuple(AVERAGES),
    "zero_stage": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16-mixed"),
    "gradient_dtype": (None, "fp32"),
    "context": ("zigzag", "contiguous", "ulysses"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"),
    **dict.fromkeys(("sequence_parallel", "overlap"), (False, True)),
}


@dataclass(frozen=True)
class ParallelLayout:
    """The arguments of a HybridTrainer that decide the time and the memory of a step.

    Attributes:
        dp, tp, pp, cp, ep: ranks along each axis. GPUs are numbered with tp fastest, then cp, ep,
            dp and pp last, so that tp stays inside a node.
        microbatch: samples of one microbatch, on each position along dp and ep.
        microbatches: in a step, on each of these positions. The batch has
            microbatch · microbatches · dp · ep samples.
        chunks: stages on each rank of a pipeline; above 1 its schedule is "interleaved", else
            `schedule`.
        optimizer: torch's fused AdamW, or SGD with or without momentum. The planner plans AdamW.
        zero_stage, recompute, sequence_parallel, precision, gradient_dtype, overlap, context: as
            HybridTrainer's. gradient_dtype is "fp32" or None here. "selective" recomputes the core
            of attention (Korthikanti et al.); torchtitan's means every second product.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int = 1
    microbatches: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bf16-mixed"
    gradient_dtype: str | None = None
    overlap: bool = True
    context: str = "zigzag"

    def __post_init__(self) -> None:
        check_whole(self, "dp", "tp", "pp", "cp", "ep", "microbatch", "microbatches", "chunks")
        check_known(self, KNOWN)
        if self.chunks > 1 and self.pp == 1:
            raise ValueError(f"chunks={self.chunks} without a pipeline: expected pp of 2 or more")
        if self.chunks > 1 and self.microbatches % self.pp:
            raise ValueError(
                f"microbatches={self.microbatches} with chunks={self.chunks}: expected a multiple "
                f"of pp={self.pp}, as the interleaved schedule has groups of that many"
            )

    @property
    def strides(self) -> dict[str, int]:
        """The distance between neighbouring ranks of each axis, by name."""
        found, stride = {}, 1
        for axis in ("tp", "cp", "ep", "dp", "pp"):
            found[axis] = stride
            stride *= getattr(self, axis)
        return found

    @property
    def mesh(self) -> tuple[int, ...]:
        """Ranks along dp, tp, pp, cp and ep."""
        return self.dp, self.tp, self.pp, self.cp, self.ep

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight in the forward, and of a number in most activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of a number in the gradients that are accumulated and sent."""
        return 4 if self.gradient_dtype == "fp32" else self.itemsize

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.microbatch * self.microbatches * self.dp * self.ep


# ── layers of the stages ──


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers on each of `stages` global stages (pp · chunks of them).

    Raises ValueError if stages divides neither layers nor layers + 2.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    each, rest = divmod(layers + 2, stages)
    if rest or stages < 3:
        raise ValueError(
            f"{layers} layers can't be shared by {stages} pipeline stages: expected a number of "
            f"stages that divides {layers}, or {layers + 2} with the embedding and the head as a "
            "layer each"
        )
    return (each - 1, *(each,) * (stages - 2), each - 1)


def check_cut(shape: ModelShape, layout: ParallelLayout) -> None:
    """Raise ValueError if the layout's axes don't cut the model evenly."""
    for name, size, axis in (
        ("heads", shape.heads, "tp"),
        ("kv_heads", shape.kv, "tp"),
        ("feed_forward", shape.inside, "tp"),
        ("time", shape.time, "tp" if layout.sequence_parallel else "cp"),
        ("time", shape.time, "cp"),
        ("experts", shape.experts, "ep"),
    ):
        parts = getattr(layout, axis)
        if size % parts or parts > max(size, 1):
            raise ValueError(f"{name}={size} can't be cut over {axis}={parts}: expected a multiple")
