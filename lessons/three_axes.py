"""A GPT that trains on many ranks along three axes at once. Read it, run it, copy it.

    python three_axes.py                                               one process
    torchrun --nproc-per-node 8 three_axes.py --dp 2 --pp 2 --tp 2     eight
    parallel101 run --world-size 8 --page run.html three_axes.py --dp 2 --pp 2 --tp 2

                 dp 0                 dp 1
             tp 0    tp 1         tp 0    tp 1      dp shares the batch, and sums gradients
      pp 0     0 ───── 1            4 ───── 5       pp shares the layers, and sends activations
               │       │            │       │       tp shares every matrix, and sums activations
      pp 1     2 ───── 3            6 ───── 7

On every mesh, losses and weights are those of one process, up to rounding. Ranks run on CPU cores
(gloo), or on GPUs (NCCL) if there is one for each. Left out is what isn't about the axes: mixed
precision, checkpoints, dropout, an embedding tied to the head.
"""

import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.text import CharTokenizer, TextBatches, read_text


# ── The mesh: a grid of ranks ───────────────────────────────────────────────────────────────────
def make_axes(dp, pp, tp):
    """Return this rank's group on each axis: the ranks that differ from it on that axis only."""
    grid = torch.arange(dp * pp * tp).view(dp, pp, tp)  # tp is last: it needs the fastest links
    # NCCL carries out a group's messages in order. Gradients must not wait behind activations, so
    # pp has two groups. The descriptions are those of torch's DeviceMesh: pictures show the axis.
    groups = {}
    for name, axis in (("dp", 0), ("pp", 1), ("pp_back", 1), ("tp", 2)):
        lines = grid.movedim(axis, -1).flatten(0, 1).tolist()  # for tp: [[0, 1], [2, 3], …]
        groups[name], _ = dist.new_subgroups_by_enumeration(lines, group_desc=f"mesh_{name[:2]}")
    return SimpleNamespace(**groups)


# ── Tensor parallel: each rank of tp has a block of every matrix ────────────────────────────────
#         ┌─ W₀ ─ gelu ─ V₀ ─┐          Column: some rows of W, so some of the outputs
#   x ─▶──┤                  ├─ + ─▶ y
#         └─ W₁ ─ gelu ─ V₁ ─┘          Row: the columns of V for these inputs
class Column(torch.autograd.Function):
    """y = x Wᵀ + b, with this rank's rows of W and b. x (batch, time, inputs) is whole."""

    @staticmethod
    def forward(ctx, x, W, b, tp):
        ctx.tp = tp
        ctx.save_for_backward(x, W)
        return F.linear(x, W, b)  # no message

    @staticmethod
    def backward(ctx, g):
        x, W = ctx.saved_tensors
        dx = p101.all_reduce_async(g @ W, group=ctx.tp)  # the sum of all ranks' parts is in flight
        dW, db = torch.einsum("bto,bti->oi", g, x), g.sum((0, 1))  # while these are computed
        return dx.wait(), dW, db, None


class Row(torch.autograd.Function):
    """y = x Wᵀ + b, with this rank's columns of W. x is its part of the inputs, and b is whole."""

    @staticmethod
    def forward(ctx, x, W, b, tp):
        ctx.save_for_backward(x, W)
        return p101.all_reduce(x @ W.T, group=tp) + b  # after the sum, so that b counts once

    @staticmethod
    def backward(ctx, g):
        x, W = ctx.saved_tensors
        return g @ W, torch.einsum("bto,bti->oi", g, x), g.sum((0, 1)), None  # no message


class Linear(nn.Linear):  # this rank's block of a linear layer; kind is Column or Row
    def __init__(self, kind, inputs, outputs, tp):
        super().__init__(inputs, outputs)
        self.kind, self.tp = kind, tp
        for p, dim in ((self.weight, 0), (self.bias, 0)) if kind is Column else ((self.weight, 1),):
            p.data = p.data.chunk(tp.size(), dim)[tp.rank()].clone()
            p.cut = True  # the other ranks of tp have other numbers

    def forward(self, x):
        return self.kind.apply(x, self.weight, self.bias, self.tp)


