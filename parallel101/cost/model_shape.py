"""The shape of a transformer: everything its cost depends on except how it is trained.

h width   L layers   a heads   V vocabulary   s time

Its parameters are counted in one place: the arrays of a rank, in the model's order. tp cuts a
layer's matrices, but not its norms, the biases of row layers, and the router; ep shares the
experts, which tp doesn't cut. A key has no bias, as in models/gpt.py: softmax would ignore it. A
tied embedding is on the first and, as a copy, on the last stage.

A step has operations of the model, and of the hardware, which computes some of them again.

    a token       6 · weights of the products + 12 · layers · time · width
    of a GPT      72 B s L h² (1 + s/(6h) + V/(12 L h))              without recomputation
                  96 B s L h² (1 + s/(6h) + V/(16 L h))              with full recomputation

Attention counts over the whole square of (time, time), though half of it is masked, as in the
papers. Norms, softmax and other elementwise operations don't count. MFU divides the model's
operations by what the GPUs could have computed in the same time, HFU the hardware's. Sources:
Chowdhery et al., PaLM (arXiv 2204.02311), appendix B; Narayanan et al. (arXiv 2104.04473), formula
(3), which counts the recomputation; Korthikanti et al. (arXiv 2205.05198), section 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple


def check_whole(of: object, *names: str) -> None:
    """Raise ValueError unless these fields are whole numbers, 1 or more."""
    for name in names:
        if type(value := getattr(of, name)) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, 1 or more")


def check_known(of: object, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError unless each of these fields has one of its known values."""
    for name, values in known.items():
        value = getattr(of, name)
        if value not in values or type(value) not in map(type, values):  # True is not 1
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, values))}")


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
        for of, whole, part, equal, words in (
            ("width", self.width, "heads", self.heads, "features for every head"),
            ("heads", self.heads, "kv_heads", self.kv, "heads for each pair of key and value"),
        ):
            if whole % equal:
                expected = f"isn't a multiple of {part}={equal}: expected as many {words}"
                raise ValueError(f"{of}={whole} {expected}")
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
        return int(parameters_and_arrays(self, 1, 1, self.layers, True, True)[0])


def linears(shape: ModelShape, tp: int) -> tuple[tuple[int, list[int]], ...]:
    """Return the inputs and the outputs of a layer's linear layers on a rank, the experts' once:
    query, key and value, which have the same inputs; the attention's output; the MLP's up, with the
    gate if there is one; its down.
    """
    h, q, kv = shape.width, shape.width // tp, shape.kv_width // tp
    f = shape.inside // shape.tp_beside_attention(tp)
    return (h, [q, kv, kv]), (q, [h]), (h, [f] * (2 if shape.gated else 1)), (f, [h])


# ── arrays of parameters ──


class Gradients(NamedTuple):
    """The gradients of an array of parameters, or of a bucket of several.

    Attributes:
        size: in parameters.
        apart: whether sequence parallel sends it separately.
        work: of backward since the ones before, in parameters: each takes two products.
    """

    size: float
    apart: bool
    work: float


Parts = list[Gradients]


def linear(rows: int, columns: int, bias: bool, tp_of_row: int = 1) -> Parts:
    """Return a linear layer's arrays: backward makes its bias last, but that of a cut row first."""
    work, bias_first = float(rows * columns), tp_of_row > 1
    weight = Gradients(work, False, work if bias_first or not bias else 0.0)
    return [weight] + [Gradients(float(columns), bias_first, 0.0 if bias_first else work)] * bias


def mlp_arrays(shape: ModelShape, tp: int) -> Parts:
    """Return the arrays of an MLP, or of one expert."""
    *_, (h, (f, *gate)), _ = linears(shape, tp)
    up = linear(h, f, shape.biases) * (1 + len(gate))
    return up + linear(f, h, shape.biases, shape.tp_beside_attention(tp))


