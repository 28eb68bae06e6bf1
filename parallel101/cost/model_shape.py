"""The shape of a transformer: everything its cost depends on except how it is trained.

h width   L layers   a heads   V vocabulary   s time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel101.cost.field_checks import check_known, check_whole
from parallel101.cost.layer_arrays import rank_parameters

KNOWN: dict[str, tuple[Any, ...]] = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rotary"),
    "attention": ("fused", "unfused"),
    **dict.fromkeys(("gated", "biases", "tied", "dropout"), (False, True)),
}


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

    def __hash__(self) -> int:
        return hash((self.width, self.layers, self.heads))  # caches ask for it often

    def __post_init__(self) -> None:
        check_whole(self, "width", "layers", "heads", "vocabulary", "time")
        optional = ("kv_heads", "feed_forward")
        check_whole(self, *(name for name in optional if getattr(self, name) is not None))
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} isn't a multiple of heads={self.heads}: expected as many "
                "features for every head"
            )
        if self.heads % self.kv:
            raise ValueError(
                f"heads={self.heads} isn't a multiple of kv_heads={self.kv}: expected as many "
                "heads for each pair of key and value"
            )
        check_known(self, KNOWN)
        if type(self.experts) is not int or self.experts < 0:
            raise ValueError(f"experts={self.experts!r}: expected a whole number, 0 for none")
        if self.experts and (type(self.top_k) is not int or not 1 <= self.top_k <= self.experts):
            raise ValueError(f"top_k={self.top_k}: expected 1 to experts={self.experts}")

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inside(self) -> int:
        """Features inside an MLP."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    @property
    def kv_width(self) -> int:
        """Features of all keys together; all values have as many."""
        return self.kv * self.head_width

    def tp_beside_attention(self, tp: int) -> int:
        """Return over how many ranks tp cuts the MLPs, the embedding and the head.

        HybridTrainer's plan "auto" cuts neither experts nor, with their loss, the vocabulary.
        """
        return 1 if self.experts else tp

    @property
    def parameters(self) -> int:
        """The parameters of the whole model."""
        return int(rank_parameters(self, 1, 1, self.layers, True, True))
