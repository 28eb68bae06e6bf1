"""Peak bytes of each rank along pp while HybridTrainer trains a model, in closed form.

    weights, gradients, optimizer     model_states.py's bytes, cut by tp, pp, ep and ZeRO
    activations                       layer_activations.py's, for any ModelShape, in every
                                      microbatch that waits for its backward
    buffers                           what is needed only for a moment, or for messages

What is alive rises and falls, and these have their peaks at different times:

    loss         all activations, and the logits three times in 32 bits (with their gradient)
    backward     all activations, and the gradients inside one layer; with recomputation, also all
                 of that layer's activations
    gradients    nearly all gradients, and buckets of them on their way to other ranks
    optimizer    no activations, but gradients in 32 bits beside those in 16

`total` is the most of these sums. It counts tensors: what an allocator loses to fragmentation, the
CUDA context (about half a gigabyte) and NCCL's own buffers are not in it. It is right for AdamW
whose update is fused (`fused=True`); torch's default on a GPU also makes a copy of one of its two
averages.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.stage_layers import stage_layers

BUCKET = 25 * 2**20  # bytes of a bucket of gradients, at most
MASTER, MOMENT = 4, 4  # bytes a parameter of the optimizer's copy, and of each of Adam's averages


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a position along pp.

    Attributes:
        weights, gradients, optimizer, activations, buffers: the most of each. `optimizer` has the
            master weights. `activations` are what waits for backward, as `count_activations` counts
            it. `buffers` is what else is alive at the peak.
        total: the most of all together, which is less than the sum of the others if they have their
            peaks at different times.
        moment: when that is: "loss", "backward", "gradients" or "optimizer".
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    total: float
    moment: str


def step_memory(
    shape: ModelShape, layout: ParallelLayout, *, cpu: bool = False
) -> tuple[StageMemory, ...]:
    """Return the peak bytes of the ranks at each position along pp, in order.

    Args:
        shape: of the model: GPT's, or with gated=True Llama's.
        layout: of the ranks, and HybridTrainer's options. The number of stages must fit the layers;
            see `stage_layers`.
        cpu: on a CPU torch's RMSNorm is not one kernel, and keeps more.
    """
    layers = stage_layers(shape.layers, layout.pp * layout.chunks)
    return tuple(
        _Rank(shape, layout, layers[position :: layout.pp], position, cpu).memory()
        for position in range(layout.pp)
    )


def layer_kept(
    shape: ModelShape, layout: ParallelLayout, *, regather: bool = False, cpu: bool = False
) -> dict[str, float]:
    """Name of a tensor → the bytes of it that a rank keeps of one layer and one microbatch, without
    recomputation.

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
        "statistics of the norms": 2 * 8 * outside,
        "input of query, key and value": e * h * gathered,
        "query": e * h * n / t,
        "key and value": 2 * e * kv * n / t,
        "input of the attention's output layer": e * h * n / t,
        "input of the MLP": e * h * gathered,
    }
    if shape.norm == "rms" and cpu:  # in 32 bits: the input's copy, and the normalised input
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
    found["inside the MLP"] = (4 if shape.gated else 2) * e * f * n / t
    return found


def itemsize(layout: ParallelLayout) -> int:
    """Bytes of a weight in the forward, and of a number in most activations."""
    return 4 if layout.precision == "fp32" else 2