# ── The model: a GPT, as a list of layers ───────────────────────────────────────────────────────
class Embedding(nn.Module):  # (batch, time) tokens → (batch, time, width)
    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):  # attention, then an MLP; each rank of tp has some heads, some neurons
    def __init__(self, config, tp):
        super().__init__()
        width, self.head_width = config.width, config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = Linear(Column, width, 3 * width, tp)  # rows by head: q₀ k₀ v₀ q₁ k₁ v₁ …
        self.out = Linear(Row, width, width, tp)
        self.up, self.down = Linear(Column, width, 4 * width, tp), Linear(Row, 4 * width, width, tp)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.transpose(1, 2).unbind(-2)  # each (batch, heads, time, head_width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(config, tp):
    """Draw the whole model, the same on every rank, and keep this rank's blocks."""
    torch.manual_seed(0)
    blocks = [Block(config, tp) for _ in range(config.layers)]
    head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary))
    return nn.Sequential(Embedding(config), *blocks, head)


# ── Pipeline: each rank of pp has a stage, which is some of the layers ──────────────────────────
class Pipeline:
    """1F1B. With three stages and four microbatches:

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3          F  receive x, compute y forward, send y on
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3       B  receive ∂y, compute ∂x backward, send ∂x back
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3
    """

    def __init__(self, stage, axes, width):
        self.stage, self.axes, self.width = stage, axes, width
        self.rank, self.stages = axes.pp.rank(), axes.pp.size()
        self.first, self.last = self.rank == 0, self.rank == self.stages - 1

    def run(self, inputs, targets, samples):
        """Add up the gradients of all microbatches. Return this rank's part of the mean loss."""
        self.inputs, self.targets, self.samples = inputs, targets, samples
        self.loss = torch.zeros((), device=inputs[0].device)  # only the last stage adds to it
        self.held, self.sending = {}, []
        warm_up = min(len(inputs), self.stages - self.rank)
        for i in range(warm_up):
            self.forward(i)
        for i in range(len(inputs)):
            self.backward(i)
            if i + warm_up < len(inputs):
                self.forward(i + warm_up)
        for work, _ in self.sending:
            work.wait()
        return self.loss

    def forward(self, i):
        x = self.inputs[i]
        if not self.first:
            x = self.receive(i, self.axes.pp, self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.last:
            y = F.cross_entropy(y.flatten(0, 1), self.targets[i].flatten())
            y = y * (len(x) / self.samples)
            self.loss += y.detach()
        else:
            self.send(y.detach(), self.axes.pp, self.rank + 1)
        self.held[i] = x, y  # at most warm_up of them, whatever the number of microbatches

    def backward(self, i):
        x, y = self.held.pop(i)
        y.backward(None if self.last else self.receive(i, self.axes.pp_back, self.rank + 1))
        if not self.first:
            self.send(x.grad, self.axes.pp_back, self.rank - 1)

    def send(self, x, group, to):
        """Begin to send. Blocking sends deadlock if two stages send to each other at once."""
        self.sending.append((dist.isend(x, group=group, group_dst=to), x))

    def receive(self, i, group, source):
        x = torch.empty(*self.inputs[i].shape, self.width, device=self.loss.device)
        dist.recv(x, group=group, group_src=source)
        return x


# ── Data parallel, and ZeRO-1 ───────────────────────────────────────────────────────────────────
#   plain     reduce-scatter gradients ─▶ all-gather gradients ─▶ update all weights
#   ZeRO-1    reduce-scatter gradients ─▶ update this rank's share ─▶ all-gather weights
class Bucket:  # the weights of a layer side by side in one array, their gradients in another
    def __init__(self, layer, axes, zero_1):
        self.dp, self.zero_1 = axes.dp, zero_1
        self.parameters = sorted(layer.parameters(), key=lambda p: not hasattr(p, "cut"))
        sizes = [p.numel() for p in self.parameters]
        self.weights = torch.cat([p.detach().flatten() for p in self.parameters])
        self.gradients = torch.zeros_like(self.weights)
        arrays = self.weights.split(sizes), self.gradients.split(sizes)
        for p, weight, gradient in zip(self.parameters, *arrays):
            p.data, p.grad = weight.view_as(p), gradient.view_as(p)  # autograd adds to the array
            p.register_post_accumulate_grad_hook(self.count_down)
        self.shares, d = p101.split_sizes(sum(sizes), self.dp.size()), self.dp.rank()
        start, stop = sum(self.shares[:d]), sum(self.shares[: d + 1])
        self.share = slice(start, stop)  # this rank's 1/dp of the arrays
        # The optimizer takes an array for one long weight. With ZeRO-1, it only knows the share.
        self.trained = nn.Parameter(self.weights[self.share] if zero_1 else self.weights)
        self.trained.grad = self.gradients[self.share] if zero_1 else self.gradients
        # What tp doesn't cut comes last. The norm counts it on the first rank of tp only.
        cut = sum(p.numel() for p in self.parameters if hasattr(p, "cut"))
        self.counted = slice(start, stop if axes.tp.rank() == 0 else min(stop, cut))

    def begin(self, microbatches):
        self.gradients.zero_()
        self.missing = microbatches * len(self.parameters)

    def count_down(self, _):
        """autograd calls this when it has added to a gradient. The last time, the bucket leaves."""
        self.missing -= 1
        if self.missing == 0:  # while the array is in flight, backward goes on in earlier layers
            out = self.gradients[self.share]
            self.sum = p101.reduce_scatter_async(self.gradients, group=self.dp, out=out)

    def finish(self):
        """Wait for the sum over dp. Return the squares of the gradients that this rank counts."""
        self.sum.wait()
        if not self.zero_1:
            self.gather(self.gradients)
        return self.gradients[self.counted].square().sum()

    def gather(self, array):
        array.copy_(p101.all_gather(array[self.share], group=self.dp, sizes=self.shares))


# ── One step on all axes ────────────────────────────────────────────────────────────────────────
class Trainer:
    def __init__(self, config, axes, device, zero_1):
        layers, p, stages = gpt(config, axes.tp), axes.pp.rank(), axes.pp.size()
        self.stage = layers[len(layers) * p // stages : len(layers) * (p + 1) // stages].to(device)
        self.pipeline = Pipeline(self.stage, axes, config.width)
        self.buckets = [Bucket(layer, axes, zero_1) for layer in self.stage]
        self.trained = [bucket.trained for bucket in self.buckets]
        self.optimizer = torch.optim.AdamW(self.trained, config.lr)
        self.config, self.axes, self.zero_1 = config, axes, zero_1

    def step(self, *batch):
        """Train on (inputs, targets), the same on all ranks. Return the loss and gradient norm."""
        dp, tp, m = self.axes.dp, self.axes.tp, self.config.microbatches
        shares = (whole.tensor_split(dp.size())[dp.rank()].tensor_split(m) for whole in batch)
        for bucket in self.buckets:
            bucket.begin(m)
        loss = self.pipeline.run(*shares, samples=len(batch[0]))
        squares = sum(bucket.finish() for bucket in self.buckets)
        # No two ranks count the same squares, so one sum over all axes is right, whatever the mesh.
        # The loss goes along: it is on the last stage, and equal on all ranks of tp.
        loss, squares = p101.all_reduce(torch.stack([loss / tp.size(), squares]))
        nn.utils.clip_grads_with_norm_(self.trained, self.config.clip, squares.sqrt())
        self.optimizer.step()
        if self.zero_1:
            for bucket in self.buckets:
                bucket.gather(bucket.weights)
        return loss.item(), squares.sqrt().item()


# ── The program ─────────────────────────────────────────────────────────────────────────────────
def connect():
    """Join the ranks that torchrun has started, or be the only one. Return this rank's device."""
    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpus := torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(local)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", **alone)
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"ranks along {axis}")
    parser.add_argument("--zero-1", action="store_true", help="cut the optimizer's state along dp")
    parser.add_argument("--steps", type=int, default=100)
    args, device, text = parser.parse_args(), connect(), read_text()
    config = SimpleNamespace(layers=6, heads=4, width=64, context=64)
    config.batch, config.microbatches, config.lr, config.clip = 32, 4, 3e-3, 1.0
    if args.dp * args.pp * args.tp != dist.get_world_size():
        parser.error(f"expected dp × pp × tp = {dist.get_world_size()}, the number of ranks")
    dp, pp = config.batch // config.microbatches, config.layers + 2
    if args.dp > dp or args.pp > pp or config.heads % args.tp:
        parser.error(f"expected dp ≤ {dp}, pp ≤ {pp}, and a tp that divides {config.heads} heads")
    tokenizer = CharTokenizer(text)
    config.vocabulary = tokenizer.vocabulary
    batches = TextBatches(tokenizer.encode(text), config.batch, config.context)
    trainer = Trainer(config, make_axes(args.dp, args.pp, args.tp), device, args.zero_1)
    for step in range(args.steps):
        loss, norm = trainer.step(*(whole.to(device) for whole in batches(step)))
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3}   loss {loss:.3f}   gradient norm {norm:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
