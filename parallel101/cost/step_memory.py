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
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout
from parallel101.cost.stage_layers import stage_layers

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most
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
    return tuple(
        _RankMemory(
            shape, layout, layers[position :: layout.pp], position, cpu, fused_ring
        ).memory()
        for position in range(layout.pp)
    )


class _RankMemory:
    """The memory of a rank at one position along pp."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        layers: tuple[int, ...],
        position: int,
        cpu: bool,
        fused_ring: bool,
    ):
        self.fused_ring = fused_ring
        self.shape, self.layout, self.layers = shape, layout, layers
        self.first, self.last = position == 0, position == layout.pp - 1
        self.position = position
        self.e = itemsize(layout)
        self.g = gradient_itemsize(layout)
        self.mixed = layout.precision.endswith("mixed")
        self.n = layout.microbatch * shape.time // layout.cp
        self.outside = self.n / layout.tp if layout.sequence_parallel else float(self.n)
        self.kept, self.cpu = layer_kept(shape, layout, cpu=cpu), cpu
        self.sharing = layout.dp * layout.cp * layout.ep
        self.overlap = layout.overlap and layout.cp == layout.ep == 1

    # ── parameters ──

    @property
    def of_layer(self) -> float:
        """Parameters of one layer on this rank."""
        shape, t = self.shape, self.layout.tp
        out = shape.width if shape.biases else 0  # a row layer's bias is whole
        attention = (shape.attention_parameters - out) / t + out
        mlp = (shape.mlp_parameters - out) / t + out
        if shape.experts:
            mlp = shape.mlp_parameters * shape.experts / self.layout.ep
            mlp += shape.width * shape.experts
        return attention + mlp + 2 * shape.norm_parameters

    @property
    def of_experts(self) -> float:
        """Parameters of experts on this rank, which fewer ranks share."""
        shape = self.shape
        each = sum(self.layers) * shape.mlp_parameters
        return each * shape.experts / self.layout.ep

    @property
    def table(self) -> float:
        """Parameters of the embedding of tokens, or of the output layer."""
        return self.shape.vocabulary * self.shape.width / self.layout.tp

    @property
    def of_embedding(self) -> float:
        learned = self.shape.positions == "learned"
        return self.table + (self.shape.time * self.shape.width if learned else 0)

    @property
    def parameters(self) -> float:
        """The parameters on this rank."""
        found = sum(self.layers) * self.of_layer
        if self.first:
            found += self.of_embedding
        if self.last:
            found += self.shape.norm_parameters
            found += 0 if self.shape.tied and self.first else self.table
        return found

    # ── activations ──

    @property
    def of_microbatch(self) -> list[float]:
        """Bytes that each stage of this rank keeps of a microbatch."""
        shape, e, h = self.shape, self.e, self.shape.width
        each = self.layer_waits
        found = [layers * each for layers in self.layers]
        if self.first:
            if self.layout.tp > 1:  # the rows of the table, and which are here
                found[0] += 10 * self.n
            if self.layout.sequence_parallel:  # a part of it is kept, and holds all
                found[0] += e * h * (self.n - self.outside)
            if shape.dropout:
                found[0] += h * self.n
        for i in range(len(found) - 1 if self.last else len(found)):
            found[i] += self.message  # what it has sent
        if self.last:
            found[-1] += self.of_head
        return found

    @property
    def of_head(self) -> float:
        """Bytes that the last norm and the output layer keep of a microbatch."""
        h = self.shape.width
        norm = 8 * h + 4 if self.cpu and self.shape.norm == "rms" else self.e * h + 8
        return norm * self.outside + self.e * h * self.n

    @property
    def layer_waits(self) -> float:
        """Bytes of a layer that wait for its backward."""
        kept = self.kept
        if self.layout.recompute == "full":
            return self.message  # of the same shape as its input
        found = sum(kept.values())
        if self.layout.recompute == "selective":
            found -= sum(kept.get(name, 0.0) for name in CORE)
        return found

    @property
    def warm_up(self) -> int:
        """The number of forwards before this rank's first backward: the microbatches that wait."""
        layout, p, after = self.layout, self.layout.pp, self.layout.pp - self.position
        if layout.chunks > 1:
            many = (layout.chunks - 1) * p + 2 * after - 1
        elif layout.schedule == "gpipe":
            many = layout.microbatches
        else:
            many = 2 * after - 1 if layout.schedule == "zb-h2" else after
        return min(many, layout.chunks * layout.microbatches)

    @property
    def in_flight(self) -> float:
        """Bytes of the microbatches that wait for backward when their number is highest."""
        p, chunks, of_stages = self.layout.pp, self.layout.chunks, self.of_microbatch
        # p microbatches pass the first stage of this rank, then the same p its next one
        waiting = [k % (p * chunks) // p for k in range(self.warm_up)]
        found = sum(of_stages[stage] for stage in waiting)
        if self.last and (losses := waiting.count(chunks - 1)):
            found += (losses - 1) * 4 * self.n * self.shape.vocabulary / self.layout.tp
        if self.layout.schedule.startswith("zb"):
            delay = self.position * (2 if self.layout.schedule == "zb-h2" else 1)
            found += min(delay, self.layout.microbatches) * self.weight_gradients_later
        return found

    @property
    def weight_gradients_later(self) -> float:
        """Bytes that a microbatch keeps between the two halves of its backward.

        These are the input of each linear layer and its output's gradient.
        """
        shape, e, n, t = self.shape, self.e, self.n, self.layout.tp
        h, kv, f = shape.width, shape.kv_width, shape.inside
        inside = (2 * h + 2 * kv) + (3 if shape.gated else 2) * f
        found = sum(self.layers) * e * n * (4 * h + inside / t)
        if self.last:
            found += e * n * (h + shape.vocabulary / t)
        return found

    # ── model states ──

    @property
    def weights(self) -> float:
        return self.e * (self.owned if self.layout.zero_stage == 3 else self.parameters)

    @property
    def owned(self) -> float:
        """Parameters that this rank's optimizer updates."""
        if self.layout.zero_stage == 0:
            return self.parameters
        dense, experts = self.parameters - self.of_experts, self.of_experts
        return dense / self.sharing + experts / (self.layout.dp * self.layout.cp)

    @property
    def optimizer(self) -> float:
        """Bytes of the optimizer's averages, and of the master weights."""
        averages = AVERAGES[self.layout.optimizer]
        return self.owned * (averages * MOMENT + MASTER if self.mixed else averages * self.e)

    @property
    def gradients(self) -> float:
        """Bytes of the gradients that are complete."""
        return self.g * (self.owned if self.layout.zero_stage >= 2 else self.parameters)

    @property
    def room(self) -> float:
        """Bytes of the flat arrays for gradients, which are kept from step to step."""
        zero = self.layout.zero_stage
        return self.gradients if zero or (self.sharing > 1 and self.overlap) else 0.0

    @property
    def earlier(self) -> float:
        """Bytes of the gradients of earlier microbatches, while the last ones are computed."""
        if self.layout.zero_stage < 2:
            return self.g * self.parameters  # not yet in the flat arrays
        last_sent = self.of_embedding if self.first else self.of_layer
        return 2 * self.g * (last_sent if self.layout.zero_stage == 3 else self.bucket)

    @property
    def bucket(self) -> float:
        """Parameters of a bucket of gradients."""
        zero, count = self.layout.zero_stage, self.parameters
        if zero == 3:
            ends = self.first or self.last
            return max(self.of_layer, self.of_embedding if ends else 0.0)
        return min(BUCKET / self.e, count / (4 if zero else 2)) if self.sharing > 1 else 0.0

    @property
    def fixed(self) -> float:
        """Bytes that are held throughout a step: model states and the batch."""
        batch = 8.0 * self.layout.microbatch * self.layout.microbatches * self.shape.time
        return self.weights + self.optimizer + self.room + batch

    # ── moments ──

    def memory(self) -> StageMemory:
        many, waiting = self.layout.microbatches, self.in_flight
        earlier = self.earlier if many > 1 else 0.0
        at_once = waiting + earlier
        if self.warm_up == many:  # the first backward has all of them, the second one fewer
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
        kept = 4 * self.n * self.shape.vocabulary / self.layout.tp if self.last else 0.0
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

    @property
    def at_loss(self) -> float:
        """Bytes of the logits and their gradient at the loss."""
        logits = self.n * self.shape.vocabulary / self.layout.tp
        return (12 if self.layout.tp == 1 else 8 + (self.e if self.e < 4 else 0)) * logits

    def loss(self) -> float:
        """Return the bytes needed at the loss or in the output layer's backward after it."""
        e, layout, table = self.e, self.layout, self.table
        logits = self.n * self.shape.vocabulary / layout.tp
        # the gradients of the logits and of the layer's input and weight
        after = e * (logits + self.shape.width * self.n)
        if layout.microbatches > 1 or e != self.g:
            after += e * table
        if layout.microbatches == 1:
            after += self.g * table
        gathered = e * table if layout.zero_stage == 3 else 0.0
        return max(self.at_loss, after) + gathered + (self.message if layout.pp > 1 else 0.0)

    def backward(self) -> float:
        """Return the bytes that the backward of one layer needs."""
        layout, kept = self.layout, self.kept
        found = self.layer_backward() - (self.of_head if self.last else 0.0)
        if layout.recompute == "full":
            found += sum(kept.values()) - self.layer_waits
        elif layout.recompute == "selective":
            found += sum(kept.get(name, 0.0) for name in CORE)
        if layout.zero_stage == 3:
            # this layer's weights and the next one's; and gradients of the one before
            found += 2 * self.e * self.of_layer
            found += max(0.0, 2 * self.g * self.of_layer - sum(kept.values()))
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
        found = 0.0 if self.room else self.gradients
        found += self.in_32_bits
        if self.shape.tied and self.layout.pp > 1 and (self.first or self.last):
            found += (10 if self.mixed else 2.5 * self.g) * self.table  # summed over two stages
        return found

    @property
    def in_32_bits(self) -> float:
        """Bytes of the 32-bit gradients that the optimizer is given, beside those in 16."""
        return 4 * self.owned if self.mixed and self.g < 4 else 0.0

    @property
    def message(self) -> float:
        """Bytes of the activations that a stage sends."""
        return self.e * self.shape.width * self.outside

    def layer_backward(self) -> float:
        """Return the bytes of the gradients inside a layer."""
        e, h, n, f = self.e, self.shape.width, self.n, self.shape.inside / self.layout.tp
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
