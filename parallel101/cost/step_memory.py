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

from parallel101.cost.layer_activations import CORE, gradient_itemsize, itemsize, layer_kept
from parallel101.cost.model_shape import (
    ModelShape,
    embedding_arrays,
    expert_parameters,
    layer_parameters,
    rank_parameters,
    size_of,
    table_parameters,
)
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout, stage_layers
from parallel101.cost.update_seconds import BUCKET

# field of StageMemory → what it is, as reports, pictures and pages say it
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "gradient_copy": "gradient copy",
    "buffers": "buffers",
}
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
    shape: ModelShape, layout: ParallelLayout, *, cpu: bool = False, fused_ring: bool = False
) -> tuple[StageMemory, ...]:
    """Return the peak bytes of the ranks at each position along pp, in order.

    Args:
        shape: of the model: GPT's, or with gated=True Llama's.
        layout: of the ranks, and HybridTrainer's options. The number of stages must fit the layers;
            see `stage_layers`.
        cpu: on a CPU torch's RMSNorm is not one kernel, and keeps more.
        fused_ring: see Software; HybridTrainer's own ring attention isn't fused.
    """
    layers = stage_layers(shape.layers, layout.pp * layout.chunks)
    ranks = [
        _RankMemory(shape, layout, layers[position :: layout.pp], position, cpu, fused_ring)
        for position in range(layout.pp)
    ]
    return tuple(rank.memory() for rank in ranks)


