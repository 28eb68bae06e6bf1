"""The shape of a transformer: all that its cost depends on, and nothing of how it is trained.

h width   L layers   a heads   V vocabulary   s time
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder of `layers` equal layers between an embedding and an output layer.

    Attributes:
        width, layers, heads, vocabulary, time: h, L, a, V, s. `time` is the length of a sample.
        kv_heads: of grouped-query attention; None: as many as heads.
        feed_forward: the features inside an MLP; None: 4 h.
        gated: the MLP has three matrices instead of two (SwiGLU).
        norm: "layer" or "rms". biases: whether linear layers have them.
        positions: "learned" or "rotary".
        tied: the output layer has the embedding's weights.
        attention: "fused" keeps no (time, time) matrix; "unfused" does.
        experts, top_k: of a mixture of experts in each layer; 0: an MLP.
        dropout: whether it is trained with dropout, which costs time and memory.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    time: int
    kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    norm: str = "layer"
    biases: bool = True
    positions: str = "learned"
    tied: bool = True
    attention: str = "fused"
    experts: int = 0
    top_k: int = 2
    dropout: bool = False
    name: str = ""
