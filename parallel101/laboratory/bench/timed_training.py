"""The training steps that `bench training`, `tensor`, `pipeline`, `verify` and `recompute` compare.

For the first three the model is 8 × Linear(1024) + GELU with AdamW, and the whole batch has 256
samples. torch's trainers are compared with ours:

data      each rank has its share of the samples   DistributedDataParallel, fully_shard (FSDP2)
tensor    each rank has a part of each layer       DTensor's parallelize_module: Linear layers in
                                                   pairs, by column and by row
pipeline  each rank has a part of the layers       torch.distributed.pipelining: GPipe, 1F1B,
                                                   interleaved

Each is a function of the whole model that returns its step. In a table all train the same thing;
tests/bench/test_bench.py compares their losses with one process. Peak memory is measured in a run
of its own for each, because a process reports only one peak, the highest.

For the other two the model is a GPT:

verify      Trainers call it once, before their first step. It is compared with a step of one
            process on the whole batch. On real ranks the first rank takes this step, while the
            others wait. On the sim all virtual ranks share one core, and the seconds are real ones.
recompute   One rank trains, and keeps all activations, or computes some again. The activations are
            counted (`p101.count_activations`) in a step that is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import parallel101 as p101
from parallel101.laboratory.bench.comparison import Benchmark, Work, peak_memory
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss

WIDTH, DEPTH, BATCH = 1024, 8, 256
MICROBATCHES = 8

# returns the loss, which torch's pipelines know on the last stage only
TrainingStep = Callable[[Tensor, Tensor], Any]
StepOf = Callable[[nn.Sequential], TrainingStep]


def whole_model(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.GELU()))
    )


def batch_of_rank(cut: bool, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: this rank's share if `cut`, otherwise the whole batch."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    inputs, targets = (torch.randn(BATCH, width, generator=generator) for _ in range(2))
    n, rank = (dist.get_world_size(), dist.get_rank()) if cut else (1, 0)
    return inputs.tensor_split(n)[rank].clone(), targets.tensor_split(n)[rank].clone()


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def alone(model: nn.Module, loss_fn: Callable[..., Tensor] = mse_loss) -> TrainingStep:
    """Return a training step without communication, to time the rest of a step."""
    optimizer = adamw(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ours(trainer: Callable[..., Any], **options: Any) -> StepOf:
    """Return the step of one of our trainers."""
    return lambda model: trainer(model, mse_loss, adamw, verify=False, **options).step


pipeline = partial(ours, p101.PipelineTrainer, microbatches=MICROBATCHES)

# ---- data: each rank has its share of the samples ----


def ddp(model: nn.Module) -> TrainingStep:
    return alone(nn.parallel.DistributedDataParallel(model))


def fsdp(model: nn.Module) -> TrainingStep:
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return alone(model)


# ---- tensor: each rank has a part of each layer, and the whole batch ----


def dtensor(model: nn.Module) -> TrainingStep:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    linears = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    plan: Any = {name: ColwiseParallel() for name in linears[::2]}
    plan |= {name: RowwiseParallel() for name in linears[1::2]}
    return alone(parallelize_module(model, mesh, plan))


# ---- pipeline: each rank has a part of the layers; its first rank reads the inputs, its last one
# the targets ----


def torchs_pipeline(schedule: str, chunks: int, model: nn.Sequential) -> TrainingStep:
    """Return the step of a schedule of torch.distributed.pipelining, given by name."""
    # two seconds, which the other tables' ranks need not spend
    from torch.distributed import pipelining

    rank, n, device = dist.get_rank(), dist.get_world_size(), torch.get_default_device()
    total, each = n * chunks, len(model) // (n * chunks)
    stages = [
        pipelining.PipelineStage(model[k * each : (k + 1) * each], k, total, device)
        for k in range(rank, total, n)
    ]
    optimizer = adamw([p for stage in stages for p in stage.submod.parameters()])
    run = getattr(pipelining, f"Schedule{schedule}")(
        stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=mse_loss
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = [inputs] if rank == 0 else []
        target = targets if rank == n - 1 else None
        run.step(*given, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step


TWO = "2 stages a rank"
# by kind: in a table of data, each rank trains on its share of the batch
SIDES: dict[str, dict[str, StepOf]] = {
    "data": {
        "no communication": alone,
        "torch DDP": ddp,
        "DataParallelTrainer": ours(p101.DataParallelTrainer),
        "torch FSDP2": fsdp,
        **{
            f"ShardedTrainer, ZeRO stage {stage}": ours(p101.ShardedTrainer, zero_stage=stage)
            for stage in (1, 2, 3)
        },
    },
    "tensor": {
        "torch DTensor": dtensor,
        "TensorParallelTrainer": ours(p101.TensorParallelTrainer),
    },
    "pipeline": {
        "torch GPipe": partial(torchs_pipeline, "GPipe", 1),
        "PipelineTrainer, gpipe": pipeline(schedule="gpipe"),
        "torch 1F1B": partial(torchs_pipeline, "1F1B", 1),
        "PipelineTrainer, 1f1b": pipeline(schedule="1f1b"),
        f"torch interleaved 1F1B, {TWO}": partial(torchs_pipeline, "Interleaved1F1B", 2),
        f"PipelineTrainer, interleaved, {TWO}": pipeline(schedule="interleaved", chunks=2),
        "PipelineTrainer, zb-h1": pipeline(schedule="zb-h1"),
        "PipelineTrainer, zb-h2": pipeline(schedule="zb-h2"),
    },
}


def prepared(kind: str, name: str) -> Work:
    return partial(SIDES[kind][name](whole_model()), *batch_of_rank(kind == "data"))


def peak_bytes(kind: str, name: str) -> int:
    """Return the bytes by which a side's steps raise the peak memory of this process.

    On GPUs it is the peak of what torch has allocated.
    """
    peak = torch.cuda.max_memory_allocated if dist.get_backend() == "nccl" else peak_memory
    before, work = peak(), prepared(kind, name)
    for _ in range(4):
        work()
    return peak() - before


def training_table(title: str, kind: str, *peers: str) -> Benchmark:
    """Return the comparison of SIDES[kind] with those that are named in `peers`."""
    model = f"{DEPTH} × Linear({WIDTH}) + GELU, batch {BATCH}, AdamW"
    model += f", {MICROBATCHES} microbatches" * (kind == "pipeline")
    return Benchmark(
        f"A {title} step on {{}}: {model}",
        {name: partial(prepared, kind, name) for name in SIDES[kind]},
        {f"/ {peer.removeprefix('torch ')}": peer for peer in peers},
        extra=("peak MB", partial(peak_bytes, kind)),
        note="Peak: the most memory of a rank's process, minus what it had before the model.",
    )


TRAINING = training_table("training", "data", "torch DDP", "torch FSDP2")
TENSORS = training_table("tensor-parallel", "tensor", "torch DTensor")
PIPELINES = training_table("pipeline", "pipeline", "torch GPipe", "torch 1F1B")

# ---- a GPT ----


def text(config: GPTConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same on each rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    tokens = torch.randint(config.vocabulary, (samples, config.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# ---- verify ----

CONFIG = GPTConfig(vocabulary=96, context=64, layers=4, heads=4, width=128)
TEXTS = 32
STEP = "a step of one process"


def hybrid(*arguments: Any) -> p101.HybridTrainer:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    return p101.HybridTrainer(*arguments, mesh=mesh, microbatches=4)


def step_of_first() -> Work:
    step = partial(alone(GPT(CONFIG), next_token_loss), *text(CONFIG, TEXTS))
    return step if dist.get_rank() == 0 else lambda: None


def verification(trainer_of: Callable[..., Any]) -> Work:
    trainer = trainer_of(GPT(CONFIG), next_token_loss, adamw)
    return partial(trainer.verify, *trainer.share(text(CONFIG, TEXTS)))


def verify_table(ranks: int, trainers: dict[str, Callable[..., Any]], **options: Any) -> Benchmark:
    """Return the comparison of these trainers' `verify` with a step of one process."""
    return Benchmark(
        f"`verify`, once, on {{}}: a GPT of 4 layers and width 128, {TEXTS} texts",
        {STEP: step_of_first} | {name: partial(verification, trainers[name]) for name in trainers},
        {"/ a step": STEP},
        ranks=(ranks,),
        options=options,
    )


