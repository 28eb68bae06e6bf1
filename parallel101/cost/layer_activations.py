"""Bytes of activations that a transformer layer keeps for the backward pass, in 16 bit.

    s time, b batch, h width, a heads; over t tensor-parallel ranks

    no parallelism                     sbh (34 + 5as/h)
    tensor parallel                    sbh (10 + 24/t + 5as/(ht))
    with sequence parallel             sbh (34/t + 5as/(ht))
    selective recomputation            without the terms 5as/(ht)
    full recomputation                 2sbh: the layer's input

The layer is GPT's with dropout, each of whose masks takes one byte an element. `kept_by_our_gpt`
lists how this package's GPT on a CPU differs, and `layer_kept` counts any ModelShape, also with
grouped queries, gated MLPs, experts and context parallel.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), sections 4 and 5, Table 2. Megatron computes with the same formulas in
megatron/training/theoretical_memory_usage.py.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import KNOWN, ParallelLayout


class LayerTensor(NamedTuple):
    """A tensor that is kept.

    Attributes:
        sbh, aass: its bytes, in units of sbh and of as²b.
        inside: it is between a column and a row layer, so that tensor parallel cuts it. Others are
            cut along time by sequence parallel, and else whole on each rank.
        core: it is inside of the attention, which selective recomputation computes again.
        dropout: it exists for dropout only.
    """

    name: str
    sbh: int = 0
    aass: int = 0
    inside: bool = False
    core: bool = False
    dropout: bool = False


TERMS = (
    LayerTensor("inputs of the two norms", 4),
    LayerTensor("input of query, key and value", 2),
    LayerTensor("query, key and value", 6, inside=True),
    LayerTensor("attention weights: softmax", aass=2, inside=True, core=True),
    LayerTensor("attention weights: dropout mask", aass=1, inside=True, core=True, dropout=True),
    LayerTensor("attention weights after dropout", aass=2, inside=True, core=True, dropout=True),
    LayerTensor("input of the attention's output layer", 2, inside=True),
    LayerTensor("dropout mask after attention", 1, dropout=True),
    LayerTensor("input of the MLP", 2),
    LayerTensor("input of GELU", 8, inside=True),
    LayerTensor("input of the MLP's second layer", 8, inside=True),
    LayerTensor("dropout mask after the MLP", 1, dropout=True),
)
RECOMPUTE = KNOWN["recompute"]


class LayerShape(NamedTuple):
    """A transformer layer, the microbatch that it computes, and how it is cut.

    Attributes:
        width, heads, time, batch: h, a, s, b. Time and heads are multiples of `ranks`.
        ranks: t, along the tensor axis.
        sequence_parallel: activations outside of column … row are cut along time.
        regather: with sequence parallel, inputs of column layers are kept cut, and gathered again
            in backward, as the paper does. Without it they are kept whole.
        recompute: "none", "selective" or "full".
        dropout: whether there is any.
    """

    width: int
    heads: int
    time: int
    batch: int
    ranks: int = 1
    sequence_parallel: bool = False
    regather: bool = True
    recompute: str = "none"
    dropout: bool = True


def layer_activations(of: LayerShape) -> dict[str, float]:
    """Return the bytes that a rank keeps of one layer, by name of the tensor, in 16 bit.

    They add up to the formula of Table 2. With full recomputation and sequence parallel the layer's
    input is cut, too: 2sbh/t, where Table 2 has 2sbh.

    Raises ValueError for sizes that don't fit each other.
    """
    check(of)
    sbh, aass = of.time * of.batch * of.width, of.heads * of.time**2 * of.batch
    outside = of.ranks if of.sequence_parallel else 1
    if of.recompute == "full":
        return {"input of the layer": 2 * sbh / outside}
    return {
        term.name: (term.sbh * sbh + term.aass * aass) / (of.ranks if term.inside else outside)
        for term in TERMS
        if (of.dropout or not term.dropout) and not (term.core and of.recompute == "selective")
    }


def kept_by_our_gpt(of: LayerShape) -> dict[str, float]:
    """Return the bytes that our GPT in bfloat16 on a CPU keeps besides `layer_activations`.

    It is GPTConfig(attention="unfused"); the fused attention keeps no matrix of (time, time). With
    recomputation, torch's checkpoint also keeps the state of the random numbers for each module
    that is computed again (5056 bytes on a CPU); autograd doesn't, and it isn't counted.
    """
    check(of)
    sbh, aass = of.time * of.batch * of.width, of.heads * of.time**2 * of.batch
    outside = of.ranks if of.sequence_parallel else 1
    if of.recompute == "full":
        return {}
    found: dict[str, float] = {}
    if of.dropout:  # on a CPU, a mask is kept as numbers of the input's dtype
        found["dropout masks of 2 bytes"] = 2 * sbh / outside
    # the mean of each position, and one over its standard deviation, in two norms
    found["statistics of the norms"] = 4 * 2 * of.time * of.batch / outside
    if of.recompute == "none":
        if of.dropout:
            found["attention's dropout mask of 2 bytes"] = aass / of.ranks
        found["causal mask of 1 byte"] = of.time**2
    if of.sequence_parallel and not of.regather:
        # of column layers: of query, key and value together, and of the MLP's first
        found["inputs that were gathered"] = 4 * sbh * (1 - 1 / of.ranks)
    return found


def first_stage_activations(
    of: LayerShape, layers: int, stages: int, *, chunks: int = 1, vocabulary: int = 0
) -> float:
    """Return the bytes of activations on the first stage of a pipeline with the schedule 1F1B.

    It holds `stages` microbatches of its layers, which are as many as one microbatch of all layers.
    With one stage, the output layer and the loss are on it, too: 4sbh(1 + v/h)/t, with the logits
    in fp32. (Section 4.3.)

    Args:
        of: one of the layers, with one microbatch, as on each rank with sequence parallel.
        layers: of the whole model.
        chunks: stages on each rank ("interleaved").
        vocabulary: v.
    """
    sbh = of.time * of.batch * of.width
    penalty = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    embedding = stages * sbh / of.ranks if of.dropout else 0.0  # its dropout mask
    head = 4 * (sbh + of.time * of.batch * vocabulary) / of.ranks if stages == 1 else 0.0
    return sum(layer_activations(of).values()) * layers * penalty + embedding + head


# the tensors of `layer_kept` that selective recomputation computes again
CORE = ("log of the sums of the softmax", "softmax", "causal mask", "attention's dropout")


def layer_kept(
    shape: ModelShape, layout: ParallelLayout, *, regather: bool = False, cpu: bool = False
) -> dict[str, float]:
    """Return the bytes that a rank keeps of one layer and one microbatch, by name of the tensor.

    Recomputation is left out.

    Args:
        regather: with sequence parallel, inputs of column layers are kept cut.
    """
    e, t = itemsize(layout), layout.tp
    n = layout.microbatch * shape.time // layout.cp
    outside = n / t if layout.sequence_parallel else n
    gathered = outside if regather else n
    h, kv, f = shape.width, shape.kv_width, shape.inside
    found = {
        "inputs of the two norms": 2 * e * h * outside,
        "statistics of the norms": 2 * 2 * (e if cpu else 4) * outside,
        "input of query, key and value": e * h * gathered,
        "query": e * h * n / t,
        "key and value": 2 * e * kv * n / t,
        "input of the attention's output layer": e * h * n / t,
        "input of the MLP": e * h * gathered,
    }
    if shape.norm == "rms" and cpu:  # in 32 bits: the input's copy, and the normalized input
        found["inputs of the two norms"] = 2 * (4 + 4) * h * outside
        found["statistics of the norms"] = 2 * 4 * outside
    if shape.attention == "fused" or layout.cp > 1:
        found["log of the sums of the softmax"] = 4 * shape.heads * n / t
    else:
        square = shape.heads / t * layout.microbatch * shape.time**2
        found["softmax"] = e * square
        found["causal mask"] = float(shape.time**2)
        found["key and value"] = 2 * e * h * n / t  # repeated for the heads that share them
        if shape.dropout:
            found["attention's dropout"] = (2 * e if cpu else e + 1) * square
    if shape.positions == "rotary":
        samples = layout.microbatch if layout.cp > 1 else 1
        found["rotations"] = 4.0 * shape.head_width * shape.time / layout.cp * samples
    if shape.dropout:
        found["dropout masks"] = 2 * (e if cpu else 1) * h * outside
    if layout.cp > 1 and layout.context == "ulysses":
        found["attention's output, by heads"] = e * h * n / t
    found["inside the MLP"] = (4 if shape.gated else 2) * e * f * n / t
    if shape.experts:
        rows = n * shape.top_k
        found["inside the MLP"] = 2.0 * e * f * rows
        found["rows of the experts, and their results"] = 2.0 * e * h * rows
        found["numbers of the rows"] = 8.0 * 9 * rows
    return found


def itemsize(layout: ParallelLayout) -> int:
    """Return the bytes of a weight in the forward, and of a number in most activations."""
    return 4 if layout.precision == "fp32" else 2


def gradient_itemsize(layout: ParallelLayout) -> int:
    """Return the bytes of a number in the gradients that are accumulated and sent."""
    return 4 if layout.gradient_dtype == "fp32" else itemsize(layout)


def check(of: LayerShape) -> None:
    """Raise ValueError for sizes that don't fit each other."""
    for name in ("width", "heads", "time", "batch", "ranks"):
        if type(value := getattr(of, name)) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, 1 or more")
    if of.recompute not in RECOMPUTE:
        raise ValueError(
            f"recompute={of.recompute!r}: expected one of {', '.join(map(repr, RECOMPUTE))}"
        )
    for name in ("heads", "time") if of.sequence_parallel else ("heads",):
        if getattr(of, name) % of.ranks:
            raise ValueError(
                f"{name}={getattr(of, name)} can't be cut over {of.ranks} ranks: expected a "
                "multiple"
            )
