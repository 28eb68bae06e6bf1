"""Peak bytes of each rank along pp while HybridTrainer trains a model, in closed form.

    weights, gradients, optimizer     model_states.py's bytes, cut by tp, pp, ep and ZeRO
    activations                       layer_activations.py's, for any ModelShape, in every
                                      microbatch that waits for its backward
    logits, gradient copy, buffers    what is needed only for a moment, or for messages

What is alive rises and falls, and these have their peaks at different times:

    loss         all activations, and the logits three times in 32 bits (with their gradient)
    backward     all activations, and the gradients inside one layer; with recomputation, also all
                 of that layer's activations
    gradients    nearly all gradients, and buckets of them on their way to other ranks
    optimizer    no activations, but gradients in 32 bits beside those in 16

`total` is the most of these sums. It counts tensors: what an allocator loses to fragmentation, the
CUDA context, and NCCL's own buffers are not in it. It holds for
optimizers whose update is fused (`fused=True`); torch's default on a GPU also makes a copy of one
of AdamW's two averages.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel101.cost.layer_activations import CORE, layer_kept
from parallel101.cost.layer_seconds import RankWork
from parallel101.cost.model_shape import (
    ModelShape,
    embedding_arrays,
    expert_parameters,
    linears,
    parameters_and_arrays,
    table_parameters,
)
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout, stage_layers
from parallel101.cost.update_seconds import BUCKET

# field of StageMemory → what it is, as reports, pictures and pages say it
PARTS = {name: name for name in ("weights", "gradients", "optimizer", "activations", "logits")}
PARTS |= {"optimizer": "optimizer state", "gradient_copy": "gradient copy", "buffers": "buffers"}
MASTER, MOMENT = 4, 4  # bytes a parameter of the optimizer's copy, and of each of its averages


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a position along pp.

    Attributes:
        weights, gradients, optimizer, activations: the most of each. `optimizer` has the master
            weights. `activations` are what waits for backward, as `count_activations` counts it.
        logits, gradient_copy, buffers: what else is alive at the peak. Logits are those beside the
            activations, with their gradient. The second copy of gradients is this trainer's: while
            microbatches are added up, it also keeps the arrays in which gradients are sent, and its
            optimizer makes 32-bit gradients of 16-bit ones. Megatron-LM has one array for both.
        total: the most of all together, which is less than the sum of the others if they have their
            peaks at different times.
        moment: when that is: "loss", "backward", "gradients" or "optimizer".
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gradient_copy: float
    buffers: float
    total: float
    moment: str


def step_memory(
    shape: ModelShape, layout: ParallelLayout, *, fused_ring: bool = False
) -> tuple[StageMemory, ...]:
    """Return the peak bytes of the ranks at each position along pp, in order.

    Args:
        shape: of the model: GPT's, or with gated=True Llama's.
        layout: of the ranks, and HybridTrainer's options. The number of stages must fit the layers;
            see `stage_layers`.
        fused_ring: see Software; HybridTrainer's own ring attention isn't fused.

    Raises ValueError if the sizes don't divide.
    """
    return tuple(_stage_memory(shape, layout, i, fused_ring) for i in range(layout.pp))


def _stage_memory(
    shape: ModelShape, layout: ParallelLayout, position: int, fused_ring: bool
) -> StageMemory:
    """Return the bytes of a rank at a position along pp, when they are most."""
    # layers of each of its stages; bytes of a layer's forward, without recomputation
    layers = stage_layers(shape.layers, layout.pp * layout.chunks)[position :: layout.pp]
    kept = layer_kept(shape, layout)
    of = RankWork(shape, layout, (sum(layers), position == 0, position == layout.pp - 1))
    e, g = of.e, layout.gradient_itemsize
    h, zero, many = shape.width, layout.zero_stage, layout.microbatches
    mixed = layout.precision.endswith("mixed")

    # parameters, and those that this rank's optimizer updates; fewer ranks share experts
    of_layer, _ = parameters_and_arrays(shape, layout.tp, layout.ep, 1, False, False)
    of_embedding = sum(part.size for part in embedding_arrays(shape, layout.tp))
    table, count, owned = table_parameters(shape, layout.tp), of.parameters, of.parameters
    if zero:
        experts = of.layers * expert_parameters(shape, layout.ep)
        owned = (count - experts) / of.ranks + experts / (layout.dp * layout.cp)

    # model states; gradients are those that are complete
    averages = AVERAGES[layout.optimizer]
    weights = e * (owned if zero == 3 else count)
    optimizer = owned * (averages * MOMENT + MASTER if mixed else averages * e)
    gradients = g * (owned if zero >= 2 else count)
    # those in 32 bits that the optimizer is given, beside those in 16
    in_32_bits = 4 * owned if mixed and g < 4 else 0.0
    # the flat arrays for gradients, which are kept from step to step; and a bucket's parameters
    overlap = layout.overlap and layout.cp == layout.ep == 1
    room = gradients if zero or (of.ranks > 1 and overlap) else 0.0
    bucket = min(BUCKET / e, count / (4 if zero else 2)) if of.ranks > 1 else 0.0
    if zero == 3:
        bucket = max(of_layer, (of.first or of.last) * of_embedding)

    # activations: of a layer that waits for its backward, and at the loss logits with gradients
    message = e * h * of.outside  # between stages, of the shape of a layer's input
    all_kept = sum(kept.values())
    layer_waits = message if layout.recompute == "full" else all_kept
    if layout.recompute == "selective":
        layer_waits -= sum(kept.get(name, 0.0) for name in CORE)
    of_head = (e * h + 8) * of.outside + e * h * of.tokens
    logits = 4 * of.tokens * shape.vocabulary / of.beside  # in 32 bits
    at_loss = (3 if of.beside == 1 else 2 + (e / 4 if e < 4 else 0)) * logits

    # forwards before the first backward: they wait for theirs
    after = layout.pp - position
    warm_up = {"gpipe": many, "zb-h2": 2 * after - 1}.get(layout.schedule, after)
    if layout.chunks > 1:
        warm_up = (layout.chunks - 1) * layout.pp + 2 * after - 1
    warm_up = min(warm_up, layout.chunks * many)
    of_stages = [each * layer_waits + message for each in layers]  # and what it has sent
    if of.first:
        if of.beside > 1:  # the rows of the table, and which are here
            of_stages[0] += 10 * of.tokens
        if layout.sequence_parallel:  # a part of it is kept, and holds all
            of_stages[0] += e * h * (of.tokens - of.outside)
        of_stages[0] += h * of.tokens * shape.dropout
    if of.last:
        of_stages[-1] += of_head - message
    # pp microbatches pass the first stage of this rank, then the same ones its next one
    passed = [k // layout.pp % layout.chunks for k in range(warm_up)]
    waiting = sum(of_stages[stage] for stage in passed)
    if of.last and (losses := passed.count(layout.chunks - 1)):
        waiting += (losses - 1) * logits
    if layout.schedule.startswith("zb"):
        # between the halves of a backward: inputs of linear layers, and their outputs' gradient
        delay = position * (2 if layout.schedule == "zb-h2" else 1)
        each = sum(inputs + sum(outputs) for inputs, outputs in linears(shape, layout.tp))
        later = of.layers * each + of.last * (h + shape.vocabulary / of.beside)
        waiting += min(delay, many) * e * of.tokens * later

    # earlier microbatches' gradients, while the last are computed
    earlier = 0.0
    if many > 1 and zero < 2:
        earlier = g * count  # not yet in the flat arrays
    elif many > 1:
        earlier = 2 * g * (bucket if zero == 2 else of_embedding if of.first else of_layer)
    at_once = waiting + earlier
    if warm_up == many:  # the first backward has all of them, the second one fewer
        fewer = waiting * (1 - 1 / many) + earlier
        at_once, earlier = max((waiting, 0.0), (fewer, earlier))

    # backward: inside a layer, with what is computed again; and what is on its way between stages
    backward = layer_backward(of, kept, fused_ring) - of.last * of_head + all_kept - layer_waits
    if zero == 3:  # this layer's weights and the next one's; and gradients of the one before
        backward += 2 * e * of_layer + max(0.0, 2 * g * of_layer - all_kept)
    if layout.pp > 1:
        backward += ((1 if of.first or of.last else 2) + (layout.chunks > 1)) * message
    # as the last backward ends: two buckets on their way, and with ZeRO-3 two layers' weights
    buckets = 2 * ((2 if zero >= 2 else 1) - 1 / of.ranks) if of.ranks > 1 else 0
    buckets += {2: 2, 3: 1}.get(zero, 0)
    ending = (0.0 if room else g * count) + buckets * g * bucket + 2 * e * of_layer * (zero == 3)
    update = (0.0 if room else gradients) + in_32_bits
    if shape.tied and layout.pp > 1 and (of.first or of.last):  # summed over two stages
        update += (10 if mixed else 2.5 * g) * table
    moments = {"backward": at_once + backward, "gradients": ending, "optimizer": update}
    if of.last:  # or its backward: gradients of the logits and of the layer's input and weight
        after_loss = e * (logits / 4 + h * of.tokens) + g * table * (many == 1)
        after_loss += e * table * (many > 1 or e != g)
        moments["loss"] = at_once + max(at_loss, after_loss) + message * (layout.pp > 1)
        moments["loss"] += e * table * (zero == 3)
    moment = max(moments, key=lambda name: moments[name])
    total = weights + optimizer + room + 8.0 * layout.microbatch * many * shape.time
    total += moments[moment]

    waiting_logits = logits if of.last else 0.0
    alive = weights + optimizer + gradients
    copied = in_32_bits if moment == "optimizer" else 0.0
    if moment in ("loss", "backward"):
        alive += waiting + waiting_logits
        copied = max(0.0, room + earlier - gradients)
    rest = max(0.0, total - alive)
    of_loss = min(rest, max(0.0, at_loss - waiting_logits)) if moment == "loss" else 0.0
    copied = min(rest - of_loss, copied)
    activations, buffers = waiting + waiting_logits, rest - of_loss - copied
    return StageMemory(
        weights, gradients, optimizer, activations, of_loss, copied, buffers, total, moment
    )


def layer_backward(of: RankWork, kept: dict[str, float], fused_ring: bool) -> float:
    """Return the bytes of the gradients inside a layer.

    They are the MLP's, or those of attention's core minus what the MLP has freed.
    """
    shape, layout, e, n, h = of.shape, of.layout, of.e, of.tokens, of.shape.width
    f, g = shape.inside / of.beside, layout.gradient_itemsize
    mlp = e * (h + f) * n + (e + (g if g != e else 0)) * f * h
    if shape.gated:
        mlp = max(mlp, e * h * n + 2 * e * f * n)
    if of.ring:  # in 32 bits
        # fused: ∂Q; and ∂K and ∂V of a block, of the next one, and on their way
        of_width, of_kv, count = 1, 6, 0
        if not fused_ring:
            of_width, of_kv = (7, 8) if layout.context == "zigzag" else (11, 10)
            count = 2 if shape.kv == shape.heads else 3  # the products of groups need a copy
        core = 4 * (of_width * h + of_kv * shape.kv_width) * n / layout.tp
        core += count * 4 * of.S / layout.cp
    elif shape.attention == "unfused":
        core = 2 * e * of.S * layout.cp
    else:
        return max(mlp, 0.0)
    return max(mlp, core - (kept["inside the MLP"] + kept["input of the MLP"]))