def layer_arrays(shape: ModelShape, tp: int, ep: int, recompute: str = "none") -> Parts:
    """Return the arrays of one layer on a rank."""
    (h, (q, kv, _)), *_ = linears(shape, tp)
    norm, bias, mlp = norm_arrays(shape), shape.biases, mlp_arrays(shape, tp)
    if shape.experts:
        router = float(h * shape.experts)
        mlp = [Gradients(router, False, router)] + mlp * max(1, shape.experts // ep)
    found = norm + linear(h, q, bias) + linear(h, kv, False) + linear(h, kv, bias)
    # attention's own products: five halves of squares or, unfused, four whole ones
    core = shape.time * q * (1.25 if shape.attention == "fused" else 2.0)
    found[-1] = found[-1]._replace(work=found[-1].work + core)
    found += linear(q, h, bias, tp) + norm + mlp
    if recompute == "full":  # forward once more, before anything else
        again = sum(part.work for part in found) / 2
        found[-1] = found[-1]._replace(work=found[-1].work + again)
    return found


def norm_arrays(shape: ModelShape) -> Parts:
    return [Gradients(float(shape.width), True, 0.0)] * (2 if shape.norm == "layer" else 1)


def embedding_arrays(shape: ModelShape, tp: int) -> Parts:
    """Return the arrays of the embedding of tokens, and of positions if those are learned."""
    learned = Gradients(float(shape.time * shape.width), True, 0.0)
    tokens = Gradients(table_parameters(shape, tp), False, 0.0)
    return [tokens] + [learned] * (shape.positions == "learned")


def stage_arrays(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool, recompute: str
) -> Parts:
    """Return the arrays of a rank with this many layers, and maybe the embedding or the head."""
    table = table_parameters(shape, tp)
    head = norm_arrays(shape) + [Gradients(table, False, table)] * (not shape.tied or not first)
    inside = layer_arrays(shape, tp, ep, recompute) * layers
    return embedding_arrays(shape, tp) * first + inside + head * last


def table_parameters(shape: ModelShape, tp: int) -> float:
    """Return the number of parameters of the embedding of tokens, or of the output layer."""
    return shape.vocabulary * shape.width / shape.tp_beside_attention(tp)


def expert_parameters(shape: ModelShape, ep: int) -> float:
    """Return the number of parameters of a layer's experts on a rank."""
    return sum(part.size for part in mlp_arrays(shape, 1)) * shape.experts / ep


@lru_cache(maxsize=1 << 14)
def parameters_and_arrays(
    shape: ModelShape, tp: int, ep: int, layers: int, first: bool, last: bool
) -> tuple[float, int]:
    """Return the number of parameters and of arrays on a rank, as of `stage_arrays`."""
    arrays = stage_arrays(shape, tp, ep, layers, first, last, "none")
    return sum(part.size for part in arrays), len(arrays)


# ── operations ──


def weights_in_use(shape: ModelShape) -> float:
    """Return the number of weights in a layer's products that one token is multiplied by."""
    qkv, out, up, down = (inputs * sum(outputs) for inputs, outputs in linears(shape, 1))
    router = shape.width * shape.experts
    return qkv + out + router + (up + down) * (shape.top_k if shape.experts else 1)


def model_flops(shape: ModelShape, batch: int) -> float:
    """Return the operations of a step of `batch` samples, without recomputed ones."""
    weights = shape.layers * weights_in_use(shape) + shape.vocabulary * shape.width
    return batch * shape.time * (6 * weights + 12 * shape.layers * shape.time * shape.width)


def hardware_flops(shape: ModelShape, batch: int, recompute: str) -> float:
    """Return the operations of a step of `batch` samples, with recomputed ones."""
    core = 4 * shape.time * shape.width
    full = 2 * weights_in_use(shape) + core
    again = {"none": 0, "selective": core, "full": full}[recompute] * shape.layers
    return model_flops(shape, batch) + batch * shape.time * again
