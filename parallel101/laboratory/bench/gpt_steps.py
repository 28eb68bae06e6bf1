"""The training steps of a GPT that `bench verify` and `bench recompute` compare.

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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.laboratory.bench.comparison import Benchmark, Work
from parallel101.laboratory.bench.timed_training import adamw, alone
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss


def text(config: GPTConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same on each rank."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    tokens = torch.randint(config.vocabulary, (samples, config.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# ---- verify ----

CONFIG = GPTConfig(vocabulary=96, context=64, layers=4, heads=4, width=128)
TEXTS = 32
STEP = "a step of one process"
LAYOUTS: dict[str, Callable[..., Any]] = {
    "data parallel": p101.DataParallelTrainer,
    "ZeRO-3": p101.ShardedTrainer,
    "tensor parallel": p101.TensorParallelTrainer,
    "pipeline, 4 microbatches": partial(p101.PipelineTrainer, microbatches=4),
}


def hybrid(*arguments: Any) -> p101.HybridTrainer:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    return p101.HybridTrainer(*arguments, mesh=mesh, microbatches=4)


def step_of_first() -> Work:
    step, batch = alone(GPT(CONFIG), next_token_loss), text(CONFIG, TEXTS)
    return lambda: step(*batch) if dist.get_rank() == 0 else None


def verification(trainer_of: Callable[..., Any]) -> Work:
    trainer = trainer_of(GPT(CONFIG), next_token_loss, adamw)
    return partial(trainer.verify, *trainer.share(text(CONFIG, TEXTS)))


VERIFY = [
    Benchmark(
        f"`verify`, once, on {{}}: a GPT of 4 layers and width 128, {TEXTS} texts",
        {STEP: step_of_first, **{name: partial(verification, of) for name, of in layouts.items()}},
        {"/ a step": STEP},
        ranks=(ranks,),
        options=options,
    )
    for layouts, ranks, options in (
        (LAYOUTS, 2, {}),
        ({"dp 2 × tp 2 × pp 2": hybrid}, 8, {"backend": "sim"}),
    )
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


def recomputing(way: str) -> p101.DataParallelTrainer:
    attention, recompute = WAYS[way]
    model = GPT(replace(LARGER, attention=attention))
    return p101.DataParallelTrainer(
        model, next_token_loss, adamw, recompute=recompute, verify=False
    )


def recomputing_step(way: str) -> Work:
    return partial(recomputing(way).step, *text(LARGER, 8))


def activation_bytes(way: str) -> int:
    trainer, batch = recomputing(way), text(LARGER, 8)
    trainer.step(*batch)
    with p101.count_activations(trainer) as activations:
        trainer.step(*batch)
    return activations.peak


RECOMPUTE = [
    Benchmark(
        f"`recompute=`, on {{}}: a GPT of {LARGER.layers} layers, width {LARGER.width} and "
        f"{LARGER.heads} heads, 8 texts of {LARGER.context} tokens",
        {way: partial(recomputing_step, way) for way in WAYS},
        {f"/ {KEPT}": KEPT},
        ranks=(1,),
        extra=("activations, MB", activation_bytes),
        note="Activations: counted, at the peak.",
    )
]
