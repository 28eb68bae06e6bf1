"""Bytes of activations that a transformer layer keeps for the backward pass, in 16 bit.

    s time, b batch, h width, a heads; over t tensor-parallel ranks

    no parallelism                     sbh (34 + 5as/h)
    tensor parallel                    sbh (10 + 24/t + 5as/(ht))
    with sequence parallel             sbh (34/t + 5as/(ht))
    selective recomputation            without the terms 5as/(ht)
    full recomputation                 2sbh: the layer's input

The layer is GPT's with dropout, each of whose masks takes one byte an element. `layer_kept` counts
any ModelShape, also with grouped queries, gated MLPs, experts and context parallel; for a GPT,
`layer_activations` is this formula, and `kept_by_our_gpt` what this package's GPT on a CPU keeps
besides.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), sections 4 and 5, Table 2. Megatron computes with the same formulas in
megatron/training/theoretical_memory_usage.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout, check_cut

# the tensors of `layer_kept` that selective recomputation computes again
CORE = (
    "log of the sums of the softmax",
    "attention weights: softmax",
    "causal mask",
    "attention's dropout",
)
# those that the paper's formula leaves out
NOT_COUNTED = ("statistics of the norms", "causal mask")


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
    kept = kept_of(of, regather=True)
    return {name: kept[name] for name in kept if name not in NOT_COUNTED}


def kept_by_our_gpt(of: LayerShape) -> dict[str, float]:
    """Return the bytes that our GPT in bfloat16 on a CPU keeps besides `layer_activations`.

    These are the statistics of the norms and the causal mask; dropout masks of 2 bytes; and, with
    sequence parallel and no `regather`, inputs of column layers that were gathered.

    It is GPTConfig(attention="unfused"); the fused attention keeps no matrix of (time, time). With
    recomputation, torch's checkpoint also keeps the state of the random numbers for each module
    that is computed again (5056 bytes on a CPU); autograd doesn't, and it isn't counted.
    """
    kept, counted = kept_of(of, regather=of.regather, cpu=True), layer_activations(of)
    more = {name: nbytes - counted.get(name, 0.0) for name, nbytes in kept.items()}
    return {name: nbytes for name, nbytes in more.items() if nbytes}


def kept_of(of: LayerShape, *, regather: bool, cpu: bool = False) -> dict[str, float]:
    """Return `layer_kept` of a GPT's layer, without what is recomputed."""
    shape = ModelShape(of.width, 1, of.heads, 1, of.time, attention="unfused", dropout=of.dropout)
    options: dict[str, Any] = {"tp": of.ranks, "microbatch": of.batch, "recompute": of.recompute}
    layout = ParallelLayout(**options, sequence_parallel=of.sequence_parallel)
    check_cut(shape, layout)
    kept = layer_kept(shape, layout, regather=regather, cpu=cpu)
    if of.recompute == "full":
        return {"input of the layer": kept["inputs of the two norms"] / 2}
    return {n: kept[n] for n in kept if n not in CORE or of.recompute == "none"}


def layer_kept(
    shape: ModelShape, layout: ParallelLayout, *, regather: bool = False, cpu: bool = False
) -> dict[str, float]:
    """Return the bytes that a rank keeps of one layer and one microbatch, by name of the tensor.

    Recomputation is left out.

    Args:
        regather: with sequence parallel, inputs of column layers are kept cut.
    """
    e, t = layout.itemsize, layout.tp
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
    if shape.attention == "fused" or layout.cp > 1:
        found["log of the sums of the softmax"] = 4 * shape.heads * n / t
    else:
        square = shape.heads / t * layout.microbatch * shape.time**2
        found["attention weights: softmax"] = e * square
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
