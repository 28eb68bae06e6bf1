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
from parallel101.cost.model_shape import (
    ModelShape,
    embedding_arrays,
    expert_parameters,
    layer_parameters,
    linears,
    parameters_and_arrays,
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
    return tuple(
        _RankMemory(shape, layout, layers[rank :: layout.pp], rank, cpu, fused_ring).memory()
        for rank in range(layout.pp)
    )


@dataclass
class _RankMemory:
    """The memory of a rank at one position along pp. All sizes are bytes, unless they say."""

    shape: ModelShape
    layout: ParallelLayout
    layers: tuple[int, ...]
    position: int
    cpu: bool
    fused_ring: bool

    def __post_init__(self) -> None:
        shape, layout, cpu = self.shape, self.layout, self.cpu
        self.first, self.last = self.position == 0, self.position == layout.pp - 1
        e, g = self.e, self.g = layout.itemsize, layout.gradient_itemsize
        mixed = layout.precision.endswith("mixed")
        tp, ep, zero, h = layout.tp, layout.ep, layout.zero_stage, shape.width
        ends = self.tp_beside_attention = shape.tp_beside_attention(tp)
        self.sharing = layout.dp * layout.cp * ep

        # parameters, and those that this rank's optimizer updates; fewer ranks share experts
        self.of_layer = layer_parameters(shape, tp, ep)
        self.table = table_parameters(shape, tp)
        self.of_embedding = size_of(embedding_arrays(shape, tp))
        part = sum(self.layers), self.first, self.last
        count, _ = parameters_and_arrays(shape, tp, ep, *part)
        self.parameters = self.owned = count
        if zero:
            experts = sum(self.layers) * expert_parameters(shape, ep)
            self.owned = (count - experts) / self.sharing + experts / (layout.dp * layout.cp)

        # activations: of a message between stages, and of a layer that waits for its backward
        self.n = layout.microbatch * shape.time // layout.cp
        self.outside = self.n / tp if layout.sequence_parallel else float(self.n)
        self.message = e * h * self.outside
        self.kept = layer_kept(shape, layout, cpu=cpu)
        self.layer_waits = self.all_kept = sum(self.kept.values())
        if layout.recompute == "full":
            self.layer_waits = self.message  # of the same shape as its input
        elif layout.recompute == "selective":
            self.layer_waits -= sum(self.kept.get(name, 0.0) for name in CORE)
        norm = 8 * h + 4 if cpu and shape.norm == "rms" else e * h + 8
        self.of_head = norm * self.outside + e * h * self.n
        # of logits in 32 bits, and of them and their gradient at the loss
        self.logits = 4 * self.n * shape.vocabulary / ends
        self.at_loss = (3 if ends == 1 else 2 + (e / 4 if e < 4 else 0)) * self.logits

        # model states; gradients are those that are complete
        self.weights = e * (self.owned if zero == 3 else count)
        averages = AVERAGES[layout.optimizer]
        self.optimizer = self.owned * (averages * MOMENT + MASTER if mixed else averages * e)
        self.gradients = g * (self.owned if zero >= 2 else count)
        # those in 32 bits that the optimizer is given, beside those in 16
        self.in_32_bits = 4 * self.owned if mixed and g < 4 else 0.0
        # the flat arrays for gradients, which are kept from step to step; and a bucket's parameters
        overlap = layout.overlap and layout.cp == ep == 1
        self.room = self.gradients if zero or (self.sharing > 1 and overlap) else 0.0
        self.bucket = min(BUCKET / e, count / (4 if zero else 2)) if self.sharing > 1 else 0.0
        if zero == 3:
            self.bucket = max(self.of_layer, (self.first or self.last) * self.of_embedding)
        self.fixed = self.weights + self.optimizer + self.room
        self.fixed += 8.0 * layout.microbatch * layout.microbatches * shape.time  # the batch
        self.tied = 0.0  # summed over two stages
        if shape.tied and layout.pp > 1 and (self.first or self.last):
            self.tied = (10 if mixed else 2.5 * g) * self.table

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
        for i in range(len(found) - self.last):
            found[i] += self.message  # what it has sent
        if self.last:
            found[-1] += self.of_head
        return found

    def warm_up(self) -> int:
        """Return how many forwards are before this rank's first backward: they wait for theirs."""
        layout, p, after = self.layout, self.layout.pp, self.layout.pp - self.position
        if layout.chunks > 1:
            many = (layout.chunks - 1) * p + 2 * after - 1
        else:
            many = {"gpipe": layout.microbatches, "zb-h2": 2 * after - 1}.get(
                layout.schedule, after
            )
        return min(many, layout.chunks * layout.microbatches)

    def in_flight(self) -> float:
        """Return the bytes of the microbatches that wait for backward when they are most."""
        layout, of_stages = self.layout, self.of_microbatch()
        # pp microbatches pass the first stage of this rank, then the same ones its next one
        waiting = [k // layout.pp % layout.chunks for k in range(self.warm_up())]
        found = sum(of_stages[stage] for stage in waiting)
        if self.last and (losses := waiting.count(layout.chunks - 1)):
            found += (losses - 1) * self.logits
        if layout.schedule.startswith("zb"):
            delay = self.position * (2 if layout.schedule == "zb-h2" else 1)
            found += min(delay, layout.microbatches) * self.weight_gradients_later()
        return found

    def weight_gradients_later(self) -> float:
        """Return the bytes that a microbatch keeps between the two halves of its backward.

        These are the input of each linear layer and its output's gradient.
        """
        shape, tokens = self.shape, self.e * self.n
        each = sum(inputs + sum(outputs) for inputs, outputs in linears(shape, self.layout.tp))
        head = shape.width + shape.vocabulary / self.tp_beside_attention
        return tokens * (sum(self.layers) * each + self.last * head)

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
        states = self.weights, self.gradients, self.optimizer
        others = logits, copied, rest - logits - copied
        return StageMemory(*states, waiting + kept, *others, total, moment)

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
        """Return the bytes of the gradients inside a layer.

        They are the MLP's, or those of attention's core minus what the MLP has freed.
        """
        shape, layout, e, n, h = self.shape, self.layout, self.e, self.n, self.shape.width
        f = shape.inside / self.tp_beside_attention
        mlp = e * (h + f) * n + (e + (self.g if self.g != e else 0)) * f * h
        if shape.gated:
            mlp = max(mlp, e * h * n + 2 * e * f * n)
        squares = shape.heads / layout.tp * layout.microbatch * shape.time**2
        if layout.cp > 1 and layout.context != "ulysses":  # in 32 bits
            # fused: ∂Q; and ∂K and ∂V of a block, of the next one, and on their way
            of_width, of_kv, count = 1, 6, 0
            if not self.fused_ring:
                of_width, of_kv = (7, 8) if layout.context == "zigzag" else (11, 10)
                count = 2 if shape.kv == shape.heads else 3  # the products of groups need a copy
            core = 4 * (of_width * h + of_kv * shape.kv_width) * n / layout.tp
            core += count * 4 * squares / layout.cp**2
        elif shape.attention == "unfused":
            core = 2 * e * squares
        else:
            return max(mlp, 0.0)
        return max(mlp, core - (self.kept["inside the MLP"] + self.kept["input of the MLP"]))
