"""A model's layout on GPUs: the sizes of the mesh's axes, and the trainer's options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from parallel101.cost.field_checks import check_known, check_whole

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
    def batch(self) -> int:
        """Samples of a step."""
        return self.microbatch * self.microbatches * self.dp * self.ep