TRAINERS = {
    "data parallel": p101.DataParallelTrainer,
    "ZeRO-3": p101.ShardedTrainer,
    "tensor parallel": p101.TensorParallelTrainer,
    "pipeline, 4 microbatches": partial(p101.PipelineTrainer, microbatches=4),
}
VERIFY = [
    verify_table(2, TRAINERS),
    verify_table(8, {"dp 2 × tp 2 × pp 2": hybrid}, backend="sim"),
]

# ---- recompute ----

LARGER = GPTConfig(vocabulary=96, context=128, layers=8, heads=8, width=256)
KEPT = "all kept, attention unfused"
WAYS = {  # the attention, recompute=
    KEPT: ("unfused", "none"),
    "selective": ("unfused", "selective"),
    "full": ("unfused", "full"),
    "all kept, attention fused": ("fused", "none"),
    "full, attention fused": ("fused", "full"),
}


def recomputing(way: str) -> tuple[p101.DataParallelTrainer, Work]:
    """Return a trainer that recomputes in this way, and its step."""
    attention, recompute = WAYS[way]
    model = GPT(replace(LARGER, attention=attention))
    trainer = p101.DataParallelTrainer(
        model, next_token_loss, adamw, recompute=recompute, verify=False
    )
    return trainer, partial(trainer.step, *text(LARGER, 8))


def recomputing_step(way: str) -> Work:
    return recomputing(way)[1]


def activation_bytes(way: str) -> int:
    trainer, step = recomputing(way)
    step()
    with p101.count_activations(trainer) as activations:
        step()
    return activations.peak


RECOMPUTE = Benchmark(
    f"`recompute=`, on {{}}: a GPT of {LARGER.layers} layers, width {LARGER.width} and "
    f"{LARGER.heads} heads, 8 texts of {LARGER.context} tokens",
    {way: partial(recomputing_step, way) for way in WAYS},
    {f"/ {KEPT}": KEPT},
    ranks=(1,),
    extra=("activations, MB", activation_bytes),
    note="Activations: counted, at the peak.",
)
