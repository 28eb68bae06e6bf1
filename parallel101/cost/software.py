"""What a training program does besides the layout: which kernels it fuses, what it overlaps.

The same layout on the same GPUs takes longer with an older program. `TRAINERS` is this package's,
`MEGATRON_2021` the one of the published tables.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """What a program does.

    Attributes:
        name: of the program.
        tp_overlap: the backward's sum along tp is in flight while weight gradients are computed.
        pp_overlap: messages between stages are in flight while microbatches are computed.
        scatter_gather: stages send each other 1/tp of the activations over each network card, and
            gather them inside the node.
        embedding_sync: the first and the last stage sum the gradient of a tied embedding.
        accumulates: gradients are added to a buffer after every microbatch, also after the first.
        loss_bytes: read and written for each logit, forward and backward.
        optimizer_bytes: read and written for each parameter with a mixed precision, clipping
            included.
    """

    name: str
    tp_overlap: bool
    pp_overlap: bool
    scatter_gather: bool
    accumulates: bool
    loss_bytes: int
    optimizer_bytes: int


TRAINERS = Software("parallel101's HybridTrainer", True, True, False, False, 52, 46)
MEGATRON_2021 = Software("Megatron-LM of 2021", False, False, True, True, 52, 62)