class _RankMemory:
    """The memory of a rank at one position along pp. All sizes are bytes, unless they say."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        layers: tuple[int, ...],
        position: int,
        cpu: bool,
        fused_ring: bool,
    ):
        self.shape, self.layout, self.layers, self.position = shape, layout, layers, position
        self.cpu, self.fused_ring = cpu, fused_ring
        self.first, self.last = position == 0, position == layout.pp - 1
        e, g = self.e, self.g = itemsize(layout), gradient_itemsize(layout)
        mixed = layout.precision.endswith("mixed")
        tp, ep, zero, h = layout.tp, layout.ep, layout.zero_stage, shape.width
        ends = self.tp_beside_attention = shape.tp_beside_attention(tp)
        self.sharing = layout.dp * layout.cp * ep

        # parameters, and those that this rank's optimizer updates; fewer ranks share experts
        self.of_layer = layer_parameters(shape, tp, ep)
        self.table = table_parameters(shape, tp)
        self.of_embedding = size_of(embedding_arrays(shape, tp))
        self.parameters = rank_parameters(shape, tp, ep, sum(layers), self.first, self.last)
        self.owned = self.parameters
        if zero:
            experts = sum(layers) * expert_parameters(shape, ep)
            self.owned = (self.parameters - experts) / self.sharing
            self.owned += experts / (layout.dp * layout.cp)

        # activations: of a message between stages, and of a layer that waits for its backward
        self.n = layout.microbatch * shape.time // layout.cp
        self.outside = self.n / tp if layout.sequence_parallel else float(self.n)
        self.message = e * h * self.outside
        self.kept = layer_kept(shape, layout, cpu=cpu)
        self.all_kept = sum(self.kept.values())
        self.core = sum(self.kept.get(name, 0.0) for name in CORE)
        self.layer_waits = {
            "none": self.all_kept,
            "selective": self.all_kept - self.core,
            "full": self.message,  # of the same shape as its input
        }[layout.recompute]
        norm = 8 * h + 4 if cpu and shape.norm == "rms" else e * h + 8
        self.of_head = norm * self.outside + e * h * self.n
        # of logits in 32 bits, and of them and their gradient at the loss
        self.logits = 4 * self.n * shape.vocabulary / ends
        self.at_loss = (3 if ends == 1 else 2 + (e / 4 if e < 4 else 0)) * self.logits

        # model states; gradients are those that are complete
        self.weights = e * (self.owned if zero == 3 else self.parameters)
        averages = AVERAGES[layout.optimizer]
        self.optimizer = self.owned * (averages * MOMENT + MASTER if mixed else averages * e)
        self.gradients = g * (self.owned if zero >= 2 else self.parameters)
        # those in 32 bits that the optimizer is given, beside those in 16
        self.in_32_bits = 4 * self.owned if mixed and g < 4 else 0.0
        # the flat arrays for gradients, which are kept from step to step
        overlap = layout.overlap and layout.cp == ep == 1
        self.room = self.gradients if zero or (self.sharing > 1 and overlap) else 0.0
        self.bucket = self.of_bucket()
        self.fixed = self.weights + self.optimizer + self.room
        self.fixed += 8.0 * layout.microbatch * layout.microbatches * shape.time  # the batch
        self.tied = 0.0  # summed over two stages
        if shape.tied and layout.pp > 1 and (self.first or self.last):
            self.tied = (10 if mixed else 2.5 * g) * self.table

    def of_bucket(self) -> float:
        """Return the parameters of a bucket of gradients."""
        zero, count = self.layout.zero_stage, self.parameters
        if zero == 3:
            ends = self.first or self.last
            return max(self.of_layer, self.of_embedding if ends else 0.0)
        return min(BUCKET / self.e, count / (4 if zero else 2)) if self.sharing > 1 else 0.0

    def of_microbatch(self) -> list[float]:
        """Return the bytes that each stage of this rank keeps of a microbatch."""
        e, h = self.e, self.shape.width
        found = [layers * self.layer_waits for layers in self.layers]
        if self.first:
            if self.tp_beside_attention > 1:  # the rows of the table, and which are here
                found[0] += 10 * self.n
            if self.layout.sequence_parallel:  # a part of it is kept, and holds all
                found[0] += e * h * (self.n - self.outside)
            if self.shape.dropout:
                found[0] += h * self.n
        for i in range(len(found) - 1 if self.last else len(found)):
            found[i] += self.message  # what it has sent
        if self.last:
            found[-1] += self.of_head
        return found

    def warm_up(self) -> int:
        """Return how many forwards are before this rank's first backward: they wait for theirs."""
        layout, p, after = self.layout, self.layout.pp, self.layout.pp - self.position
        if layout.chunks > 1:
            many = (layout.chunks - 1) * p + 2 * after - 1
        elif layout.schedule == "gpipe":
            many = layout.microbatches
        else:
            many = 2 * after - 1 if layout.schedule == "zb-h2" else after
        return min(many, layout.chunks * layout.microbatches)

    def in_flight(self) -> float:
        """Return the bytes of the microbatches that wait for backward when they are most."""
        p, chunks, of_stages = self.layout.pp, self.layout.chunks, self.of_microbatch()
        # p microbatches pass the first stage of this rank, then the same p its next one
        waiting = [k % (p * chunks) // p for k in range(self.warm_up())]
        found = sum(of_stages[stage] for stage in waiting)
        if self.last and (losses := waiting.count(chunks - 1)):
            found += (losses - 1) * self.logits
        if self.layout.schedule.startswith("zb"):
            delay = self.position * (2 if self.layout.schedule == "zb-h2" else 1)
            found += min(delay, self.layout.microbatches) * self.weight_gradients_later()
        return found

    def weight_gradients_later(self) -> float:
        """Return the bytes that a microbatch keeps between the two halves of its backward.

        These are the input of each linear layer and its output's gradient.
        """
        shape, e, n, t = self.shape, self.e, self.n, self.layout.tp
        other = self.tp_beside_attention
        h, kv, f = shape.width, shape.kv_width, shape.inside
        inside = (2 * h + 2 * kv) / t + (3 if shape.gated else 2) * f / other
        found = sum(self.layers) * e * n * (4 * h + inside)
        return found + (e * n * (h + shape.vocabulary / other) if self.last else 0.0)

    def earlier(self) -> float:
        """Return the bytes of earlier microbatches' gradients, while the last are computed."""
        if self.layout.microbatches == 1:
            return 0.0
        if self.layout.zero_stage < 2:
            return self.g * self.parameters  # not yet in the flat arrays
        last_sent = self.of_embedding if self.first else self.of_layer
        return 2 * self.g * (last_sent if self.layout.zero_stage == 3 else self.bucket)

    # ── moments ──

    def memory(self) -> StageMemory:
        many, waiting, earlier = self.layout.microbatches, self.in_flight(), self.earlier()
        at_once = waiting + earlier
        if self.warm_up() == many:  # the first backward has all of them, the second one fewer
            fewer = waiting * (1 - 1 / many) + earlier
            at_once, earlier = max((waiting, 0.0), (fewer, earlier))
        moments = {
            "backward": at_once + self.backward(),
            "gradients": self.travelling(),
            "optimizer": self.update(),
        }
        if self.last:
            moments["loss"] = at_once + self.loss()
        moment = max(moments, key=lambda name: moments[name])
        total = self.fixed + moments[moment]
        kept = self.logits if self.last else 0.0
        alive = self.weights + self.optimizer + self.gradients
        copied = self.in_32_bits if moment == "optimizer" else 0.0
        if moment in ("loss", "backward"):
            alive += waiting + kept
            copied = max(0.0, self.room + earlier - self.gradients)
        rest = max(0.0, total - alive)
        logits = min(rest, max(0.0, self.at_loss - kept)) if moment == "loss" else 0.0
        copied = min(rest - logits, copied)
        return StageMemory(
            self.weights,
            self.gradients,
            self.optimizer,
            waiting + kept,
            logits,
            copied,
            rest - logits - copied,
            total,
            moment,
        )

    def loss(self) -> float:
        """Return the bytes needed at the loss or in the output layer's backward after it."""
        e, layout, table = self.e, self.layout, self.table
        # the gradients of the logits and of the layer's input and weight
        after = e * (self.logits / 4 + self.shape.width * self.n)
        if layout.microbatches > 1 or e != self.g:
            after += e * table
        if layout.microbatches == 1:
            after += self.g * table
        gathered = e * table if layout.zero_stage == 3 else 0.0
        return max(self.at_loss, after) + gathered + (self.message if layout.pp > 1 else 0.0)

    def backward(self) -> float:
        """Return the bytes that the backward of one layer needs."""
        layout = self.layout
        found = self.layer_backward() - (self.of_head if self.last else 0.0)
        found += self.all_kept - self.layer_waits  # what is computed again
        if layout.zero_stage == 3:
            # this layer's weights and the next one's; and gradients of the one before
            found += 2 * self.e * self.of_layer
            found += max(0.0, 2 * self.g * self.of_layer - self.all_kept)
        if layout.pp > 1:  # on their way between stages
            messages = 1 if self.first or self.last else 2
            found += (messages + (layout.chunks > 1)) * self.message
        return found

    def travelling(self) -> float:
        """Return the bytes of gradients as the last backward ends, with two buckets in flight."""
        zero, size = self.layout.zero_stage, self.g * self.bucket
        found = 0.0 if self.room else self.g * self.parameters
        if self.sharing > 1:
            found += 2 * size * ((2 if zero >= 2 else 1) - 1 / self.sharing)
        if zero >= 2:
            found += size if zero == 3 else 2 * size
        return found + (2 * self.e * self.of_layer if zero == 3 else 0.0)

    def update(self) -> float:
        """Return the bytes of gradients while the optimizer updates the weights."""
        return (0.0 if self.room else self.gradients) + self.in_32_bits + self.tied

    def layer_backward(self) -> float:
        """Return the bytes of the gradients inside a layer."""
        e, h, n = self.e, self.shape.width, self.n
        f = self.shape.inside / self.tp_beside_attention
        mlp = e * (h + f) * n + (e + (self.g if self.g != e else 0)) * f * h
        if self.shape.gated:
            mlp = max(mlp, e * h * n + 2 * e * f * n)
        return max(mlp, self.attention_backward())

    def attention_backward(self) -> float:
        """Return the bytes attention's core needs in backward, minus those the MLP has freed."""
        shape, layout = self.shape, self.layout
        heads = shape.heads / layout.tp * layout.microbatch
        freed = self.kept["inside the MLP"] + self.kept["input of the MLP"]
        if layout.cp > 1 and layout.context != "ulysses" and self.fused_ring:
            # in 32 bits: ∂Q; and ∂K and ∂V of a block, of the next one, and on their way
            rest = 4 * (shape.width + 6 * shape.kv_width) * self.n / layout.tp
            return rest - freed
        if layout.cp > 1 and layout.context != "ulysses":
            square = 4 * heads * (shape.time / layout.cp) ** 2
            squares = 2 if shape.kv == shape.heads else 3  # the products of groups need a copy
            h, kv = (7, 8) if layout.context == "zigzag" else (11, 10)  # in 32 bits
            rest = 4 * (h * shape.width + kv * shape.kv_width) * self.n / layout.tp
            return squares * square + rest - freed
        if shape.attention == "unfused":
            return 2 * self.e * heads * shape.time**2 - freed
        return 0.0