class _Rank:
    """One position along pp."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        layers: tuple[int, ...],
        position: int,
        cpu: bool,
    ):
        self.shape, self.layout, self.layers = shape, layout, layers
        self.first, self.last = position == 0, position == layout.pp - 1
        self.position = position
        self.e = itemsize(layout)
        self.g = 4 if layout.gradient_dtype == "fp32" else self.e
        self.mixed = layout.precision.endswith("mixed")
        self.n = layout.microbatch * shape.time // layout.cp
        self.outside = self.n / layout.tp if layout.sequence_parallel else float(self.n)
        self.kept = layer_kept(shape, layout, cpu=cpu)
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
    def table(self) -> float:
        """Parameters of the embedding of tokens, or of the output layer."""
        return self.shape.vocabulary * self.shape.width / self.layout.tp

    @property
    def of_embedding(self) -> float:
        learned = self.shape.positions == "learned"
        return self.table + (self.shape.time * self.shape.width if learned else 0)

    @property
    def parameters(self) -> float:
        """On this rank."""
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
            found[i] += e * h * self.outside  # what it has sent
        if self.last:  # of the last norm and the output layer
            found[-1] += e * h * self.outside + 8 * self.outside + e * h * self.n
        return found

    @property
    def layer_waits(self) -> float:
        """Bytes of a layer that wait for its backward."""
        kept = self.kept
        if self.layout.recompute == "full":
            return self.e * self.shape.width * self.outside
        found = sum(kept.values())
        if self.layout.recompute == "selective":
            found -= sum(kept.get(name, 0.0) for name in CORE)
        return found

    @property
    def warm_up(self) -> int:
        """How many forwards this rank computes before its first backward, and so how many wait."""
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
        """Bytes of all microbatches that wait for backward when most of them do."""
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
        """Bytes that a microbatch keeps between the two halves of its backward: of each linear
        layer its input and its output's gradient.
        """
        shape, e, n, t = self.shape, self.e, self.n, self.layout.tp
        h, kv, f = shape.width, shape.kv_width, shape.inside
        inside = (2 * h + 2 * kv) + (3 if shape.gated else 2) * f
        found = sum(self.layers) * e * n * (4 * h + inside / t)
        if self.last:
            found += e * n * (h + shape.vocabulary / t)
        return found

    @property
    def logits(self) -> float:
        """Bytes of the logits and the loss, at most at once."""
        each = self.n * self.shape.vocabulary / self.layout.tp
        if self.layout.tp > 1:
            return (8 + self.e if self.e < 4 else 8) * each
        return 12 * each

    # ── moments ──

    def memory(self) -> StageMemory:
        layout, e, g = self.layout, self.e, self.g
        zero, n, many = layout.zero_stage, self.sharing, layout.microbatches
        count = self.parameters
        weights = count * e / (n if zero == 3 else 1)
        owned = count / (n if zero else 1)
        of_adam = 2 * (MOMENT if self.mixed else e) + (MASTER if self.mixed else 0)
        optimizer = owned * of_adam
        batch = 8.0 * layout.microbatch * many * self.shape.time
        fixed = weights + optimizer + batch
        whole = count * g  # of all gradients

        # gradients that are there for all of the step, and those of earlier microbatches
        room = earlier = 0.0
        if (zero == 0 and n > 1 and self.overlap) or zero == 1:
            room, earlier = whole, whole
        elif zero >= 2:
            room = whole / n
        else:
            earlier = whole
        accumulates = many > 1
        before = room + (earlier if accumulates else 0.0)

        waiting = self.in_flight
        if accumulates and self.warm_up == many:  # the first backward has all of them, …
            rest = waiting * (1 - 1 / many) + earlier  # … the second one fewer
            before, waiting = room, max(waiting, rest)
        peaks = {}
        sizes = self.widths()
        if self.last:
            head = (e * self.table / (1 if zero == 3 else 1)) if zero == 3 else 0.0
            logits = self.logits
            # the gradient of the logits, and those that it gives to the weight and to its input
            after = e * self.n * self.shape.vocabulary / layout.tp + e * self.shape.width * self.n
            after += self.table * (e if accumulates or e != g else 0)
            after += 0.0 if accumulates else self.table * g
            peaks["loss"] = fixed + before + waiting + head + max(logits, after)
        inside = 0.0
        if layout.recompute == "full":
            inside = sum(self.kept.values()) - e * self.shape.width * self.outside
        elif layout.recompute == "selective":
            inside = sum(self.kept.get(name, 0.0) for name in CORE)
        gathered = 2 * e * self.of_layer if zero == 3 else 0.0
        boxes = self.boxes
        peaks["backward"] = (
            fixed + before + waiting + inside + self.layer_backward(sizes) + gathered + boxes
        )
        bucket = min(BUCKET, count * e / 4 if zero else count * e / 2) if n > 1 else 0.0
        if zero == 3:
            bucket = e * max(self.of_layer, self.of_embedding if self.first or self.last else 0)
        travelling = 0.0
        if n > 1:
            copies = 2 if zero >= 2 else 1
            travelling = 2 * bucket * g / e * (copies - 1 / n)
        on_the_way = {0: whole if not room else 0.0, 1: 0.0, 2: bucket * 2, 3: bucket}[zero]
        late = room + on_the_way + travelling
        peaks["gradients"] = fixed + late + (e * self.of_layer * 2 if zero == 3 else 0.0)
        wide = 4 * owned if self.mixed and g < 4 else 0.0
        kept_gradients = {0: room or whole, 1: whole, 2: whole / n, 3: whole / n}[zero]
        tied = self.shape.tied and layout.pp > 1 and (self.first or self.last)
        sums = (10 if self.mixed else 2.5 * g) * self.table if tied else 0.0
        peaks["optimizer"] = fixed + kept_gradients + wide + sums
        moment = max(peaks, key=lambda name: peaks[name])
        total = peaks[moment]
        gradients = max(before if accumulates else kept_gradients, kept_gradients + wide)
        activations = waiting + (4 * self.n * self.shape.vocabulary / layout.tp if self.last else 0)
        alive = weights + optimizer + kept_gradients + (activations if moment != "optimizer" else 0)
        return StageMemory(
            weights, gradients, optimizer, activations, max(0.0, total - alive), total, moment
        )

    def widths(self) -> tuple[float, float]:
        """Features inside the MLP, and parameters of its largest matrix."""
        f = self.shape.inside / self.layout.tp
        return f, f * self.shape.width

    def layer_backward(self, sizes: tuple[float, float]) -> float:
        """Bytes of the gradients inside of a layer."""
        f, matrix = sizes
        e, h, n = self.e, self.shape.width, self.n
        mlp = e * h * n + e * f * n + (e + (self.g if self.g != e else 0)) * matrix
        if self.shape.gated:
            mlp = max(mlp, e * h * n + 2 * e * f * n)
        return max(mlp, self.attention_backward())

    def attention_backward(self) -> float:
        """Bytes that the core of attention needs in backward, less what the MLP has freed."""
        shape, layout = self.shape, self.layout
        heads = shape.heads / layout.tp * layout.microbatch
        freed = self.kept["inside the MLP"] + self.kept["input of the MLP"]
        if layout.cp > 1 and layout.context != "ulysses":
            square = 4 * heads * (shape.time / layout.cp) ** 2
            rest = (6 * 4 * shape.width + 6 * 4 * shape.kv_width) * self.n / layout.tp
            return 2 * square + rest - freed
        if shape.attention == "unfused":
            return 2 * self.e * heads * shape.time**2 - freed
        return 0.0

    @property
    def boxes(self) -> float:
        """Bytes of activations and gradients between stages, on their way."""
        if self.layout.pp == 1:
            return 0.0
        many = 2 if self.first else 3
        many += 2 if self.layout.chunks > 1 else 0
        return many * self.e * self.shape.width * self.outside


CORE = ("log of the sums of the softmax", "softmax", "causal mask", "attention's dropout")
