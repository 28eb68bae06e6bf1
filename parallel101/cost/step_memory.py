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
from parallel101.cost.layer_kernels import RankWork
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
        self.fused_ring = fused_ring
        part = sum(layers), position == 0, position == layout.pp - 1
        of = self.of = RankWork(shape, layout, part)
        e, g = of.e, layout.gradient_itemsize
        mixed, zero, h = layout.precision.endswith("mixed"), layout.zero_stage, shape.width

        # parameters, and those that this rank's optimizer updates; fewer ranks share experts
        self.of_layer, _ = parameters_and_arrays(shape, layout.tp, layout.ep, 1, False, False)
        self.table = table_parameters(shape, layout.tp)
        self.of_embedding = sum(part.size for part in embedding_arrays(shape, layout.tp))
        count = owned = of.parameters
        if zero:
            experts = of.layers * expert_parameters(shape, layout.ep)
            owned = (count - experts) / of.ranks + experts / (layout.dp * layout.cp)

        # activations: of a message between stages, and of a layer that waits for its backward
        self.message = e * h * of.outside
        self.kept = layer_kept(shape, layout, cpu=cpu)
        self.layer_waits = self.all_kept = sum(self.kept.values())
        if layout.recompute == "full":
            self.layer_waits = self.message  # of the same shape as its input
        elif layout.recompute == "selective":
            self.layer_waits -= sum(self.kept.get(name, 0.0) for name in CORE)
        norm = 8 * h + 4 if cpu and shape.norm == "rms" else e * h + 8
        self.of_head = norm * of.outside + e * h * of.tokens
        # of logits in 32 bits, and of them and their gradient at the loss
        self.logits = 4 * of.tokens * shape.vocabulary / of.beside
        self.at_loss = (3 if of.beside == 1 else 2 + (e / 4 if e < 4 else 0)) * self.logits

        # model states; gradients are those that are complete
        averages = AVERAGES[layout.optimizer]
        self.weights = e * (owned if zero == 3 else count)
        self.optimizer = owned * (averages * MOMENT + MASTER if mixed else averages * e)
        self.gradients = g * (owned if zero >= 2 else count)
        # those in 32 bits that the optimizer is given, beside those in 16
        self.in_32_bits = 4 * owned if mixed and g < 4 else 0.0
        # the flat arrays for gradients, which are kept from step to step; and a bucket's parameters
        overlap = layout.overlap and layout.cp == layout.ep == 1
        self.room = self.gradients if zero or (of.ranks > 1 and overlap) else 0.0
        self.bucket = min(BUCKET / e, count / (4 if zero else 2)) if of.ranks > 1 else 0.0
        if zero == 3:
            self.bucket = max(self.of_layer, (of.first or of.last) * self.of_embedding)

    def memory(self) -> StageMemory:
        """Return the bytes at the moment when they are most."""
        of, layout, many = self.of, self.layout, self.layout.microbatches
        g, zero = layout.gradient_itemsize, layout.zero_stage
        # forwards before the first backward: they wait for theirs
        after = layout.pp - self.position
        warm_up = {"gpipe": many, "zb-h2": 2 * after - 1}.get(layout.schedule, after)
        if layout.chunks > 1:
            warm_up = (layout.chunks - 1) * layout.pp + 2 * after - 1
        warm_up = min(warm_up, layout.chunks * many)
        waiting, earlier = self.in_flight(warm_up), 0.0
        # earlier microbatches' gradients, while the last are computed
        if many > 1 and zero < 2:
            earlier = g * of.parameters  # not yet in the flat arrays
        elif many > 1:
            last_sent = self.of_embedding if of.first else self.of_layer
            earlier = 2 * g * (last_sent if zero == 3 else self.bucket)
        at_once = waiting + earlier
        if warm_up == many:  # the first backward has all of them, the second one fewer
            fewer = waiting * (1 - 1 / many) + earlier
            at_once, earlier = max((waiting, 0.0), (fewer, earlier))
        update = (0.0 if self.room else self.gradients) + self.in_32_bits
        if self.shape.tied and layout.pp > 1 and (of.first or of.last):  # summed over two stages
            update += (10 if layout.precision.endswith("mixed") else 2.5 * g) * self.table
        # as the last backward ends: two buckets on their way, and with ZeRO-3 two layers' weights
        buckets = 2 * ((2 if zero >= 2 else 1) - 1 / of.ranks) if of.ranks > 1 else 0
        buckets += {2: 2, 3: 1}.get(zero, 0)
        gradients = (0.0 if self.room else g * of.parameters) + buckets * g * self.bucket
        gradients += 2 * of.e * self.of_layer * (zero == 3)
        backward = at_once + self.backward()
        moments = {"backward": backward, "gradients": gradients, "optimizer": update}
        if of.last:
            moments["loss"] = at_once + self.loss()
        moment = max(moments, key=lambda name: moments[name])
        batch = 8.0 * layout.microbatch * many * self.shape.time
        total = self.weights + self.optimizer + self.room + batch + moments[moment]

        kept = self.logits if of.last else 0.0
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

    def in_flight(self, warm_up: int) -> float:
        """Return the bytes of the microbatches that wait for backward when they are most."""
        of, layout, h = self.of, self.layout, self.shape.width
        of_stages = [layers * self.layer_waits for layers in self.layers]
        if of.first:
            if of.beside > 1:  # the rows of the table, and which are here
                of_stages[0] += 10 * of.tokens
            if layout.sequence_parallel:  # a part of it is kept, and holds all
                of_stages[0] += of.e * h * (of.tokens - of.outside)
            if self.shape.dropout:
                of_stages[0] += h * of.tokens
        for i in range(len(of_stages) - of.last):
            of_stages[i] += self.message  # what it has sent
        if of.last:
            of_stages[-1] += self.of_head
        # pp microbatches pass the first stage of this rank, then the same ones its next one
        waiting = [k // layout.pp % layout.chunks for k in range(warm_up)]
        found = sum(of_stages[stage] for stage in waiting)
        if of.last and (losses := waiting.count(layout.chunks - 1)):
            found += (losses - 1) * self.logits
        if layout.schedule.startswith("zb"):
            # between the halves of a backward: inputs of linear layers, and their outputs' gradient
            delay = self.position * (2 if layout.schedule == "zb-h2" else 1)
            each = sum(inputs + sum(outputs) for inputs, outputs in linears(self.shape, layout.tp))
            later = of.layers * each + of.last * (h + self.shape.vocabulary / of.beside)
            found += min(delay, layout.microbatches) * of.e * of.tokens * later
        return found

    def loss(self) -> float:
        """Return the bytes needed at the loss or in the output layer's backward after it."""
        e, layout, table = self.of.e, self.layout, self.table
        # the gradients of the logits and of the layer's input and weight
        after = e * (self.logits / 4 + self.shape.width * self.of.tokens)
        if layout.microbatches > 1 or e != layout.gradient_itemsize:
            after += e * table
        if layout.microbatches == 1:
            after += layout.gradient_itemsize * table
        gathered = e * table if layout.zero_stage == 3 else 0.0
        return max(self.at_loss, after) + gathered + (self.message if layout.pp > 1 else 0.0)

    def backward(self) -> float:
        """Return the bytes that the backward of one layer needs."""
        of, layout = self.of, self.layout
        found = self.layer_backward() - (self.of_head if of.last else 0.0)
        found += self.all_kept - self.layer_waits  # what is computed again
        if layout.zero_stage == 3:
            # this layer's weights and the next one's; and gradients of the one before
            found += 2 * of.e * self.of_layer
            found += max(0.0, 2 * layout.gradient_itemsize * self.of_layer - self.all_kept)
        if layout.pp > 1:  # on their way between stages
            messages = 1 if of.first or of.last else 2
            found += (messages + (layout.chunks > 1)) * self.message
        return found

    def layer_backward(self) -> float:
        """Return the bytes of the gradients inside a layer.

        They are the MLP's, or those of attention's core minus what the MLP has freed.
        """
        shape, layout, e, n, h = (
            self.shape,
            self.layout,
            self.of.e,
            self.of.tokens,
            self.shape.width,
        )
        f, g = shape.inside / self.of.beside, layout.gradient_itemsize
        mlp = e * (h + f) * n + (e + (g if g != e else 0)) * f * h
        if shape.gated:
            mlp = max(mlp, e * h * n + 2 * e * f * n)
        if self.of.ring:  # in 32 bits
            # fused: ∂Q; and ∂K and ∂V of a block, of the next one, and on their way
            of_width, of_kv, count = 1, 6, 0
            if not self.fused_ring:
                of_width, of_kv = (7, 8) if layout.context == "zigzag" else (11, 10)
                count = 2 if shape.kv == shape.heads else 3  # the products of groups need a copy
            core = 4 * (of_width * h + of_kv * shape.kv_width) * n / layout.tp
            core += count * 4 * self.of.S / layout.cp
        elif shape.attention == "unfused":
            core = 2 * e * self.of.S * layout.cp
        else:
            return max(mlp, 0.0)
        return max(mlp, core - (self.kept["inside the MLP"] + self.kept["input of the MLP"]))
