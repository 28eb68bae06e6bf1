"""How a model is laid out on GPUs: the sizes of the mesh's axes, and the trainer's options."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """The arguments of a HybridTrainer that decide how long a step takes, and what it holds.

    Attributes:
        dp, tp, pp, cp, ep: ranks along each axis. GPUs are numbered with tp fastest, then cp, ep,
            dp and pp last, so that tp stays inside a node.
        microbatch: samples of one microbatch, on each position along dp and ep.
        microbatches: in a step, on each of these positions. The batch has
            microbatch · microbatches · dp · ep samples.
        chunks: stages on each rank of a pipeline; above 1 its schedule is "interleaved", else
            `schedule`.
        zero_stage, recompute, sequence_parallel, precision, gradient_dtype, overlap, context: as
            HybridTrainer's. gradient_dtype is "fp32" or None here.
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
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bf16-mixed"
    gradient_dtype: str | None = None
    overlap: bool = True
    context: str = "zigzag"

    @property
    def gpus(self) -> int:
        return math.prod((self.dp, self.tp, self.pp, self.cp, self.ep))

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.microbatch * self.microbatches * self.dp * self.ep
