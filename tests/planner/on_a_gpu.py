"""Trains GPTs on this machine's GPU, and holds the planner's seconds and bytes of a step to it.

    python -m tests.planner.on_a_gpu --device H100

One GPU shows what the model says of kernels and of memory, and nothing of links. Without a GPU it
runs a tiny model on the CPU, to show that it works.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import parallel101 as p101
from parallel101.models import GPT, GPTConfig

# width, layers, heads, vocabulary, tokens of a sample; samples of a step, and of a microbatch
MODELS = {
    "0.4B": ((1024, 24, 16, 50304, 2048), 16, 4),
    "1.3B": ((2048, 24, 16, 50304, 2048), 8, 2),
    "2.7B": ((2560, 32, 32, 50304, 2048), 4, 1),
    "1.8B, wide": ((4096, 8, 32, 50304, 4096), 4, 1),
}
TINY = {"tiny": ((64, 2, 4, 128, 32), 4, 2)}
STEPS = 6


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model_of(width: int, layers: int, heads: int, vocabulary: int, context: int) -> GPT:
    with torch.device("meta"):  # the model's own weights are drawn on the CPU, which takes minutes
        model = GPT(GPTConfig(vocabulary, context=context, layers=layers, heads=heads, width=width))
    model.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02)
    return model


def compare(name: str, sizes: tuple, samples: int, microbatch: int, recompute: str, device: str):
    """Print a line: seconds and bytes of a step, as measured and as planned."""
    layout = {"tp": 1, "pp": 1, "microbatch": microbatch, "recompute": recompute}
    planned = p101.plan(
        ",".join(map(str, sizes)),
        gpus=1,
        device=device,
        batch_tokens=samples * sizes[-1],
        layout=layout,
        simulate=0,
        progress=False,
    )[0]
    on_gpu = torch.cuda.is_available()
    trainer = planned.trainer(
        model_of(*sizes),
        cross_entropy,
        lambda weights: torch.optim.AdamW(weights, lr=1e-4, fused=on_gpu),
        verify=False,
    )
    tokens = torch.randint(0, sizes[3], (samples, sizes[-1] + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seconds = []
    for _ in range(2 + STEPS):
        began = time.perf_counter()
        trainer.step(inputs, targets)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    measured = median(seconds[2:])
    (memory,) = planned.memory
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    print(
        f"{name:10} recompute {recompute:9} {measured:7.4f} s, planned {planned.seconds:7.4f} "
        f"({planned.seconds / measured - 1:+.1%});  {peak / 1e9:6.2f} GB, planned "
        f"{memory.total / 1e9:6.2f}" + (f" ({memory.total / peak - 1:+.1%})" if peak else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="H100", help="the planner's name for this GPU")
    device = parser.parse_args().device
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    torch.set_default_device("cuda" if on_gpu else "cpu")
    for name, (sizes, samples, microbatch) in (MODELS if on_gpu else TINY).items():
        for recompute in ("none", "full"):
            compare(name, sizes, samples, microbatch, recompute, device)
            gc.collect()  # a trainer is part of a reference cycle
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
